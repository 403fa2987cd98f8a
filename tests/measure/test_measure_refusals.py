"""What stops a measurement, and what the message says: checkpoint, case, direction, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from measure_cases import CHECKPOINT, make_run, measure

from hvpflow.curvature.quadratic import QuadraticForms
from hvpflow.data.cache import TokenCache
from hvpflow.errors import HvpflowError
from hvpflow.measure import session
from hvpflow.runs.inspect import inspect_checkpoint
from hvpflow.runs.run import Run

BASE: dict[str, Any] = {"engine": "jvp-of-grad", "noise_samples": 2, "random_samples": 1, "directions_per_pass": 2}


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Run, TokenCache]:
    return make_run(tmp_path)


def patch_engine(patch: pytest.MonkeyPatch, change: Any) -> None:
    """Let ``change(call number, forms)`` stand between the engine and its user; call 1 is the start-up check."""
    make_engine = session.make_engine

    def patched(*arguments: Any, **options: Any) -> Any:
        engine, calls = make_engine(*arguments, **options), 0

        def changed(*inputs: Any) -> QuadraticForms:
            nonlocal calls
            calls += 1
            return change(calls, engine(*inputs))

        return changed

    patch.setattr(session, "make_engine", patched)


def test_a_checkpoint_that_changed_after_its_inspection(tiny: tuple[Run, TokenCache], tmp_path: Path) -> None:
    run, cache = tiny
    inspected = inspect_checkpoint(run, CHECKPOINT, workers=True)
    assert measure(run, cache, tmp_path / "store", **BASE, inspect_record=inspected)["noise"]
    weights = safetensors.torch.load_file(run.directory / CHECKPOINT)
    weights["norm.weight"][0] += 1
    safetensors.torch.save_file(weights, run.directory / CHECKPOINT)
    with pytest.raises(HvpflowError, match=r"epoch-001.safetensors \(seen\): the checkpoint changed after it was insp"):
        measure(run, cache, tmp_path / "store", **BASE, inspect_record=inspected)


def test_a_flipped_bit_in_the_text_stops_what_would_be_computed(tiny: tuple[Run, TokenCache], tmp_path: Path) -> None:
    run, cache = tiny
    measure(run, cache, tmp_path / "store", **BASE)
    shard = cache.directory / "train-00001.bin"
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    cache = TokenCache.open(cache.directory)
    assert measure(run, cache, tmp_path / "store", **BASE)["noise"]  # finished before, of sound text
    with pytest.raises(HvpflowError, match=r"checksum mismatch .*train-00001\.bin"):
        measure(run, cache, tmp_path / "store", **BASE | {"random_samples": 2})


@pytest.mark.parametrize("value", [1e30, 3e38])
def test_a_state_whose_numbers_are_not_finite(tiny: tuple[Run, TokenCache], tmp_path: Path, value: float) -> None:
    run, cache = tiny
    weights = safetensors.torch.load_file(run.directory / CHECKPOINT)
    weights["norm.weight"][:] = value
    weights["embedding.weight"] *= 1e10
    safetensors.torch.save_file(weights, run.directory / CHECKPOINT)
    with pytest.raises(HvpflowError, match=r"epoch-001.safetensors \(seen\): .* (is (nan|inf)|not finite)"):
        measure(run, cache, tmp_path / "store", **BASE, dtype="float32")
    assert not list((tmp_path / "store").glob("*/noise-*"))


@pytest.mark.parametrize("part", ["total", "gauss_newton"])
def test_a_quadratic_form_that_is_not_finite(
    tiny: tuple[Run, TokenCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def spoil(call: int, forms: QuadraticForms) -> QuadraticForms:
        if call == 3:
            getattr(forms, part)[1] = float("nan")
        return forms

    patch_engine(monkeypatch, spoil)
    with pytest.raises(HvpflowError) as caught:
        measure(*tiny, tmp_path / "store", **BASE)
    message = str(caught.value)
    assert "epoch-001.safetensors (seen), curvature batch 1" in message
    assert "the quadratic form of noise sample " in message
    assert not list((tmp_path / "store").glob("*/noise-*"))


@pytest.mark.parametrize("factors", [(1 + 1e-6, 1), (1, 1 - 1e-6)])
def test_an_engine_that_loses_a_tangent(
    tiny: tuple[Run, TokenCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factors: tuple[float, float]
) -> None:
    total, gauss_newton = factors
    patch_engine(
        monkeypatch, lambda call, forms: QuadraticForms(forms.total * total, forms.gauss_newton * gauss_newton)
    )
    with pytest.raises(HvpflowError, match=r"differs from the derivative of the gradient by .*e-0\d relative"):
        measure(*tiny, tmp_path / "store", **BASE)


def test_the_engine_check_is_recorded(tiny: tuple[Run, TokenCache], tmp_path: Path) -> None:
    check = measure(*tiny, tmp_path / "store", **BASE | {"engine": "taylor"})["engine_check"]
    assert (check["engine"], check["reference"], check["sequences"]) == ("taylor", "jvp-of-grad", 2)
    assert 0 <= check["relative_difference"] < check["tolerance"] == 1e-9


def test_too_little_memory_names_the_settings_to_lower(
    tiny: tuple[Run, TokenCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhaust(call: int, forms: QuadraticForms) -> QuadraticForms:
        if call == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forms

    patch_engine(monkeypatch, exhaust)
    with pytest.raises(HvpflowError, match="lower hvp_batch_size to 2, or directions_per_pass to 1"):
        measure(*tiny, tmp_path / "store", **BASE, hvp_batch_size=5)


@pytest.mark.parametrize("engine", ["taylor", "jvp-of-grad"])
def test_fewer_directions_share_a_pass_where_memory_is_small(
    tiny: tuple[Run, TokenCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    settings = BASE | {"engine": engine, "directions_per_pass": "auto"}
    plenty = measure(*tiny, tmp_path / "plenty", **settings)
    monkeypatch.setattr(session, "memory_bytes", lambda device: 10_000)
    few = measure(*tiny, tmp_path / "few", **settings)
    assert [record["policy"]["directions_per_pass"] for record in (plenty, few)] == [3, 1]
    for one, other in zip(plenty["noise"] + plenty["random"], few["noise"] + few["random"], strict=True):
        assert one["quadratic"] == pytest.approx(other["quadratic"], rel=1e-12)


def test_cuda_that_is_not_there(tiny: tuple[Run, TokenCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(HvpflowError, match="use --device cpu"):
        measure(*tiny, tmp_path / "store", **BASE, device="cuda:0")


def test_a_full_disk_loses_nothing(
    tiny: tuple[Run, TokenCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hvpflow import files

    writes = 0

    def full(descriptor: int) -> None:
        nonlocal writes
        writes += 1
        if writes >= 6:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(HvpflowError, match="no room on the disk"):
            measure(*tiny, tmp_path / "store", **BASE)
    assert not list((tmp_path / "store").glob("*/.*.tmp"))
    assert len(measure(*tiny, tmp_path / "store", **BASE)["noise"]) == 2


def test_progress_says_how_far_and_how_long(
    tiny: tuple[Run, TokenCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hvpflow.measure import progress

    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    lines: list[str] = []
    measure(*tiny, tmp_path / "store", **BASE, progress=lines.append)
    text = "\n".join(lines)
    for part in ("epoch-001.safetensors (seen): mean gradient: ", "2/3 directions, ", " tokens/s, ", " left"):
        assert part in text
    assert lines[-1].startswith("epoch-001.safetensors (seen): 3/3 directions, 100 %")
    assert [progress.duration(seconds) for seconds in (0.4, 59.6, 3599, 3601)] == [
        *("0 s", "1 min 0 s", "59 min 59 s"),
        "1 h 0 min",
    ]
