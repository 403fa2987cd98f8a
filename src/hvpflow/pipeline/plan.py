"""The plan: which checkpoints, cases and shards an analysis consists of, and where each result lies.

Everything that the workflow's graph needs, from file names and small files only. It is made again in every job that
reads the workflow, so it imports neither torch nor pandas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvpflow.data.cache import TokenCache
from hvpflow.data.epochs import analysis_epoch
from hvpflow.errors import HvpflowError
from hvpflow.files import fingerprint, read_json, read_record
from hvpflow.measure.settings import MEASUREMENT_VERSION
from hvpflow.pipeline.preparation import preparation_request, recipe_digest
from hvpflow.pipeline.settings import Config
from hvpflow.runs.recipe import Recipe, check_cache_matches, retained_files
from hvpflow.runs.run import Run, checkpoint_epoch, find_cache, open_run, select_checkpoints

FIGURES = ("normalized-alignment", "noise-alignment", "gradient-norms")
UNSAFE_CHARACTERS = "{}\n\r"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alias:
    """Checkpoints that hold one state: one of them is measured, each has its row."""

    measured: str
    members: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All results of one configuration, by path."""

    config: Config
    recipe: Recipe
    run_directory: Path
    cache_directory: Path
    output: Path
    checkpoints: tuple[str, ...]
    aliases: tuple[Alias, ...]
    digest: str
    """Of everything numerical in the settings: results of different settings never share a path."""
    notes: tuple[str, ...] = ()
    """What the user should know, and nothing is refused for."""

    @property
    def run(self) -> Run:
        return Run(self.run_directory, self.recipe)

    @property
    def cases(self) -> tuple[str, ...]:
        return self.config.analysis.cases

    @property
    def shards(self) -> range:
        return range(self.config.analysis.shards)

    def inspect_path(self, checkpoint: str) -> Path:
        return self.output / "inspect" / f"{checkpoint}.json"

    def measure_path(self, checkpoint: str, case: str, shard: int) -> Path:
        return self.output / "work" / self.digest / checkpoint / case / f"{shard}.json"

    def samples_path(self, checkpoint: str, case: str) -> Path:
        return self.output / "samples" / f"{checkpoint}.{case}.json"

    def alias_of(self, checkpoint: str) -> Alias:
        """The group of states that ``checkpoint`` belongs to."""
        return next(alias for alias in self.aliases if checkpoint in alias.members)

    def checkpoint_files(self, checkpoint: str) -> list[Path]:
        """Files that hold the checkpoint's state: itself, and for a packed run's epoch export the workers' too."""
        root = self.run_directory / checkpoint
        if not self.reads_workers or not checkpoint.startswith("epoch-"):
            return [root]
        nodes = range(self.recipe.num_workers)
        return [root, *(self.run_directory / f"node-{worker:03d}" / checkpoint for worker in nodes)]

    @property
    def reads_workers(self) -> bool:
        """Whether consensus errors are measured."""
        return self.recipe.decentralized is not None and self.config.analysis.consensus

    @property
    def figure_paths(self) -> list[Path]:
        return [self.output / f"{name}.{kind}" for name in FIGURES for kind in ("pdf", "png")]

    @property
    def preparation_digest(self) -> str:
        """Of what the owned run's token cache is made from."""
        return preparation_request(self.config).digest()[:16]

    @property
    def recipe_digest(self) -> str:
        return recipe_digest(self.recipe)

    @staticmethod
    def gpus(device: str) -> int:
        """GPUs that a job on ``device`` asks for; ``auto`` may want one."""
        return 0 if device == "cpu" else 1

    @property
    def trained_paths(self) -> list[Path]:
        """What training declares: the recipe decides, never the analysis' selection."""
        names = ["resolved.yaml", "metrics.jsonl", "result.json", *retained_files(self.recipe)]
        return [self.run_directory / name for name in names]

    @property
    def measurements(self) -> list[tuple[str, str, int]]:
        """(measured checkpoint, case, shard) of every measure job."""
        return [(alias.measured, case, shard) for alias in self.aliases for case in self.cases for shard in self.shards]


def make_plan(config: Config) -> Plan:
    """Plan the analysis of ``config``.

    Raises:
        HvpflowError: anything that can be refused before computing: unknown checkpoints, a recipe that does not match
            the cache, a cache too small for a case, missing worker files, paths that Snakemake cannot name.
    """
    for what, path in (("run", config.run_directory), ("output", Path(config.output))):
        if any(character in str(path) for character in UNSAFE_CHARACTERS):
            raise HvpflowError(f"{what} {str(path)!r} holds a brace or a line break, which Snakemake cannot name")
    if config.training_recipe is not None:
        recipe = config.training_recipe
        run = Run(config.run_directory, recipe)
        cache_directory = Path(config.analysis.cache_dir or recipe.data.cache_dir)
        available = [name for name in retained_files(recipe) if "/" not in name]
    else:
        run = open_run(config.run_directory)
        recipe = run.recipe
        cache_override = config.analysis.cache_dir
        cache_directory = find_cache(run, Path(cache_override) if cache_override is not None else None)
        available = run.checkpoints()
    names = select_checkpoints(available, config.analysis.checkpoints)
    if (cache_directory / "manifest.json").is_file():
        _check_cache(config, recipe, cache_directory)
    output = Path(config.output)
    plan = Plan(
        config=config,
        recipe=recipe,
        run_directory=run.directory,
        cache_directory=cache_directory,
        output=output,
        checkpoints=tuple(names),
        aliases=_aliases(names, recipe, output),
        digest=settings_digest(config),
        notes=(*recipe.warnings, *(() if config.owned else _cache_note(run, cache_directory))),
    )
    if not config.owned:
        _check_files(plan)
    return plan


def settings_digest(config: Config) -> str:
    """Sixteen hexadecimal digits naming the numerical settings."""
    content = {
        "numerical": config.analysis.numerical_identity(),
        "selection": config.analysis.selection_identity(),
        "shards": config.analysis.shards,
        "version": MEASUREMENT_VERSION,
    }
    return fingerprint(content)[:16]


def inspected(plan: Plan, checkpoint: str) -> dict[str, Any] | None:
    """The checkpoint's inspect record, or None where there is none yet.

    Raises:
        HvpflowError: the record is damaged.
    """
    path = plan.inspect_path(checkpoint)
    return read_record(path) if path.is_file() else None


def state_of(record: dict[str, Any]) -> tuple[str, int]:
    """What makes two checkpoints one state: equal weights (workers' included) at one position in tokens."""
    return record["result_key"], record["tokens"]


def _aliases(names: Sequence[str], recipe: Recipe, output: Path) -> tuple[Alias, ...]:
    """Group checkpoints of one state: by hashes where inspected, else presumed from their names."""
    presumed: dict[int | str, list[str]] = {}
    for name in names:
        epoch = recipe.num_epochs if name == "final.pt" else checkpoint_epoch(name)
        presumed.setdefault(name if epoch is None else epoch, []).append(name)
    groups: list[list[str]] = []
    for members in presumed.values():
        states: dict[Any, list[str]] = {}
        try:
            for name in members:
                states.setdefault(state_of(read_record(output / "inspect" / f"{name}.json")), []).append(name)
            groups.extend(states.values())
        except HvpflowError:  # not inspected yet, or the record is damaged: the steps say which
            groups.append(members)
    # A bare weight file is the cheapest to read; a name decides among equals, so the choice is stable.
    return tuple(
        Alias(measured=min(group, key=lambda name: (not name.endswith(".safetensors"), name)), members=tuple(group))
        for group in groups
    )


def _check_cache(config: Config, recipe: Recipe, directory: Path) -> None:
    cache = TokenCache.open(directory)
    if config.owned and cache.manifest.get("dataset") != recipe.data.dataset:
        return  # prepare will move the old cache aside
    if not config.owned:
        check_cache_matches(recipe, cache)
        for case in config.analysis.cases:
            analysis_epoch(recipe.sampling(), cache, case)


def _cache_note(run: Run, directory: Path) -> tuple[str, ...]:
    """Say so where the run's own record names another token cache than the one that is read now."""
    path = run.directory / "environment.json"
    record = read_json(path) if path.is_file() else {}
    loader = record.get("loader") if isinstance(record, dict) else None
    trained_on = loader.get("cache_identity") if isinstance(loader, dict) else None
    found = TokenCache.open(directory).identity
    if trained_on in (None, found):
        return ()
    return (
        f"{run.directory} was trained on the token cache {str(trained_on)[:12]}…, but {directory} is {found[:12]}…: "
        "unless it begins with the same training text, the seen case is not what training saw",
    )


def _check_files(plan: Plan) -> None:
    for checkpoint in plan.checkpoints:
        for path in plan.checkpoint_files(checkpoint):
            if not path.is_file():
                raise HvpflowError(
                    f"missing worker checkpoint {path}, needed for consensus errors: supply it, or leave them out with "
                    "--no-consensus (analysis.consensus: false)"
                )
