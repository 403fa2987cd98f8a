"""Bad checkpoints, refused by the step that inspects them: damaged, of another model or state, or made to mislead."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from refusal_cases import Refusal, refused

EXPORT, STATE, FINAL = "epoch-001.safetensors", "epoch-004.pt", "final.pt"
NORM, EMBEDDING = "norm.weight", "embedding.weight"


class Payload:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def replace(name: str, content: bytes) -> Callable[[Path], None]:
    """Write another file in place of a checkpoint, which is a link to training's own."""

    def arrange(directory: Path) -> None:
        path = directory / "run" / name
        path.unlink(missing_ok=True)
        path.write_bytes(content)

    return arrange


def edit_bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def arrange(directory: Path) -> None:
        replace(name, change((directory / "run" / name).read_bytes()))(directory)

    return arrange


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Change the tensors of an export, and write it as other programs do: without a hash."""

    def arrange(directory: Path) -> None:
        path = directory / "run" / EXPORT
        weights = safetensors.torch.load(path.read_bytes())
        change(weights)
        replace(EXPORT, safetensors.torch.save(weights))(directory)

    return arrange


def edit_state(change: Callable[[dict[str, Any]], object], name: str = STATE) -> Callable[[Path], None]:
    def arrange(directory: Path) -> None:
        path = directory / "run" / name
        content = torch.load(path, weights_only=True)
        change(content)
        path.unlink()
        torch.save(content, path)

    return arrange


def save(content: Any, name: str) -> Callable[[Path], None]:
    def arrange(directory: Path) -> None:
        path = directory / "run" / name
        path.unlink()
        torch.save(content, path)

    return arrange


def header(described: dict[str, Any] | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]} | changes


def compress(directory: Path) -> None:
    """A zip bomb: a few kilobytes that inflate to 200 MB."""
    path = directory / "run" / STATE
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    path.unlink()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, bytes(200_000_000) if name.endswith("data/0") else data)
    assert path.stat().st_size < 1_000_000


def flip_weight(data: bytes) -> bytes:
    """One bit in the last weight, which stays a plausible number."""
    return data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]


def poison(place: str) -> Callable[[Path], None]:
    return edit_state(lambda state: state[place].update(x=Payload()))


def inspect(checkpoint: str) -> list[str]:
    return ["inspect", "--config", "results/config.yaml", f"--checkpoint={checkpoint}"]


def export(name: str, says: list[str], arrange: Callable[[Path], object]) -> Refusal:
    return Refusal(name, inspect(EXPORT), [EXPORT, *says], arrange)


def state(name: str, says: list[str], arrange: Callable[[Path], object]) -> Refusal:
    return Refusal(name, inspect(STATE), [STATE, *says], arrange)


MANY = {f"t{number}": tensor() for number in range(100)}

REFUSALS = [
    export("export is empty", ["truncated or corrupt"], replace(EXPORT, b"")),
    export("export is text", ["truncated or corrupt"], replace(EXPORT, b"version https://git-lfs.example/spec/v1\n")),
    export("export is cut in its weights", ["truncated or corrupt"], edit_bytes(EXPORT, lambda data: data[:-100])),
    export("export is cut in its header", ["truncated or corrupt"], edit_bytes(EXPORT, lambda data: data[:50])),
    export("export has a byte more", ["truncated or corrupt"], edit_bytes(EXPORT, lambda data: data + b"\0")),
    export("a weight's bit is flipped", ["checksum mismatch"], edit_bytes(EXPORT, flip_weight)),
    export("header larger than its file", ["truncated or corrupt"], replace(EXPORT, header({}, length=2**62))),
    export("header of a gigabyte", ["truncated or corrupt"], replace(EXPORT, header({}, length=2**30))),
    export("header is no JSON", ["truncated or corrupt"], replace(EXPORT, header(b"{" * 200))),
    export("header nested without end", ["truncated or corrupt"], replace(EXPORT, header(b"[" * 100_000))),
    export("header is a list", ["truncated or corrupt"], replace(EXPORT, header(b"[1, 2]"))),
    export("tensors overlap", ["truncated or corrupt"], replace(EXPORT, header(MANY, bytes(64)))),
    export(
        "tensor outside the file",
        ["truncated or corrupt"],
        replace(EXPORT, header({NORM: tensor(data_offsets=[2**40, 2**40 + 64])}, bytes(64))),
    ),
    export(
        "shape beyond all memory",
        ["truncated or corrupt"],
        replace(EXPORT, header({NORM: tensor(shape=[2**40, 2**40])}, bytes(64))),
    ),
    export("a tensor is missing", ["lacks", NORM], edit_weights(lambda weights: weights.pop(NORM))),
    export("a tensor too many", ["extra"], edit_weights(lambda weights: weights.update(extra=torch.zeros(1)))),
    export(
        "a tensor of another shape",
        [NORM, "(17,)"],
        edit_weights(lambda weights: weights.update({NORM: torch.ones(17)})),
    ),
    export(
        "a tensor of half precision", [NORM, "F16"], edit_weights(lambda w: w.update({NORM: torch.ones(16).half()}))
    ),
    export("a weight is NaN", [NORM, "non-finite"], edit_weights(lambda w: w[NORM].fill_(float("nan")))),
    export("a weight is infinite", [EMBEDDING, "non-finite"], edit_weights(lambda w: w[EMBEDDING].fill_(float("inf")))),
    Refusal(
        "export is a directory",
        inspect(EXPORT),
        [EXPORT],
        lambda d: ((d / "run" / EXPORT).unlink(), (d / "run" / EXPORT).mkdir()),
    ),
    state("state is empty", ["truncated"], replace(STATE, b"")),
    state("state is text", ["truncated"], replace(STATE, b"hello\n")),
    state("state is cut", ["truncated"], edit_bytes(STATE, lambda data: data[:-100])),
    state("state is a bare pickle", ["truncated"], replace(STATE, pickle.dumps({"version": 2}))),
    state("pickle that runs a command", ["truncated"], replace(STATE, pickle.dumps(Payload()))),
    state("weights that run a command", ["foreign code"], poison("model")),
    state("optimizer that runs a command", ["foreign code"], poison("optimizer")),
    state("settings that run a command", ["foreign code"], poison("config")),
    state("zip bomb", ["compressed"], compress),
    state("state of another version", ["version 9"], edit_state(lambda s: s.update(version=9))),
    state("state without weights", ["'model'"], edit_state(lambda s: s.pop("model"))),
    state("state without a cursor", ["'cursor'"], edit_state(lambda s: s.pop("cursor"))),
    state("state of another epoch", ["epoch 2"], edit_state(lambda s: s.update(completed_epochs=2))),
    state("step that is a fraction", ["step is 1.5"], edit_state(lambda s: s.update(step=1.5))),
    state("cursor behind the end", ["behind the end"], edit_state(lambda s: s.update(cursor=10**9))),
    state("weights of another model", [NORM], edit_state(lambda s: s["model"].update({NORM: torch.ones(8)}))),
    state("weights not finite", [NORM, "non-finite"], edit_state(lambda s: s["model"][NORM].fill_(float("nan")))),
    state("state of another width", ["width"], edit_state(lambda s: s["config"]["model"].update(width=32))),
    state("state of another order", ["runtime.seed"], edit_state(lambda s: s["config"]["runtime"].update(seed=9))),
    state("a worker's own state", ["worker"], edit_state(lambda s: s.update(kind="packed_worker"))),
    Refusal("final state is a list", inspect(FINAL), [FINAL, "list"], save([1, 2], FINAL)),
]


def test_every_kind_of_input_is_in_the_catalogue():
    import test_pipeline_refusals as words
    import test_pipeline_refusals_runs as runs

    catalogue = [*words.REFUSALS, *runs.REFUSALS, *REFUSALS]
    assert len({refusal.name for refusal in catalogue}) == len(catalogue) >= 100


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_checkpoint(refusal, workplace, monkeypatch, capfd):
    (workplace.directory / "results" / "inspect" / f"{EXPORT}.json").unlink()
    refused(refusal, workplace, monkeypatch, capfd)
