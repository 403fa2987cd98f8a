"""Every number of a record against dense float64 matrices of a tiny model, for ordinary and packed runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
from measure_cases import CHECKPOINT, DenseCase, make_run, measure, without_times

from hvpflow.measure.random import rademacher
from hvpflow.measure.records import check_record


@pytest.mark.parametrize(("workers", "case"), [(1, "seen"), (1, "unseen"), (2, "seen")])
def test_every_number_equals_the_dense_one(tmp_path: Path, workers: int, case: str) -> None:
    run, cache = make_run(tmp_path, workers)
    record = measure(
        *(run, cache, tmp_path / "store", case),
        **{"noise_samples": "all", "random_samples": 3, "hvp_batch_size": 5, "directions_per_pass": 4},
    )
    check_record(record)
    dense = DenseCase(run, cache, case)
    assert record["dimension"] == len(dense.point)
    assert record["mean_gradient"]["norm"] == pytest.approx(float(dense.gradient.norm()), rel=1e-12)

    def forms(vector: torch.Tensor) -> tuple[float, float]:
        return float(vector @ dense.hessian @ vector), float(vector @ dense.gauss_newton @ vector)

    assert [row["batch_index"] for row in record["noise"]] == list(range(dense.epoch.num_noise_samples))
    for row in record["noise"]:
        gradient = dense.batch_gradient(dense.epoch.sample_blocks(row["batch_index"]))
        noise = gradient - dense.gradient
        assert row["gradient_norm"] == pytest.approx(float(gradient.norm()), rel=1e-12)
        assert row["noise_norm_squared"] == pytest.approx(float(noise @ noise), rel=1e-12)
        assert (row["quadratic"], row["gauss_newton"]) == pytest.approx(forms(noise), rel=1e-11)

    assert [row["index"] for row in record["random"]] == [0, 1, 2]
    shapes = run.recipe.model.parameter_shapes()
    for row in record["random"]:
        signs = dense.flat(rademacher(shapes, seed=42, index=row["index"], dtype=torch.float64))
        assert (row["quadratic"], row["gauss_newton"]) == pytest.approx(forms(signs), rel=1e-11)

    if workers == 1:
        assert record["consensus"] is None
        return
    average = dense.point
    errors = []
    for row in record["consensus"]:
        state = safetensors.torch.load_file(run.directory / f"node-{row['worker']:03d}" / CHECKPOINT)
        error = dense.flat(state) - average
        errors.append(error)
        assert row["norm_squared"] == pytest.approx(float(error @ error), rel=1e-12)
        assert row["norm"] == pytest.approx(math.sqrt(row["norm_squared"]), rel=1e-15)
        assert (row["quadratic"], row["gauss_newton"]) == pytest.approx(forms(error), rel=1e-11)
        assert row["normalized_alignment"] == pytest.approx(row["quadratic"] / row["norm_squared"], rel=1e-15)
    # The average is rounded to float32 before it is subtracted.
    assert float(torch.stack(errors).sum(0).abs().max()) < 1e-6


def test_noise_sums_to_zero_over_all_batches(tmp_path: Path) -> None:
    run, cache = make_run(tmp_path)
    dense = DenseCase(run, cache, "seen")
    gradients = [dense.batch_gradient(dense.epoch.sample_blocks(index)) for index in range(4)]
    assert float((torch.stack(gradients).mean(0) - dense.gradient).abs().max()) < 1e-14


def test_equal_workers_have_no_consensus_error_and_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, cache = make_run(tmp_path, workers=2, equal_workers=True)
    whole = measure(run, cache, tmp_path / "store", noise_samples=1, random_samples=1)
    assert [row["quadratic"] for row in whole["consensus"]] == [0.0, 0.0]
    assert [row["normalized_alignment"] for row in whole["consensus"]] == [None, None]
    check_record(whole)

    from hvpflow.measure import worker

    def no_pass(*arguments: object, **options: object) -> None:
        raise AssertionError("a pass over the epoch for directions that are zero")

    monkeypatch.setattr(worker, "run_pass", no_pass)
    alone = measure(run, cache, tmp_path / "other", noise_samples=1, random_samples=1, shard=1, num_shards=2)
    assert without_times(alone["consensus"]) == without_times(whole["consensus"])
