"""Estimates over an epoch's batches, random directions and workers, with their standard errors.

Legend: N noise samples in the epoch (`noise_population`), S of them drawn without replacement, f = S/N;
R random directions; W workers; D unique trainable parameters. q = vᵀHv, H the Hessian of the epoch's token-mean loss.

The population is fixed: this epoch's batches at this checkpoint. Its standard errors say how far the S drawn batches
may be from all N of them; they say nothing about other training runs. Ratio estimator and finite-population
correction after W. G. Cochran, Sampling Techniques, 3rd ed., sections 2.6 and 6.4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any

# Below this many draws the ratio's standard error is too small on average (0.174 against 0.186 at N = 20, S = 8).
FEW_NOISE_SAMPLES = 10

_ALIGNMENTS = ("noise_alignment", "normalized_noise_alignment")
_SAMPLED = (*_ALIGNMENTS, "average_noise_norm", "average_batch_gradient_norm", "normalized_random_alignment")
_CONSENSUS = ("consensus_alignment", "normalized_consensus_alignment", "average_consensus_norm")

# The names of WangZesen/tiny-llm, in its order; ours follow.
TINY_LLM_STATISTICS = (
    *("noise_samples", "random_samples", "dimension"),
    *(*_SAMPLED[:4], "mean_gradient_norm", _SAMPLED[4]),
    *("consensus_workers", *_CONSENSUS),
)


def statistics(record: Mapping[str, Any]) -> dict[str, int | float | None]:
    """Return every statistic of a (checkpoint, case): tiny-llm's in their order, then ours.

    Args:
        record: a merged record: `noise`, `random`, `consensus` (absent or null for an ordinary run), `dimension`,
            `mean_gradient` {norm, loss}, `data` {available_noise_batches, tokens}.

    Returns:
        Counts and values. Null where a value does not exist: a ratio with denominator 0, the standard error of one
        draw, a Gauss–Newton part that the engine did not give. Statistics of the consensus are absent without it.
    """
    noise, random, consensus = record["noise"], record["random"], record.get("consensus")
    dimension, population = record["dimension"], record["data"]["available_noise_batches"]
    squares = [row["noise_norm_squared"] for row in noise]
    noise_norms = [math.sqrt(square) for square in squares]
    gradient_norms = [row["gradient_norm"] for row in noise]

    values: dict[str, int | float | None] = {
        "noise_samples": len(noise),
        "random_samples": len(random),
        "dimension": dimension,
    }
    quadratics, signs = _column(noise, "quadratic"), _column(random, "quadratic")
    values["noise_alignment"] = mean(quadratics)
    values["normalized_noise_alignment"] = ratio(quadratics, squares)
    values["average_noise_norm"] = mean(noise_norms)
    values["average_batch_gradient_norm"] = mean(gradient_norms)
    values["mean_gradient_norm"] = record["mean_gradient"]["norm"]
    values["normalized_random_alignment"] = _per_dimension(signs, dimension)
    if consensus:
        values["consensus_workers"] = len(consensus)
        values |= _consensus_values(consensus, "quadratic")
        values["average_consensus_norm"] = mean([row["norm"] for row in consensus])

    values["noise_population"] = population
    values["epoch_tokens"] = record["data"].get("tokens")
    values["epoch_loss"] = record["mean_gradient"].get("loss")
    errors = {
        "noise_alignment": standard_error_of_mean(quadratics, population),
        "normalized_noise_alignment": standard_error_of_ratio(quadratics, squares, population),
        "average_noise_norm": standard_error_of_mean(noise_norms, population),
        "average_batch_gradient_norm": standard_error_of_mean(gradient_norms, population),
        "normalized_random_alignment": _error_per_dimension(signs, dimension),
    }
    values |= {f"{name}_standard_error": error for name, error in errors.items()}
    values |= _gauss_newton_values(noise, random, squares, dimension, population)
    if consensus:
        values |= _consensus_values(consensus, "gauss_newton", "_gauss_newton")
        for key, suffix in (("quadratic", ""), ("gauss_newton", "_gauss_newton")):
            values |= _spread(f"consensus_alignment{suffix}", [row.get(key) for row in consensus])
            values |= _spread(f"normalized_consensus_alignment{suffix}", [_quotient(row, key) for row in consensus])
        values |= _spread("average_consensus_norm", [row["norm"] for row in consensus])
    return values


def warnings(values: Mapping[str, int | float | None]) -> list[str]:
    """Sentences that a reader of these statistics should know before trusting their standard errors."""
    found = []
    samples, population = values["noise_samples"], values["noise_population"]
    if samples is not None and population is not None and samples < min(FEW_NOISE_SAMPLES, population):
        what = "have no standard error" if samples == 1 else "have standard errors that are on average too small"
        found.append(
            f"{samples} noise sample{'s' if samples > 1 else ''} of {population}: the noise statistics {what}; "
            f"take noise_samples of at least {min(FEW_NOISE_SAMPLES, int(population))}"
        )
    return found


def mean(values: Sequence[float]) -> float | None:
    """Σxᵢ/S, the sum exactly rounded; null without values."""
    return fsum(values) / len(values) if values else None


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float | None:
    """Σqᵢ/Σdᵢ, a ratio of sums; null when the denominator is 0."""
    total = fsum(denominators)
    return fsum(numerators) / total if total else None


def standard_error_of_mean(values: Sequence[float], population: int | None = None) -> float | None:
    """√((1−f)·s²/S), s² with S−1; f = 0 for ``population=None`` (unlimited).

    Returns 0 for a census (S = N) and otherwise null for a single value.
    """
    count = len(values)
    if count == population:
        return 0.0
    if count < 2:
        return None
    centre = fsum(values) / count
    variance = fsum((value - centre) ** 2 for value in values) / (count - 1)
    return math.sqrt(_unsampled(count, population) * variance / count)


def standard_error_of_ratio(
    numerators: Sequence[float], denominators: Sequence[float], population: int | None = None
) -> float | None:
    """√((1−f)·Σeᵢ²/(S(S−1)))/d̄ with eᵢ = qᵢ − r·dᵢ, r = Σq/Σd: the linearised error of a ratio of sums.

    Returns null where the ratio is null, 0 for a census (S = N) and otherwise null for a single pair.
    """
    value, count = ratio(numerators, denominators), len(numerators)
    if value is None:
        return None
    if count == population:
        return 0.0
    if count < 2:
        return None
    residuals = fsum((q - value * d) ** 2 for q, d in zip(numerators, denominators, strict=True))
    spread = math.sqrt(_unsampled(count, population) * residuals / (count * (count - 1)))
    return spread / (fsum(denominators) / count)


def _unsampled(count: int, population: int | None) -> float:
    """1 − f, exact where it is 0."""
    return 1.0 if population is None else (population - count) / population


def _column(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows]


def _complete(rows: Sequence[Mapping[str, Any]], key: str) -> list[float] | None:
    """The column, or null where any of its values is missing."""
    values = [row.get(key) for row in rows]
    return None if any(value is None for value in values) else values  # type: ignore[return-value]


def _per_dimension(quadratics: Sequence[float], dimension: int) -> float | None:
    # One division by D·R rather than two: the last bit of tiny-llm's.
    return fsum(quadratics) / (dimension * len(quadratics)) if quadratics else None


def _error_per_dimension(quadratics: Sequence[float], dimension: int) -> float | None:
    error = standard_error_of_mean(quadratics)
    return None if error is None else error / dimension


def _gauss_newton_values(
    noise: Sequence[Mapping[str, Any]],
    random: Sequence[Mapping[str, Any]],
    squares: Sequence[float],
    dimension: int,
    population: int,
) -> dict[str, float | None]:
    """The alignments with the Gauss–Newton part of each quadratic form in its place."""
    values: dict[str, float | None] = {}
    parts, signs = _complete(noise, "gauss_newton"), _complete(random, "gauss_newton")
    if parts is None:
        absent = (f"{name}_gauss_newton{suffix}" for name in _ALIGNMENTS for suffix in ("", "_standard_error"))
        values |= dict.fromkeys(absent)
    else:
        values["noise_alignment_gauss_newton"] = mean(parts)
        values["noise_alignment_gauss_newton_standard_error"] = standard_error_of_mean(parts, population)
        values["normalized_noise_alignment_gauss_newton"] = ratio(parts, squares)
        values["normalized_noise_alignment_gauss_newton_standard_error"] = standard_error_of_ratio(
            parts, squares, population
        )
    name = "normalized_random_alignment_gauss_newton"
    values[name] = None if signs is None else _per_dimension(signs, dimension)
    values[f"{name}_standard_error"] = None if signs is None else _error_per_dimension(signs, dimension)
    return values


def _consensus_values(
    consensus: Sequence[Mapping[str, Any]], key: str, suffix: str = ""
) -> dict[str, int | float | None]:
    parts = _complete(consensus, key)
    squares = _column(consensus, "norm_squared")
    return {
        f"consensus_alignment{suffix}": None if parts is None else mean(parts),
        f"normalized_consensus_alignment{suffix}": None if parts is None else ratio(parts, squares),
    }


def _quotient(row: Mapping[str, Any], key: str) -> float | None:
    """One worker's q/‖e‖²; null for a worker that is at the average."""
    part, square = row.get(key), row["norm_squared"]
    return part / square if part is not None and square else None


def _spread(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """Standard deviation (divisor: the number of workers, all of whom are measured), least and greatest."""
    present = [value for value in values if value is not None]
    if not present:
        return {f"{name}_worker_{what}": None for what in ("std", "min", "max")}
    centre = fsum(present) / len(present)
    deviation = math.sqrt(fsum((value - centre) ** 2 for value in present) / len(present))
    return {f"{name}_worker_std": deviation, f"{name}_worker_min": min(present), f"{name}_worker_max": max(present)}
