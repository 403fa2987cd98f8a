"""Working directories in which the real workflow ran, or is about to."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from workflow_cases import Workplace, finished_workflow, tiny_mapping, write_text_files


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory where the whole workflow ran once. Never change it: ask for ``workplace``."""
    return finished_workflow(tmp_path_factory)


@pytest.fixture
def workplace(finished: Path, tmp_path: Path) -> Workplace:
    """A copy of the finished workflow, times of files included, to do with as the test likes."""
    directory = tmp_path / "work place"
    shutil.copytree(finished, directory, copy_function=shutil.copy2)
    return Workplace(directory)


@pytest.fixture
def fresh(tmp_path: Path) -> Workplace:
    """A working directory with text and configuration, in which nothing ran yet."""
    place = Workplace(tmp_path / "fresh")
    write_text_files(place.directory / "text")
    place.write_config(tiny_mapping())
    return place


@pytest.fixture
def mapping() -> Callable[[], dict[str, Any]]:
    return tiny_mapping
