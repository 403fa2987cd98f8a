"""Refused checkpoint names and .safetensors files: a message, never a traceback, never a result."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from runs_cases import (
    WRONG,
    random_weights,
    refuse,
    wrong_tensors,
)

from hvpflow.runs.checkpoints import write_safetensors
from hvpflow.runs.run import Run


@pytest.mark.parametrize("name", ["node-000/epoch-002.safetensors", "../run/final.pt", "resolved.yaml", "epoch-002"])
def test_only_root_checkpoints_are_read(packed: Run, name: str) -> None:
    refuse(packed, name, "expected a root checkpoint")


def test_missing_checkpoint_names_the_nearest(ordinary: Run) -> None:
    refuse(ordinary, "epoch-020.safetensors", r"no checkpoint 'epoch-020.safetensors' \(did you mean 'epoch-002.safe")


@pytest.mark.parametrize("name", ["weights.safetensors", "epoch-2.safetensors", "epoch-005.safetensors"])
def test_weights_without_a_position_are_refused(ordinary: Run, name: str) -> None:
    shutil.copy(ordinary.directory / "epoch-002.safetensors", ordinary.directory / name)
    refuse(ordinary, name, r"must be named epoch-NNN.safetensors with NNN from 001 to 004")


def oversized_header(content: bytes) -> bytes:
    return struct.pack("<Q", len(content) * 1000) + content[8:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:5],
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content + b"\0",
        oversized_header,
        lambda content: struct.pack("<Q", 2**63) + content[8:],
        lambda content: content[:8] + b"[" + content[9:],
        lambda content: content.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1),
        lambda content: content.replace(b'"F32"', b'"F99"', 1),
    ],
    ids=["empty", "short", "one-byte", "half", "longer", "header", "huge-header", "json", "offsets", "type"],
)
def test_damaged_safetensors(ordinary: Run, damage: Callable[[bytes], bytes]) -> None:
    path = ordinary.directory / "epoch-002.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert str(path) in refuse(ordinary, path.name, "not a valid safetensors file.*truncated or corrupt")


@pytest.mark.parametrize(("case", "message"), WRONG)
def test_wrong_tensors_in_safetensors(ordinary: Run, case: str, message: str) -> None:
    weights = random_weights(ordinary.recipe, 0)
    wrong_tensors(case, weights)
    safetensors.torch.save_file(weights, ordinary.directory / "epoch-002.safetensors")
    refuse(ordinary, "epoch-002.safetensors", message)


def test_writing_other_types_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Cannot cast"):
        write_safetensors(tmp_path / "w.safetensors", {"a": torch.zeros(2, dtype=torch.float64)})
    assert not list(tmp_path.iterdir())
