"""How long a cluster job will take and how much memory it needs: what its scheduler is asked for.

Time is work divided by a rate. The work of a measurement is, in parameter-tokens,

    tokens of the epoch x (directions + 1 for the mean gradient) x (parameters + 2 layers width context)

where the last term is attention, which multiplies activations with each other and has no parameters. Until something
was measured the rate is an assumed one, low enough for an old GPU. Later it is what finished measurements of the same
settings in this output directory took: their median for what to expect, the slowest of them, and half as much again,
for what to ask for. Imports no torch: the planner calls it in every workflow job.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hvpflow.measure.settings import DEFAULT_DIRECTIONS_PER_PASS
from hvpflow.models.config import LlamaConfig
from hvpflow.pipeline.plan import Plan
from hvpflow.runs.recipe import Recipe

Kind = Literal["cpu", "cuda"]

ASSUMED_RATES: dict[Kind, float] = {"cuda": 1e12, "cpu": 5e8}
"""Parameter-tokens a second, on a CPU for each thread: a GPU of the year 2017, a slow CPU core."""
SLOWER_ENGINE = 4.0
"""``jvp-of-grad`` against ``taylor``."""
TRAINING_PASSES = 1.5
"""A training step against one direction: forward and backward, and the optimizer's work."""
START_SECONDS = 60.0
"""Starting Python and the GPU, reading the checkpoint, compiling."""
MARGIN = 1.5
"""What is asked for, against the slowest measured so far."""
MIN_MINUTES = 10
"""Asked for at least: file systems have slow days."""
BASE_MB: dict[Kind, int] = {"cuda": 4000, "cpu": 1500}
"""Python and PyTorch, with its CUDA libraries where they are loaded."""
_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What one job will need."""

    seconds: float
    """Expected, the start included."""
    slowest_seconds: float
    """The same at the slowest rate measured so far."""
    memory_mb: int
    """Of the host, not of a GPU."""
    measured_jobs: int
    """Finished measurements that the rate is from; 0: it is assumed."""

    def minutes(self, attempt: int = 1, limit: int | None = None) -> int:
        """Time limit of the ``attempt``-th try: grows with each, up to the site's ``limit``.

        A job that needs longer than the limit saves its progress and continues in the next try.
        """
        wanted = attempt * max(MIN_MINUTES, math.ceil(MARGIN * self.slowest_seconds / 60))
        return wanted if limit is None else min(wanted, limit)

    def megabytes(self, attempt: int = 1) -> int:
        """Memory of the ``attempt``-th try."""
        return attempt * self.memory_mb


def measure_estimate(plan: Plan, *, threads: int = 1) -> Estimate:
    """Estimate one measure job of ``plan``: one shard of one (checkpoint, case)."""
    recipe, settings = plan.recipe, plan.config.analysis
    count = -(-sum(direction_counts(plan)) // settings.shards)
    work = epoch_tokens(recipe) * _passes(count, settings.directions_per_pass) * work_of_a_token(recipe.model)
    kind: Kind = "cpu" if settings.device == "cpu" else "cuda"
    measured = measured_rates(plan, None if settings.device == "auto" else kind, threads)
    slower = SLOWER_ENGINE if settings.engine == "jvp-of-grad" else 1.0
    rates = measured or (assumed_rate(kind, threads) / slower,)
    sequences = settings.hvp_batch_size or recipe.training.micro_batch_size
    per_pass = _per_pass(settings.directions_per_pass)
    memory = _weights_mb(recipe, copies=5 + per_pass + (recipe.num_workers if plan.reads_workers else 0))
    if kind == "cpu":
        # One and a half to three times what was measured: the engine keeps one set whatever K, the slower one about 7.
        copies = 12 if settings.engine == "jvp-of-grad" else 2 + per_pass // 4
        memory += _activations_mb(recipe.model, sequences, copies=copies)
    return Estimate(
        seconds=START_SECONDS + work / statistics.median(rates),
        slowest_seconds=START_SECONDS + work / min(rates),
        memory_mb=BASE_MB[kind] + memory,
        measured_jobs=len(measured),
    )


def training_estimate(plan: Plan, *, threads: int = 1) -> Estimate:
    """Estimate the training of an owned run, at its own rate so far where it was begun."""
    recipe = plan.recipe
    sampling = recipe.sampling()
    tokens = sampling.boundaries()[-1] * sampling.context_length
    kind: Kind = "cpu" if recipe.runtime.device == "cpu" else "cuda"
    own = _training_rate(plan.run_directory / ".training" / "metrics.jsonl")
    rate = own or assumed_rate(kind, threads) / (TRAINING_PASSES * work_of_a_token(recipe.model))
    memory = _weights_mb(recipe, copies=6 * recipe.num_workers)
    if kind == "cpu":
        memory += _activations_mb(recipe.model, recipe.training.micro_batch_size * recipe.num_workers, copies=2)
    return Estimate(
        seconds=START_SECONDS + tokens / rate,
        slowest_seconds=START_SECONDS + tokens / rate,
        memory_mb=BASE_MB[kind] + memory,
        measured_jobs=int(bool(own)),
    )


def direction_counts(plan: Plan) -> tuple[int, int, int]:
    """Noise, random and consensus directions of one (checkpoint, case)."""
    settings, sampling = plan.config.analysis, plan.recipe.sampling()
    population = sampling.boundaries()[0] // sampling.batch_blocks * sampling.num_workers
    noise = population if settings.noise_samples == "all" else min(settings.noise_samples, population)
    return noise, settings.random_samples, plan.recipe.num_workers if plan.reads_workers else 0


def epoch_tokens(recipe: Recipe) -> int:
    """Tokens of one epoch, which every direction's pass reads."""
    sampling = recipe.sampling()
    return sampling.boundaries()[0] * sampling.context_length


def work_of_a_token(model: LlamaConfig) -> float:
    """Parameter-tokens that one token costs in one pass."""
    return model.num_parameters + 2.0 * model.layers * model.width * model.context_length


def assumed_rate(kind: Kind, threads: int) -> float:
    """Parameter-tokens a second where nothing was measured yet."""
    return ASSUMED_RATES[kind] * (threads if kind == "cpu" else 1)


def measured_rates(plan: Plan, kind: Kind | None, threads: int) -> tuple[float, ...]:
    """Parameter-tokens a second of each finished measurement that has the speed of the plan's settings.

    Args:
        plan: its output directory is searched, other settings' measurements included.
        kind: of device; None: any.
        threads: that the job will have. Fewer than a measurement on a CPU had make it slower; more are not counted on.
    """
    wanted, per_token = _speed_of(plan.config.analysis), work_of_a_token(plan.recipe.model)
    rates = []
    work = plan.output / "work"
    for found in _finished(work, _listing(work)):
        if found.speed != wanted or found.dimension != plan.recipe.num_parameters or kind not in (None, found.device):
            continue
        share = min(1.0, threads / found.threads) if found.device == "cpu" else 1.0
        rates.append(found.tokens_per_second * per_token * share)
    return tuple(rates)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finished:
    """What a finished measurement says about speed."""

    speed: tuple[Any, ...]
    dimension: int
    device: str
    threads: int
    tokens_per_second: float
    """Of one direction."""


@functools.lru_cache(maxsize=4)
def _finished(work: Path, names: tuple[str, ...]) -> list[_Finished]:
    found = []
    for name in names:
        try:
            record = json.loads((work / name).read_text(encoding="utf-8"))
            count = sum(len(record[kind] or ()) for kind in ("noise", "random", "consensus"))
            passes = _passes(count, record["settings"]["directions_per_pass"])
            found.append(
                _Finished(
                    speed=_speed_of(record["settings"]),
                    dimension=record["dimension"],
                    device=record["policy"]["device"],
                    threads=max(1, record["policy"]["threads"]),
                    tokens_per_second=record["data"]["tokens"] * passes / record["timing"]["total_seconds"],
                )
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            continue  # a record of another version says nothing about speed
    return found


def _listing(work: Path) -> tuple[str, ...]:
    return tuple(sorted(str(path.relative_to(work)) for path in work.glob("*/*/*/*.json")))


def _speed_of(settings: Any) -> tuple[Any, ...]:
    """The settings that the rate depends on."""
    names = ("dtype", "tf32", "amp", "engine", "compile_hvp", "hvp_batch_size")
    return tuple(settings[name] if isinstance(settings, dict) else getattr(settings, name) for name in names)


def _passes(count: int, directions_per_pass: int | Literal["auto"]) -> int:
    """Directions with the places that equal stacks leave empty, and the mean gradient."""
    stacks = max(1, -(-count // _per_pass(directions_per_pass)))
    return stacks * -(-count // stacks) + 1


def _per_pass(directions_per_pass: int | Literal["auto"]) -> int:
    return DEFAULT_DIRECTIONS_PER_PASS if directions_per_pass == "auto" else directions_per_pass


def _training_rate(metrics: Path) -> float | None:
    """Tokens a second of the training's last logged interval."""
    try:
        lines = metrics.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            rate = float(json.loads(line)["tokens_per_second"])
        except (ValueError, KeyError, TypeError):
            continue
        if rate > 0:
            return rate
    return None


def _weights_mb(recipe: Recipe, *, copies: int) -> int:
    return math.ceil(copies * recipe.num_parameters * _BYTES / 1e6)


def _activations_mb(model: LlamaConfig, sequences: int, *, copies: int) -> int:
    """Activations that a CPU keeps in the host's memory, roughly: ``copies`` times those of one forward pass."""
    per_token = model.vocab_size + model.layers * (10 * model.width + 4 * model.ffn_width)
    per_token += model.layers * model.heads * model.context_length
    return math.ceil(copies * sequences * model.context_length * per_token * _BYTES / 1e6)
