"""Runs that tests of this room may change: each test gets a copy of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from runs_cases import make_run

from hvpflow.runs.run import Run, open_run


@pytest.fixture(scope="session")
def written_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An ordinary and a packed run, written once."""
    root = tmp_path_factory.mktemp("runs")
    return {kind: make_run(root / kind, packed=kind == "packed").directory for kind in ("ordinary", "packed")}


@pytest.fixture
def ordinary(written_runs: dict[str, Path], tmp_path: Path) -> Run:
    shutil.copytree(written_runs["ordinary"], tmp_path / "run")
    return open_run(tmp_path / "run")


@pytest.fixture
def packed(written_runs: dict[str, Path], tmp_path: Path) -> Run:
    shutil.copytree(written_runs["packed"], tmp_path / "run")
    return open_run(tmp_path / "run")
