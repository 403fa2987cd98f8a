"""Run directories: what counts as a checkpoint, selecting by name, and where the token cache is looked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from runs_cases import small_mapping

from hvpflow.errors import HvpflowError
from hvpflow.runs.recipe import recipe_from_mapping
from hvpflow.runs.run import Run, checkpoint_epoch, find_cache, open_run, select_checkpoints


def test_checkpoints_are_root_files_of_the_known_names(ordinary: Run) -> None:
    for name in ("model.safetensors", "epoch-1.pt", "epoch-0005.pt", "epoch-000.pt", "best.pt", ".epoch-003.pt.tmp"):
        (ordinary.directory / name).touch()
    (ordinary.directory / "epoch-003.pt").mkdir()
    (ordinary.directory / "node-000").mkdir()
    (ordinary.directory / "node-000" / "epoch-004.pt").touch()
    assert ordinary.checkpoints() == ["epoch-002.pt", "epoch-002.safetensors", "final.pt"]


@pytest.mark.parametrize(
    ("name", "epoch"),
    [
        ("epoch-007.pt", 7),
        ("epoch-120.safetensors", 120),
        ("epoch-1000.pt", 1000),
        ("epoch-0100.pt", None),
        ("epoch-000.pt", None),
        ("final.pt", None),
        ("epoch-007.txt", None),
        ("epoch-007.pt\n", None),
    ],
)
def test_epoch_in_a_name(name: str, epoch: int | None) -> None:
    assert checkpoint_epoch(name) == epoch


def test_reference_runs_open(reference: Path) -> None:
    for path in sorted((reference / "runs").iterdir()):
        assert len(open_run(path).checkpoints()) == 9


def test_directories_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HvpflowError, match="no run directory"):
        open_run(tmp_path / "absent")
    with pytest.raises(HvpflowError, match=r"is no run: it holds no resolved\.yaml"):
        open_run(tmp_path)


AVAILABLE = ["final.pt", "epoch-002.pt", "epoch-001.safetensors", "node-000/epoch-001.safetensors"]


def test_selection_is_sorted_and_unique() -> None:
    assert select_checkpoints(AVAILABLE, "all") == ["epoch-001.safetensors", "epoch-002.pt", "final.pt"]
    assert select_checkpoints(AVAILABLE, ["all"]) == select_checkpoints(AVAILABLE, "all")
    assert select_checkpoints(AVAILABLE, ["final.pt", "epoch-002.pt", "final.pt"]) == ["epoch-002.pt", "final.pt"]


@pytest.mark.parametrize(
    ("available", "wanted", "message"),
    [
        (AVAILABLE, ["epoch-001.pt"], r"no checkpoint 'epoch-001.pt' \(did you mean 'epoch-00"),
        (AVAILABLE, ["final"], r"did you mean 'final.pt'"),
        (AVAILABLE, "xyz", "it has epoch-001.safetensors, epoch-002.pt, final.pt"),
        (AVAILABLE, ["node-000/epoch-001.safetensors"], r"no root checkpoint.*did you mean 'epoch-001.safetensors'"),
        (AVAILABLE, [], "no checkpoints selected"),
        (["node-000/epoch-001.pt"], "all", "checkpoint_policy final .*interval .*explicit"),
        ([], ["final.pt"], "checkpoint_policy"),
    ],
)
def test_selection_refusals(available: list[str], wanted: str | list[str], message: str) -> None:
    with pytest.raises(HvpflowError, match=message):
        select_checkpoints(available, wanted)  # type: ignore[arg-type]


def make_cache(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text("{}")
    return directory


@pytest.fixture
def relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run at a/b/run with the cache directory data/small, seen from another current directory."""
    directory = tmp_path / "a" / "b" / "run"
    directory.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return Run(directory, recipe_from_mapping(small_mapping()))


def test_relative_cache_is_looked_up_from_here_then_upwards(relative: Run, tmp_path: Path) -> None:
    # Each cache made is nearer than the one before.
    for place in (tmp_path, tmp_path / "a", relative.directory, tmp_path / "elsewhere"):
        make_cache(place / "data" / "small")
        assert find_cache(relative, None).resolve() == place / "data" / "small"


def test_missing_cache_names_every_place(relative: Run, tmp_path: Path) -> None:
    with pytest.raises(HvpflowError, match=r"(?s)no token cache .*--cache-dir") as caught:
        find_cache(relative, None)
    for place in ("elsewhere", "a/b/run", "a/b", "a", "."):
        assert os.path.normpath(tmp_path / place / "data" / "small") in str(caught.value)


def test_override_is_the_only_place(relative: Run, tmp_path: Path) -> None:
    make_cache(tmp_path / "data" / "small")
    with pytest.raises(HvpflowError, match="other") as caught:
        find_cache(relative, Path("other"))
    assert "small" not in str(caught.value)
    make_cache(tmp_path / "elsewhere" / "other")
    assert find_cache(relative, Path("other")) == Path("other")
