"""An analysis on a cluster: the same workflow, with a profile that submits its jobs."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvpflow.errors import HvpflowError, nearest
from hvpflow.pipeline.estimate import measure_estimate
from hvpflow.pipeline.launch import run_analysis
from hvpflow.pipeline.plan import Plan, make_plan
from hvpflow.pipeline.settings import Config, workflow_root
from hvpflow.pipeline.status import duration, size
from hvpflow.yaml_files import read_yaml

CUDA_DEFAULTS: dict[str, Any] = {"amp": True, "hvp_batch_size": 64}
"""What a GPU of a cluster is used well with, where the command line says nothing else."""


def submitted_settings(analysis: dict[str, Any]) -> dict[str, Any]:
    """The analysis settings of a command line, with a cluster's defaults: CUDA, and there what suits it."""
    settings = {"device": "cuda", **analysis}
    if not str(settings["device"]).startswith("cuda"):
        return settings
    defaults = dict(CUDA_DEFAULTS)
    if settings.get("dtype") == "float64":
        del defaults["amp"]
    return defaults | settings


def submit_analysis(
    config: Config,
    options: Sequence[str],
    *,
    profile: str,
    jobs: int | None,
    dry_run: bool,
    say: Callable[[str], None],
) -> None:
    """Analyse by the workflow, each measurement a job of the cluster.

    Args:
        config: with absolute paths.
        options: further Snakemake options; they win over the profile's.
        profile: a shipped profile's name, or a directory.
        jobs: at most so many at a time; None: what the profile says.
        dry_run: list the pending jobs with their resources and the GPU time that they need, and submit nothing.

    Raises:
        HvpflowError: refused before computing, or a job failed.
    """
    directory = find_profile(profile)
    check_executor(directory, dry_run=dry_run)
    lines = pending_lines(make_plan(config))
    submission = ["--profile", str(directory), *(["--jobs", str(jobs)] if jobs is not None else []), *options]
    if not dry_run:
        say(lines[-1])
    run_analysis(config, submission, cores=None, dry_run=dry_run)
    if dry_run:
        for line in lines:
            say(line)


def find_profile(name: str) -> Path:
    """Directory of a profile: one given as a path, or a shipped one's name.

    Raises:
        HvpflowError: there is none.
    """
    shipped = workflow_root() / "profiles"
    for directory in (Path(name), shipped / name):
        if (directory / "config.yaml").is_file() or (directory / "profile.yaml").is_file():
            return directory.absolute()
    known = sorted(path.parent.name for path in shipped.glob("*/config.yaml"))
    raise HvpflowError(
        f"profile {name!r} is neither a directory with a config.yaml nor a shipped profile{nearest(name, known)}; "
        f"shipped: {', '.join(known)}"
    )


def check_executor(profile: Path, *, dry_run: bool) -> None:
    """Say what a profile's executor needs and this machine lacks, before Snakemake says it less clearly.

    Raises:
        HvpflowError: Snakemake's plugin for Slurm is not installed, or there is no Slurm to submit to.
    """
    path = next(path for name in ("config.yaml", "profile.yaml") if (path := profile / name).is_file())
    if read_yaml(path).get("executor") != "slurm":
        return
    if importlib.util.find_spec("snakemake_executor_plugin_slurm") is None:
        raise HvpflowError(f"{path} submits to Slurm, which Snakemake does by a plugin: pip install 'hvpflow[slurm]'")
    if not dry_run and shutil.which("sbatch") is None:
        raise HvpflowError(
            f"{path} submits to Slurm, but there is no sbatch here: run this on a login node of the cluster, or use "
            "hvpflow analyze"
        )


def pending_lines(plan: Plan) -> list[str]:
    """A table of the measurements that are still to be made, and as its last line their number and time."""
    jobs = [job for job in plan.measurements if not plan.measure_path(*job).is_file()]
    if not jobs:
        return ["No measurement is pending."]
    estimate = measure_estimate(plan)
    gpus = plan.gpus(plan.config.analysis.device)
    expected, memory = duration(estimate.seconds), size(estimate.memory_mb * 1e6)
    names = [f"{checkpoint} {case} {shard}" for checkpoint, case, shard in jobs]
    width = max(map(len, names))
    lines = ["", f"{'measurement':<{width}}  GPUs  expected time  memory of the first try"]
    lines += [f"{name:<{width}}  {gpus:>4}  {expected:>13}  {memory:>23}" for name in names]
    if estimate.measured_jobs:
        basis = f"at the rate of {estimate.measured_jobs} finished measurements"
    else:
        basis = "at an assumed, low rate: finish one measurement, and the next estimate is from its time"
    unit = "GPU" if gpus else "worker"
    plural = "job" if len(jobs) == 1 else "jobs"
    total = duration(len(jobs) * estimate.seconds)
    return [*lines, f"{len(jobs)} {plural} pending, together about {total} of one {unit}, {basis}"]
