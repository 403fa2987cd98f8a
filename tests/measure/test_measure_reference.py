"""The peer system's per-sample numbers, reproduced from its run directories: float64 to 1e-9, float32 to 1e-5."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from measure_cases import measure

from hvpflow.data.cache import TokenCache
from hvpflow.files import read_json
from hvpflow.runs.run import open_run

QUICK = [("ordinary-new-float64", 0, "seen"), ("ordinary-old-float32", 1, "unseen"), ("packed-old-float64", 2, "seen")]
RESULTS = (
    *("ordinary-new-float64", "ordinary-old-float32", "ordinary-old-float64"),
    *("packed-old-float32", "packed-old-float64"),
)
EVERYTHING = [(name, state, case) for name in RESULTS for state in range(4) for case in ("seen", "unseen")]


@pytest.mark.parametrize(("name", "state", "case"), QUICK)
def test_reference_numbers(reference: Path, tmp_path: Path, name: str, state: int, case: str) -> None:
    compare(reference, tmp_path, name, state, case)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "state", "case"), [job for job in EVERYTHING if job not in QUICK])
def test_reference_numbers_in_full(reference: Path, tmp_path: Path, name: str, state: int, case: str) -> None:
    compare(reference, tmp_path, name, state, case)


def compare(reference: Path, store: Path, name: str, state: int, case: str) -> None:
    """Measure the ``state``-th distinct state of a run and compare with the peer's samples file."""
    directory = reference / "results" / name
    manifest = read_json(directory / "manifest.json")
    distinct = {entry.get("result_key", entry["weights_hash"]): entry["name"] for entry in manifest["checkpoints"]}
    key, checkpoint = list(distinct.items())[state]
    theirs = read_json(directory / f"{key}-{case}.json")
    options = manifest["options"]
    run = open_run(reference / "runs" / name.rpartition("-")[0])
    shared = {option: options[option] for option in ("noise_samples", "random_samples", "seed", "dtype")}
    # Their curvature batches were smaller, which only makes the same sum slower.
    ours = measure(run, _cache(reference), store, case, checkpoint=checkpoint, hvp_batch_size=46, **shared)
    close = functools.partial(pytest.approx, rel=1e-9 if options["dtype"] == "float64" else 1e-5, abs=0)

    assert ours["weights_hash"] == theirs["weights_hash"]
    assert ours["result_key"] == theirs["result_key"]
    assert ours["data"] == theirs["data"]
    assert ours["dimension"] == theirs["statistics"]["dimension"]
    assert ours["mean_gradient"]["norm"] == close(theirs["statistics"]["mean_gradient_norm"])
    _compare_rows(ours["noise"], theirs["noise"], ("batch_index", "batch"), close)
    _compare_rows(ours["random"], theirs["random"], ("index",), close)
    _compare_rows(ours["consensus"] or [], theirs.get("consensus", []), ("worker",), close)


def _compare_rows(ours: list[Any], theirs: list[Any], exact: tuple[str, ...], close: Any) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs):
        for field, value in other.items():
            if field in exact:
                assert mine[field] == value
            elif not field.endswith("seconds"):
                assert mine[field] == close(value), field


@functools.cache
def _cache(reference: Path) -> TokenCache:
    return TokenCache.open(reference / "data" / "stdlib-512")
