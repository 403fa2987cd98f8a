"""The small programs that workflow rules call: ``python -m hvpflow.pipeline.steps STEP --config FILE …``.

One function a rule. Each says its progress on stderr and into ``--log``; a user's mistake ends as one line of text and
status 1, an interruption that saved its progress as status 75.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvpflow.errors import HvpflowError
from hvpflow.files import read_record, write_record
from hvpflow.pipeline.plan import Plan, inspected, make_plan, settings_digest, state_of
from hvpflow.pipeline.reporting import Reporter, reported
from hvpflow.pipeline.settings import Config, load_config

Progress = Callable[[str], None]


def prepare(config: Config, arguments: argparse.Namespace, progress: Progress) -> None:
    """Make the token cache."""
    from hvpflow.data.prepare import prepare_cache
    from hvpflow.pipeline.preparation import preparation_request, trained_recipe

    granted = threads_of(config, arguments)
    workers = min(granted, trained_recipe(config).data.prepare_workers or granted)
    prepare_cache(preparation_request(config), cache_directory(config), num_workers=workers, progress=progress)


def train(config: Config, arguments: argparse.Namespace, progress: Progress) -> None:
    """Train the run, or continue its training."""
    from hvpflow.data.cache import TokenCache
    from hvpflow.pipeline.preparation import trained_recipe
    from hvpflow.training.train import train_run

    recipe = trained_recipe(config)
    set_torch_threads(threads_of(config, arguments))
    cache = TokenCache.open(cache_directory(config))
    train_run(recipe, cache, config.run_directory, progress=progress)


def inspect(config: Config, arguments: argparse.Namespace, progress: Progress) -> None:
    """Check and identify one checkpoint."""
    from hvpflow.runs.inspect import inspect_checkpoint

    plan = make_plan(config)
    record = inspect_checkpoint(plan.run, arguments.checkpoint, workers=plan.reads_workers)
    write_record(plan.inspect_path(arguments.checkpoint), record)
    progress(f"{arguments.checkpoint}: sound, weights {record['weights_hash'][:12]}")


def measure(config: Config, arguments: argparse.Namespace, progress: Progress) -> None:
    """Measure one shard of one (checkpoint, case)'s directions."""
    from hvpflow.data.cache import TokenCache
    from hvpflow.measure.measurement import measure_shard
    from hvpflow.measure.store import Store

    if arguments.settings != settings_digest(config):
        raise HvpflowError(f"{arguments.config} changed since this job was planned; repeat the command")
    plan = make_plan(config)
    set_torch_threads(threads_of(config, arguments))
    record = measure_shard(
        plan.run,
        arguments.checkpoint,
        TokenCache.open(plan.cache_directory),
        arguments.case,
        config.analysis.measured,
        inspect_record=read_record(plan.inspect_path(arguments.checkpoint)),
        shard=arguments.shard,
        num_shards=config.analysis.shards,
        device=config.analysis.device,
        store=Store(plan.output / "store"),
        progress=progress,
    )
    write_record(plan.measure_path(arguments.checkpoint, arguments.case, arguments.shard), record)


def samples(config: Config, arguments: argparse.Namespace, progress: Progress) -> None:
    """Merge a (checkpoint, case)'s shards into its published samples, with statistics."""
    from hvpflow.data.cache import TokenCache
    from hvpflow.data.epochs import analysis_epoch
    from hvpflow.measure.records import check_record, record_identity
    from hvpflow.report.samples import merge_shards

    plan = make_plan(config)
    checkpoint, case = arguments.checkpoint, arguments.case
    inspect_record = check_aliases(plan, checkpoint, arguments.aliases)
    data = analysis_epoch(plan.recipe.sampling(), TokenCache.open(plan.cache_directory), case).identity
    records = []
    for shard in plan.shards:
        path = plan.measure_path(checkpoint, case, shard)
        record = read_record(path)
        check_record(record, str(path))
        expected = record_identity(
            config.analysis.measured,
            plan.recipe,
            weights_hash=inspect_record["weights_hash"],
            result_key=inspect_record["result_key"],
            data=data,
            shard=shard,
            num_shards=len(plan.shards),
        )
        if record["identity"] != expected:
            raise HvpflowError(
                f"{path} was measured on other weights, data or settings; delete it and repeat the command"
            )
        records.append(record)
    merged = merge_shards(records, inspect_record=inspect_record)
    for warning in merged.get("warnings", ()):
        progress(f"note on {checkpoint} ({case}): {warning}")
    write_record(plan.samples_path(checkpoint, case), merged)


def summary(config: Config, arguments: argparse.Namespace, progress: Progress) -> None:
    """Write the manifest and the summary of all samples."""
    from hvpflow.pipeline.publication import publish_summary

    publish_summary(make_plan(config))


def figures(config: Config, arguments: argparse.Namespace, progress: Progress) -> None:
    """Draw the figures of the summary."""
    from hvpflow.pipeline.publication import draw

    draw(config, Path(config.output), training_norms=config.analysis.training_norms)


def check_aliases(plan: Plan, checkpoint: str, presumed: Sequence[str]) -> dict[str, Any]:
    """Return the inspect record of ``checkpoint``, having checked that its presumed aliases hold the same state.

    The presumption is that of the workflow which planned this job; by now the inspect records are there to tell.

    Raises:
        HvpflowError: a presumption proved wrong, or a record is missing.
    """
    record = inspected(plan, checkpoint)
    if record is None:
        raise HvpflowError(f"{checkpoint} was not inspected; repeat the command")
    for name in presumed:
        other = inspected(plan, name)
        if other is None or state_of(other) != state_of(record):
            raise HvpflowError(
                f"{name} was presumed from its name to hold the same state as {checkpoint}, but does not; repeat the "
                "command, and both are measured"
            )
    return record


def threads_of(config: Config, arguments: argparse.Namespace) -> int:
    """CPU threads for this process: what was granted, or with the machine to itself what ``cpu_threads`` says."""
    if not arguments.alone:
        return arguments.threads or usable_cpus()
    # Inside an allocation the machine is shared, whatever the affinity mask says: sites differ in what they enforce.
    for variable in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable])
    wanted = config.analysis.cpu_threads
    return usable_cpus() if wanted == "auto" else wanted


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_torch_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def cache_directory(config: Config) -> Path:
    """Where a configured run's token cache lies."""
    from hvpflow.pipeline.preparation import trained_recipe

    return Path(config.analysis.cache_dir or trained_recipe(config).data.cache_dir)


STEPS: dict[str, Callable[[Config, argparse.Namespace, Progress], None]] = {
    "prepare": prepare,
    "train": train,
    "inspect": inspect,
    "measure": measure,
    "samples": samples,
    "summary": summary,
    "figures": figures,
}


def main(argv: list[str] | None = None) -> int:
    """Run one step; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m hvpflow.pipeline.steps", description=__doc__, allow_abbrev=False)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--config", type=Path, required=True, help="the merged configuration")
    parser.add_argument("--checkpoint", help="file name in the run directory")
    parser.add_argument("--aliases", nargs="*", default=(), help="checkpoints presumed to hold the same state")
    parser.add_argument("--case", choices=("seen", "unseen"))
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--settings", help="digest of the numerical settings that the job was planned with")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads granted")
    parser.add_argument("--alone", action="store_true", help="the machine is this process's; threads from cpu_threads")
    parser.add_argument("--log", type=Path, help="file that also takes what is said")
    arguments = parser.parse_args(argv)
    with Reporter(arguments.log) as reporter:
        return reported(
            lambda: STEPS[arguments.step](load_config(arguments.config), arguments, reporter.say), reporter.say
        )


if __name__ == "__main__":
    sys.exit(main())
