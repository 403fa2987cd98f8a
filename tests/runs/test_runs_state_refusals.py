"""Refused training states: damaged or hostile archives, and entries that do not fit the run."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs_cases import (
    WRONG,
    Change,
    ordinary_state,
    random_weights,
    refuse,
    rewrite_root,
    wrong_tensors,
)

from hvpflow.errors import HvpflowError
from hvpflow.runs.checkpoints import read_checkpoint
from hvpflow.runs.pt_files import load_pt
from hvpflow.runs.run import Run


@pytest.mark.parametrize("keep", [0, 10, 1000, -1, -100])
def test_truncated_states(ordinary: Run, keep: int) -> None:
    path = ordinary.directory / "final.pt"
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in refuse(ordinary, "final.pt", "truncated or no torch.save archive")


def test_a_flipped_bit_is_found_by_the_checksum(ordinary: Run) -> None:
    path = ordinary.directory / "final.pt"
    content = bytearray(path.read_bytes())
    values = random_weights(ordinary.recipe, 0)["embedding.weight"].numpy().tobytes()
    content[content.index(values) + 17] ^= 1
    path.write_bytes(content)
    refuse(ordinary, "final.pt", "checksum mismatch")


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("place", ["rng", "model", "top"])
def test_foreign_objects_are_refused_and_not_run(ordinary: Run, place: str) -> None:
    mark = ordinary.directory / "was-run"
    content: Any = ordinary_state(ordinary.recipe, 2).to_dict()
    if place == "top":
        content = Payload(f"touch {mark}")
    else:
        content[place] = dict(content[place]) | {"x": Payload(f"touch {mark}")}
    torch.save(content, ordinary.directory / "epoch-002.pt")
    text = refuse(ordinary, "epoch-002.pt", r"objects beyond tensors and plain data \((posix|nt).system\)")
    assert "\n" not in text
    assert not mark.exists()


def test_other_numpy_types_are_refused(ordinary: Run) -> None:
    content = ordinary_state(ordinary.recipe, 2).to_dict()
    content["rng"]["numpy"] = np.zeros(3)
    torch.save(content, ordinary.directory / "epoch-002.pt")
    refuse(ordinary, "epoch-002.pt", "refused|cannot be loaded")


@pytest.mark.parametrize("kind", ["pickle", "legacy", "text", "zip"])
def test_files_that_are_no_states(ordinary: Run, kind: str) -> None:
    path = ordinary.directory / "final.pt"
    match kind:
        case "pickle":
            path.write_bytes(pickle.dumps({"version": 2}))
        case "legacy":
            torch.save({"version": 2}, path, _use_new_zipfile_serialization=False)
        case "text":
            path.write_text("version https://git-lfs.example/spec/v1\n")
        case "zip":
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("archive/readme", "hello")
    refuse(ordinary, "final.pt", "truncated or no torch.save archive|cannot be loaded|refused")


def rezip(path: Path, compression: int, change: Callable[[str, bytes], bytes] = lambda name, data: data) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, change(name, data))


def test_compressed_archives_are_refused(ordinary: Run) -> None:
    path = ordinary.directory / "final.pt"
    rezip(path, zipfile.ZIP_DEFLATED, lambda name, data: bytes(50_000_000) if name.endswith("data/0") else data)
    assert path.stat().st_size < 200_000
    refuse(ordinary, "final.pt", "compressed or overlapping records")


def test_overlapping_records_are_refused(ordinary: Run) -> None:
    """Many directory entries that share one stored record: a small file that claims to be large."""
    path = ordinary.directory / "final.pt"
    rezip(path, zipfile.ZIP_STORED)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        biggest = max(archive.infolist(), key=lambda record: record.file_size)
        directory_start = archive.start_dir
    end = content.rindex(b"PK\x05\x06")
    directory = content[directory_start:end]
    entry_start = directory.index(biggest.filename.encode()) - 46
    size = 46 + sum(struct.unpack("<HHH", directory[entry_start + 28 : entry_start + 34]))
    repeated = directory[entry_start : entry_start + size] * 1000
    count = struct.unpack("<H", content[end + 10 : end + 12])[0] + 1000
    tail = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, len(directory + repeated), directory_start, 0)
    path.write_bytes(content[:directory_start] + directory + repeated + tail)
    refuse(ordinary, "final.pt", "compressed or overlapping records")


def test_storage_that_claims_more_than_its_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save({"a": torch.zeros(200)}, path)
    # 200 as BININT1 in the pickle, twice: elements of the storage and of the tensor. 255 is what fits the opcode.
    rezip(path, zipfile.ZIP_STORED, lambda name, data: data.replace(b"K\xc8", b"K\xff") if "pkl" in name else data)
    load_pt(path)  # Still inside the file: harmless, and names and shapes are checked afterwards.
    torch.save({"a": torch.zeros(1 << 20)}, path)
    claimed, larger = (b"J" + struct.pack("<i", size) for size in (1 << 20, 1 << 30))
    rezip(path, zipfile.ZIP_STORED, lambda name, data: data.replace(claimed, larger) if "pkl" in name else data)
    with pytest.raises(HvpflowError, match="cannot be loaded"):
        load_pt(path)


def test_a_tensor_of_zero_strides_is_refused_by_its_shape(ordinary: Run) -> None:
    content = ordinary_state(ordinary.recipe, 2).to_dict()
    content["model"]["norm.weight"] = torch.zeros(1).expand(1 << 50)
    torch.save(content, ordinary.directory / "epoch-002.pt")
    refuse(ordinary, "epoch-002.pt", r"'norm.weight' has shape \(1125899906842624,\)")


def set_config(section: str, key: str, value: Any) -> Change:
    return lambda content: content["config"][section].update({key: value})


STATE_CHANGES: list[tuple[str, Change, str]] = [
    ("version", lambda c: c.update(version=1), "has version 1, expected"),
    ("version-type", lambda c: c.update(version=True), "has version True"),
    ("no-model", lambda c: c.pop("model"), "lacks the entry 'model'"),
    ("no-rng", lambda c: c.pop("rng"), "lacks the entry 'rng'"),
    ("model-type", lambda c: c.update(model=[1]), "model is a list, expected a mapping"),
    ("cursor-type", lambda c: c.update(cursor=1.5), "cursor is 1.5, expected a whole number"),
    ("negative", lambda c: c.update(step=-1), "step is -1"),
    ("beyond", lambda c: c.update(cursor=10**6), "behind the end"),
    ("position", lambda c: c.update(cursor=c["cursor"] - 8), "is not the end of epoch 2"),
    ("step", lambda c: c.update(step=c["step"] + 1), "is not the end of epoch 2"),
    ("epoch", lambda c: c.update(completed_epochs=3), "holds the state after epoch 3, not 2"),
    ("worker", lambda c: c.update(kind="packed_worker"), "a single worker's state"),
    ("tensor", lambda c: c.update(norm=1, model=c["model"] | {"norm.weight": 3}), "'norm.weight' is no dense tensor"),
    (
        "sparse",
        lambda c: c["model"].update({"norm.weight": torch.zeros(8).to_sparse()}),
        "'norm.weight' is no dense tensor|cannot be loaded",
    ),
    ("model-config", set_config("model", "rope_theta", 500.0), "model.rope_theta is 500.0 in .*, 10000.0 in"),
    ("init-std", set_config("model", "init_std", 0.5), "recipe does not match: model.init_std"),
    ("batch", set_config("training", "batch_tokens", 64), "recipe does not match: training.batch_tokens is 64"),
    ("invalid-config", set_config("training", "batch_tokens", 30), "its recipe is not valid"),
    ("odd-config", set_config("model", "width", torch.zeros(3)), "its recipe is not valid"),
    ("packed", lambda c: c["config"].update(decentralized={"num_models": 4}), "decentralized.num_models"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in STATE_CHANGES], ids=[c[0] for c in STATE_CHANGES])
def test_states_with_wrong_entries(ordinary: Run, change: Change, message: str) -> None:
    rewrite_root(ordinary, ordinary_state(ordinary.recipe, 2), "epoch-002.pt", change)
    refuse(ordinary, "epoch-002.pt", message)


@pytest.mark.parametrize(
    "change",
    [
        set_config("training", "checkpoint_policy", "none"),
        set_config("training", "save_epoch_training_state", False),
        set_config("data", "cache_dir", "elsewhere"),
        set_config("runtime", "device", "cuda:0"),
        set_config("optimizer", "lr", 1.0),
    ],
)
def test_retention_data_and_machine_may_differ(ordinary: Run, change: Change) -> None:
    rewrite_root(ordinary, ordinary_state(ordinary.recipe, 2), "epoch-002.pt", change)
    assert read_checkpoint(ordinary, "epoch-002.pt").epoch == 2


@pytest.mark.parametrize(("case", "message"), WRONG)
def test_wrong_tensors_in_a_training_state(ordinary: Run, case: str, message: str) -> None:
    rewrite_root(
        ordinary, ordinary_state(ordinary.recipe, 2), "epoch-002.pt", lambda c: wrong_tensors(case, c["model"])
    )
    refuse(ordinary, "epoch-002.pt", message)
