"""Random damage, to files and to the entries of states: our own error or none, never another."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs_cases import (
    make_run,
    rewrite_worker,
    small_mapping,
    worker_state,
)

from hvpflow.errors import HvpflowError
from hvpflow.runs.checkpoints import read_checkpoint
from hvpflow.runs.pt_files import load_pt, write_pt
from hvpflow.runs.recipe import recipe_from_mapping
from hvpflow.runs.run import Run

ODD_VALUES: list[Any] = [None, -1, 2.5, "x", b"x", [], {}, (1, 2), torch.zeros(2), torch.zeros(()), {"a": {"b": [1]}}]


@pytest.mark.parametrize("kind", ["ordinary", "packed", "epoch", "worker"])
def test_no_odd_value_in_any_entry_gives_a_traceback(tmp_path: Path, kind: str) -> None:
    run = make_run(tmp_path / "run", packed=kind != "ordinary")
    name = "final.pt" if kind == "packed" else "epoch-002.pt"
    state = load_pt(run.directory / name) if kind != "worker" else worker_state(run.recipe, 2, 1).to_dict()
    for path in entry_paths(state):
        for value in ODD_VALUES[:: 1 if len(path) == 1 else 4]:
            if kind == "worker":
                rewrite_worker(run, 1, lambda content, path=path, value=value: put(content, path, value))  # type: ignore[misc]
            else:
                content = torch.load(io.BytesIO(saved(state)), weights_only=True)
                put(content, path, value)
                write_pt(run.directory / name, content)
            # Anything but our own error fails the test; a harmless change may be accepted.
            with contextlib.suppress(HvpflowError):
                read_checkpoint(run, name)


def saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def entry_paths(content: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Paths to the entries of a state: all of the first level, the first two of each container below."""
    paths: list[tuple[Any, ...]] = []

    def visit(value: Any, path: tuple[Any, ...]) -> None:
        keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
        for key in keys if len(path) == 0 else keys[:2]:
            paths.append((*path, key))
            if len(path) < 3:
                visit(value[key], (*path, key))

    visit(content, ())
    return paths


def put(content: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        content = content[key]
    content[path[-1]] = value


@given(position=st.floats(0, 1), length=st.integers(1, 30), data=st.binary(min_size=1, max_size=30))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("name", ["epoch-002.safetensors", "final.pt"])
def test_random_damage_never_gives_a_traceback(
    written_runs: dict[str, Path], tmp_path: Path, name: str, position: float, length: int, data: bytes
) -> None:
    directory = tmp_path / "damaged"
    shutil.copytree(written_runs["ordinary"], directory, dirs_exist_ok=True)
    run = Run(directory, recipe_from_mapping(small_mapping()))
    content = (written_runs["ordinary"] / name).read_bytes()
    # Headers are short: half of the positions lie in the first or last kilobyte.
    start = int(position * 2 * 1024) if position < 0.5 else int((position - 0.5) * 2 * len(content))
    (directory / name).write_bytes(content[:start] + data + content[start + length :])
    with contextlib.suppress(HvpflowError):
        read_checkpoint(run, name)
