"""The command line: each command turns its options into a configuration, and runs the workflow or one step of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hvpflow import __version__
from hvpflow.errors import HvpflowError, nearest
from hvpflow.pipeline.reporting import Reporter, reported

EPILOG = "Settings of every command are keys of a YAML configuration too; see config/README.md."


class Parser(argparse.ArgumentParser):
    """A parser whose refusal of an unknown option names the nearest known one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith("unrecognized arguments: "):
            known = [option for action in self._actions for option in action.option_strings]
            hint = nearest(message.split(": ", 1)[1].split()[0].split("=")[0], known)
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}{hint}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status: 0 done, 1 refused or failed, 2 misused, 75 repeat to continue."""
    words = list(sys.argv[1:] if argv is None else argv)
    words, snakemake_options = _split(words)
    parser = make_parser()
    arguments, rest = parser.parse_known_args(words)
    if rest:
        arguments.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if snakemake_options and arguments.command not in ("analyze", "submit-analysis"):
        arguments.parser.error("only analyze and submit-analysis pass options after -- on to Snakemake")
    arguments.snakemake_options = snakemake_options
    with Reporter(None) as reporter:
        return reported(lambda: arguments.work(arguments, reporter.say), reporter.say)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(
        prog="hvpflow", description="Curvature of a language model's loss along its training.", epilog=EPILOG
    )
    parser.add_argument("--version", action="version", version=f"hvpflow {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True, parser_class=Parser)

    for name, work, help_text in (
        ("prepare", _prepare, "make the token cache of a recipe"),
        ("train", _train, "train a recipe, or continue its training"),
        ("evaluate", _evaluate, "loss of a checkpoint on the validation split"),
    ):
        command = _command(commands, name, work, help_text)
        command.add_argument("--config", type=Path, required=True, help="a configuration or a recipe, YAML")
        command.add_argument(
            "--set",
            dest="overrides",
            action="append",
            default=[],
            metavar="dotted.key=value",
            help="override one setting",
        )
        command.add_argument("--threads", type=_positive, help="CPU threads (default: every CPU)")
        if name == "evaluate":
            command.add_argument("--checkpoint", default="final.pt", help="file name in the run directory")
            command.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto")

    analyze = _command(commands, "analyze", _analyze, "measure the curvature along a run's checkpoints")
    _add_analysis_options(analyze)
    analyze.add_argument(
        "--cores", type=_positive, default=1, metavar="N", help="CPU cores that Snakemake may use (default 1 job)"
    )
    submit = _command(commands, "submit-analysis", _submit, "analyze, each measurement a job of a Slurm cluster")
    _add_analysis_options(submit)
    submit.add_argument("--no-amp", dest="amp", action="store_false", default=None, help="float32 matrix products")
    submit.add_argument("--jobs", type=_positive, metavar="N", help="jobs submitted at a time (default: the profile's)")
    submit.add_argument(
        "--profile", default="slurm", metavar="NAME|DIR", help="Snakemake profile of the cluster (default slurm)"
    )
    plot = _command(commands, "plot-analysis", _plot, "draw the figures of a finished analysis again")
    plot.add_argument("--output", type=Path, required=True)
    plot.add_argument("--training-norms", action="store_true", help="add the gradient norms logged in training")
    status = _command(commands, "status", _status, "what is done and pending, time left, disk used")
    status.add_argument("--output", type=Path, required=True)
    clean = _command(commands, "clean", _clean, "remove what the published results do not need")
    clean.add_argument("--output", type=Path, required=True)
    clean.add_argument("--dry-run", action="store_true", help="only say what would go")
    return parser


def _command(commands: Any, name: str, work: Any, help_text: str) -> Parser:
    command = commands.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
    command.set_defaults(work=work, parser=command)
    return command


def _add_analysis_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--run", type=Path, required=True, help="run directory")
    add("--checkpoints", nargs="+", required=True, metavar="NAME", help="file names in the run directory, or all")
    add("--output", type=Path, required=True, help="directory of the results")
    add("--data-case", choices=("seen", "unseen", "both"))
    add("--noise-samples", metavar="N|all", help="gradient noise directions")
    add("--random-samples", type=int, metavar="N", help="Rademacher directions")
    add("--seed", type=int, metavar="N")
    add("--cache-dir", type=Path, metavar="DIR", help="token cache, where resolved.yaml names another place")
    add("--device", metavar="cpu|cuda|cuda:N|auto")
    add("--dtype", choices=("float32", "float64"))
    add("--amp", action="store_true", default=None, help="bfloat16 matrix products")
    add("--hvp-batch-size", type=int, metavar="N", help="sequences of one curvature batch")
    add("--directions-per-pass", type=int, metavar="K", help="directions that share one pass; more need more memory")
    add("--engine", choices=("taylor", "jvp-of-grad"), help="jvp-of-grad: slower, for models without rules")
    add("--shards", type=int, metavar="N", help="jobs that each checkpoint and case is split over")
    add("--no-tf32", dest="tf32", action="store_false", default=None, help="float32 products in full precision on CUDA")
    add("--no-compile-hvp", dest="compile_hvp", action="store_false", default=None)
    add("--no-consensus", dest="consensus", action="store_false", default=None, help="no workers' consensus errors")
    add("--no-plots", dest="plots", action="store_false", default=None, help="no figures")
    add("--dry-run", action="store_true", help="only list the pending jobs")


ANALYSIS_OPTIONS = (
    *("data_case", "noise_samples", "random_samples", "seed", "device", "dtype", "amp", "hvp_batch_size", "engine"),
    *("directions_per_pass", "shards", "tf32", "compile_hvp", "consensus", "plots"),
)


def _analyze(arguments: argparse.Namespace, say: Any) -> None:
    from hvpflow.pipeline.launch import run_analysis

    config = _analysis_config(arguments, _analysis_settings(arguments))
    words = run_analysis(config, arguments.snakemake_options, cores=arguments.cores, dry_run=arguments.dry_run)
    if words:
        say(words)


def _submit(arguments: argparse.Namespace, say: Any) -> None:
    from hvpflow.pipeline.submit import submit_analysis, submitted_settings

    submit_analysis(
        _analysis_config(arguments, submitted_settings(_analysis_settings(arguments))),
        arguments.snakemake_options,
        profile=arguments.profile,
        jobs=arguments.jobs,
        dry_run=arguments.dry_run,
        say=say,
    )


def _analysis_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The analysis section that the command line asks for: only what it names."""
    analysis = {name: getattr(arguments, name) for name in ANALYSIS_OPTIONS if getattr(arguments, name) is not None}
    analysis["checkpoints"] = "all" if arguments.checkpoints == ["all"] else arguments.checkpoints
    samples = analysis.get("noise_samples")
    if samples is not None and samples != "all":
        try:
            analysis["noise_samples"] = int(samples)
        except ValueError:
            raise HvpflowError(f"--noise-samples is {samples!r}, expected a whole number or all") from None
    if arguments.cache_dir is not None:
        analysis["cache_dir"] = str(arguments.cache_dir.absolute())
    return analysis


def _analysis_config(arguments: argparse.Namespace, analysis: dict[str, Any]) -> Any:
    from hvpflow.pipeline.settings import config_from_mapping

    return config_from_mapping(
        {"run": str(arguments.run.absolute()), "output": str(arguments.output.absolute()), "analysis": analysis}
    )


def _prepare(arguments: argparse.Namespace, say: Any) -> None:
    _step("prepare", arguments, say)


def _train(arguments: argparse.Namespace, say: Any) -> None:
    from hvpflow.pipeline.steps import cache_directory

    config = _configured(arguments)
    if not (cache_directory(config) / "manifest.json").is_file():
        _step("prepare", arguments, say)
    _step("train", arguments, say)
    say(f"Trained: {config.run_directory}")


def _step(name: str, arguments: argparse.Namespace, say: Any) -> None:
    from hvpflow.pipeline.steps import STEPS

    arguments.alone = arguments.threads is None
    STEPS[name](_configured(arguments), arguments, say)


def _evaluate(arguments: argparse.Namespace, say: Any) -> None:
    import json

    from hvpflow.data.cache import TokenCache
    from hvpflow.pipeline.steps import set_torch_threads, usable_cpus
    from hvpflow.runs.run import find_cache, open_run
    from hvpflow.training.train import evaluate_checkpoint

    config = _configured(arguments)
    run = open_run(config.run_directory)
    override = config.analysis.cache_dir
    cache = TokenCache.open(find_cache(run, Path(override) if override else None))
    set_torch_threads(arguments.threads or usable_cpus())
    print(json.dumps(evaluate_checkpoint(run, arguments.checkpoint, cache, device=arguments.device), indent=2))


def _configured(arguments: argparse.Namespace) -> Any:
    from hvpflow.pipeline.settings import load_config

    return load_config(arguments.config, arguments.overrides)


def _plot(arguments: argparse.Namespace, say: Any) -> None:
    from hvpflow.pipeline.output import open_output
    from hvpflow.pipeline.publication import draw

    for path in draw(open_output(arguments.output), arguments.output, training_norms=arguments.training_norms):
        say(str(path))


def _status(arguments: argparse.Namespace, say: Any) -> None:
    from hvpflow.pipeline.output import open_output
    from hvpflow.pipeline.plan import make_plan
    from hvpflow.pipeline.status import status_lines

    for line in status_lines(make_plan(open_output(arguments.output))):
        print(line)


def _clean(arguments: argparse.Namespace, say: Any) -> None:
    from hvpflow.pipeline.output import open_output
    from hvpflow.pipeline.plan import make_plan
    from hvpflow.pipeline.status import clean

    for line in clean(make_plan(open_output(arguments.output)), dry_run=arguments.dry_run):
        print(line)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Our words, and those after ``--``, which are Snakemake's."""
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
