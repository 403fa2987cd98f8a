"""Statistics against the peer's published ones, closed forms, and the true sampling distribution."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from hvpflow.report.statistics import (
    TINY_LLM_STATISTICS,
    ratio,
    standard_error_of_mean,
    standard_error_of_ratio,
    statistics,
    warnings,
)

RESULTS = (
    "ordinary-new-float64",
    "ordinary-old-float64",
    "ordinary-old-float32",
    "packed-old-float64",
    "packed-old-float32",
)


def make_record(noise=3, random=2, consensus=0, population=10, seed=0):
    generator = np.random.default_rng(seed)

    def row(**values):
        return {key: float(value) for key, value in values.items()}

    record = {
        "dimension": 7,
        "data": {"available_noise_batches": population, "tokens": 640},
        "mean_gradient": {"norm": 0.5, "loss": 4.25},
        "noise": [
            row(quadratic=q, gauss_newton=q / 2, noise_norm_squared=d, gradient_norm=g)
            for q, d, g in generator.uniform(0.5, 2, (noise, 3))
        ],
        "random": [row(quadratic=q, gauss_newton=q / 4) for q in generator.normal(size=random)],
    }
    if consensus:
        record["consensus"] = [
            row(worker=w, quadratic=q, gauss_newton=q / 2, norm=n, norm_squared=n * n)
            for w, (q, n) in enumerate(generator.uniform(0.5, 2, (consensus, 2)))
        ]
    return record


@pytest.mark.parametrize("result", RESULTS)
def test_the_peers_statistics_are_reproduced_to_the_last_bit(reference: Path, result: str):
    paths = sorted((reference / "results" / result).glob("*seen.json"))
    assert len(paths) == 8
    for path in paths:
        record = json.loads(path.read_text())
        expected = record.pop("statistics")
        record["dimension"] = expected["dimension"]
        record["mean_gradient"] = {"norm": expected["mean_gradient_norm"]}
        assert list(statistics(record).items())[: len(expected)] == list(expected.items())
        packed = "consensus" in record
        assert tuple(expected) == (TINY_LLM_STATISTICS if packed else TINY_LLM_STATISTICS[:-4])


def test_standard_errors_against_their_formulas():
    record = make_record(noise=4, random=3, population=9)
    q = np.array([row["quadratic"] for row in record["noise"]])
    d = np.array([row["noise_norm_squared"] for row in record["noise"]])
    values = statistics(record)
    correction = math.sqrt(1 - 4 / 9)
    assert values["noise_alignment_standard_error"] == pytest.approx(correction * q.std(ddof=1) / 2, rel=1e-14)
    assert values["average_noise_norm_standard_error"] == pytest.approx(
        correction * np.sqrt(d).std(ddof=1) / 2, rel=1e-14
    )
    residuals = q - q.sum() / d.sum() * d
    assert values["normalized_noise_alignment_standard_error"] == pytest.approx(
        correction * math.sqrt((residuals**2).sum() / (4 * 3)) / d.mean(), rel=1e-14
    )
    random = np.array([row["quadratic"] for row in record["random"]])
    assert values["normalized_random_alignment_standard_error"] == pytest.approx(
        random.std(ddof=1) / (7 * math.sqrt(3)), rel=1e-14
    )
    assert values["noise_population"] == 9
    assert values["epoch_tokens"] == 640
    assert values["epoch_loss"] == 4.25
    assert not any(name.startswith("mean_gradient_norm_") for name in values)


def test_gauss_newton_parts_have_the_same_formulas():
    values = statistics(make_record(noise=5, random=4, consensus=3))
    for name, factor in {
        "noise_alignment": 2,
        "normalized_noise_alignment": 2,
        "normalized_random_alignment": 4,
    }.items():
        assert values[name] == factor * values[f"{name}_gauss_newton"]
        error = values[f"{name}_gauss_newton_standard_error"]
        assert values[f"{name}_standard_error"] == pytest.approx(factor * error, rel=1e-14)
    for name in ("consensus_alignment", "normalized_consensus_alignment"):
        for suffix in ("", "_worker_std", "_worker_min", "_worker_max"):
            full = values[f"{name}{suffix}"]
            assert full == pytest.approx(2 * values[f"{name}_gauss_newton{suffix}"], rel=1e-14)


def test_gauss_newton_columns_stay_and_are_null_where_the_engine_has_none():
    complete = make_record(consensus=2)
    for rows in (complete["noise"], complete["random"], complete["consensus"]):
        rows[-1]["gauss_newton"] = None
    values = statistics(complete)
    assert list(values) == list(statistics(make_record(consensus=2)))
    assert values["noise_alignment_gauss_newton"] is None
    assert values["normalized_noise_alignment_gauss_newton_standard_error"] is None
    assert values["normalized_random_alignment_gauss_newton"] is None
    assert values["consensus_alignment_gauss_newton"] is None
    assert values["noise_alignment"] is not None


def test_workers_are_a_census_with_a_spread_and_no_standard_error():
    record = make_record(consensus=4)
    norms = np.array([row["norm"] for row in record["consensus"]])
    quotients = np.array([row["quadratic"] / row["norm_squared"] for row in record["consensus"]])
    values = statistics(record)
    assert values["consensus_workers"] == 4
    assert values["average_consensus_norm_worker_std"] == pytest.approx(norms.std(), rel=1e-14)
    assert values["normalized_consensus_alignment_worker_std"] == pytest.approx(quotients.std(), rel=1e-13)
    assert values["normalized_consensus_alignment_worker_min"] == quotients.min()
    assert values["normalized_consensus_alignment_worker_max"] == quotients.max()
    assert not any("consensus" in name and name.endswith("standard_error") for name in values)
    assert not any("consensus" in name for name in statistics(make_record()))


def test_workers_at_the_average_have_alignment_zero_and_no_normalized_one():
    record = make_record(consensus=2)
    for row in record["consensus"]:
        row |= {"quadratic": 0.0, "gauss_newton": 0.0, "norm": 0.0, "norm_squared": 0.0}
    values = statistics(record)
    assert values["consensus_alignment"] == 0
    assert values["normalized_consensus_alignment"] is None
    assert values["normalized_consensus_alignment_worker_max"] is None
    assert values["average_consensus_norm_worker_std"] == 0


def test_one_draw_has_no_standard_error_and_a_census_has_none_to_fear():
    single = statistics(make_record(noise=1, random=1))
    for name, value in single.items():
        if name.endswith("_standard_error"):
            assert value is None, name
    census = statistics(make_record(noise=6, population=6))
    for name, value in census.items():
        if name.endswith("_standard_error") and "random" not in name:
            assert value == 0, name
    assert census["normalized_random_alignment_standard_error"] > 0


def test_a_vanishing_denominator_gives_null_not_an_error():
    assert ratio([0.0, 0.0], [0.0, 0.0]) is None
    assert standard_error_of_ratio([0.0, 0.0], [0.0, 0.0], 5) is None


@pytest.mark.parametrize(
    ("samples", "population", "warned"), [(1, 50, True), (9, 50, True), (10, 50, False), (5, 5, False), (4, 5, True)]
)
def test_few_noise_samples_are_warned_of(samples: int, population: int, warned: bool):
    found = warnings(statistics(make_record(noise=samples, population=population)))
    assert bool(found) == warned
    if warned:
        assert f"{samples} noise sample" in found[0]
        assert f"at least {min(10, population)}" in found[0]


def draw(samples: int, population: int, draws: int):
    """Estimates, their standard errors and the truth, over draws without replacement from one fixed population."""
    generator = np.random.default_rng(20250101)
    d = generator.lognormal(sigma=0.4, size=population)
    q = d * generator.lognormal(sigma=0.5, size=population) + generator.normal(scale=0.2, size=population)
    rows = []
    for _ in range(draws):
        chosen = generator.choice(population, samples, replace=False)
        a, b = q[chosen].tolist(), d[chosen].tolist()
        rows.append(
            (
                np.mean(a),
                standard_error_of_mean(a, population),
                ratio(a, b),
                standard_error_of_ratio(a, b, population),
            )
        )
    return np.array(rows), q.mean(), q.sum() / d.sum()


@pytest.mark.parametrize(("samples", "population"), [(32, 60), (16, 400)])
def test_standard_errors_match_the_true_sampling_distribution(samples: int, population: int):
    rows, true_mean, true_ratio = draw(samples, population, draws=4000)
    for estimates, errors, truth in ((rows[:, 0], rows[:, 1], true_mean), (rows[:, 2], rows[:, 3], true_ratio)):
        assert math.sqrt(np.mean(errors**2)) == pytest.approx(estimates.std(), rel=0.07)
        covered = np.abs(estimates - truth) <= 2 * errors
        assert 0.90 < covered.mean() < 0.98


def test_few_samples_understate_the_ratios_error():
    rows, _, _ = draw(8, 20, draws=4000)
    assert 0.80 < rows[:, 3].mean() / rows[:, 2].std() < 0.98


def test_without_finite_population_correction_the_error_would_be_wrong():
    rows, _, _ = draw(32, 60, draws=2000)
    uncorrected = rows[:, 1] / math.sqrt(1 - 32 / 60)
    assert uncorrected.mean() > 1.3 * rows[:, 0].std()
