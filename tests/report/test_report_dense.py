"""Each published statistic recomputed from a tiny model's dense float64 Hessian, along the whole way from weights."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "measure"))

from measure_cases import CHECKPOINT, DenseCase, make_run, measure

from hvpflow.measure.random import rademacher
from hvpflow.report.samples import merge_shards


def standard_error(residuals: torch.Tensor, population: int) -> float:
    """Of a mean of S draws without replacement from N whose residuals have mean 0."""
    S = len(residuals)
    return math.sqrt((1 - S / population) * float(residuals @ residuals) / (S * (S - 1)))


@pytest.mark.parametrize("case", ["seen", "unseen"])
def test_statistics_equal_those_of_the_dense_matrix(tmp_path: Path, case: str) -> None:
    run, cache = make_run(tmp_path, 2)
    options = {"noise_samples": 5, "random_samples": 3, "hvp_batch_size": 5}
    shards = [measure(run, cache, tmp_path / "store", case, **options, shard=n, num_shards=2) for n in range(2)]
    merged = merge_shards(shards)
    found, dense = merged["statistics"], DenseCase(run, cache, case)
    D, N = len(dense.point), dense.epoch.num_noise_samples

    indices = [row["batch_index"] for row in merged["noise"]]
    gradients = torch.stack([dense.batch_gradient(dense.epoch.sample_blocks(index)) for index in indices])
    noise = gradients - dense.gradient
    squared = (noise * noise).sum(1)
    shapes = run.recipe.model.parameter_shapes()
    signs = torch.stack(
        [dense.flat(rademacher(shapes, seed=42, index=index, dtype=torch.float64)) for index in range(3)]
    )
    nodes = [run.directory / f"node-{worker:03d}" / CHECKPOINT for worker in range(2)]
    errors = torch.stack([dense.flat(safetensors.torch.load_file(node)) - dense.point for node in nodes])

    for suffix, matrix in (("", dense.hessian), ("_gauss_newton", dense.gauss_newton)):
        q = ((noise @ matrix) * noise).sum(1)
        ratio = q.sum() / squared.sum()
        expected = {
            "noise_alignment": (q.mean(), standard_error(q - q.mean(), N)),
            "normalized_noise_alignment": (ratio, standard_error(q - ratio * squared, N) / float(squared.mean())),
        }
        r = ((signs @ matrix) * signs).sum(1)
        expected["normalized_random_alignment"] = (r.mean() / D, float(r.std()) / D / math.sqrt(3))
        for name, (value, error) in expected.items():
            assert found[name + suffix] == pytest.approx(float(value), rel=1e-9), name + suffix
            assert found[f"{name}{suffix}_standard_error"] == pytest.approx(error, rel=1e-6), name + suffix
        c = ((errors @ matrix) * errors).sum(1)
        assert found["consensus_alignment" + suffix] == pytest.approx(float(c.mean()), rel=1e-9)
        lengths = (errors * errors).sum()
        assert found["normalized_consensus_alignment" + suffix] == pytest.approx(float(c.sum() / lengths), rel=1e-9)

    assert found["mean_gradient_norm"] == pytest.approx(float(dense.gradient.norm()), rel=1e-12)
    for name, norms in (
        ("average_noise_norm", noise.norm(dim=1)),
        ("average_batch_gradient_norm", gradients.norm(dim=1)),
    ):
        assert found[name] == pytest.approx(float(norms.mean()), rel=1e-12)
        assert found[f"{name}_standard_error"] == pytest.approx(standard_error(norms - norms.mean(), N), rel=1e-9)
    assert found["average_consensus_norm"] == pytest.approx(float(errors.norm(dim=1).mean()), rel=1e-12)
    assert (found["noise_samples"], found["noise_population"], found["dimension"]) == (5, N, D)
