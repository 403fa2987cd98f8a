"""Training states (``.pt``): the dictionary on disk as a typed object.

Three versions share nine entries. Version 2 is an ordinary run's, version 3 a packed run's with all workers in one
file, version 4 the root of a packed epoch, whose workers lie in files of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hvpflow.errors import HvpflowError
from hvpflow.runs.pt_files import load_pt, write_pt

ORDINARY, PACKED, PACKED_EPOCH = 2, 3, 4
PACKED_EPOCH_KIND, PACKED_WORKER_KIND = "packed_epoch", "packed_worker"


@dataclass(kw_only=True, slots=True)
class TrainingState:
    """All that a training continues from."""

    config: Mapping[str, Any]
    """The recipe's mapping."""
    recipe_identity: str
    rng: Mapping[str, Any]
    """States of the generators of python, numpy, torch and cuda, numpy's as plain integers: a safe loader reads it."""
    cursor: int
    """Sequences consumed."""
    step: int
    """Updates made."""
    completed_epochs: int
    best_loss: float | None
    best_epoch: int | None
    loader: Mapping[str, Any]
    """The stream's identity and cursor."""
    model: Mapping[str, Any] | None = None
    """Version 2: name -> tensor. Version 3: layout and parameter storage. Version 4: none."""
    optimizer: Mapping[str, Any] | None = None
    """Version 2: AdamW's state dict. Version 3: layout and moment storages. Version 4: none."""
    workers: list[Mapping[str, Any]] | None = None
    """Version 4: worker number, path and SHA-256 of each worker's file."""
    version: int = ORDINARY

    def to_dict(self) -> dict[str, Any]:
        """The dictionary on disk; plain data and tensors only."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.version == PACKED_EPOCH:
            workers = content["workers"] or []
            content |= {"kind": PACKED_EPOCH_KIND, "num_workers": len(workers)}
            del content["model"], content["optimizer"]
        else:
            del content["workers"]
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], where: str = "the training state") -> TrainingState:
        """Check the entries that every version has, and those of this version.

        Raises:
            HvpflowError: another version, a worker's own file, or missing or mistyped entries.
        """
        if same(content.get("kind"), PACKED_WORKER_KIND):
            raise HvpflowError(
                f"{where} is a single worker's state, which is not complete alone: name the root file of its epoch"
            )
        version = content.get("version")
        if not any(same(version, known) for known in (ORDINARY, PACKED, PACKED_EPOCH)):
            raise HvpflowError(f"{where} has version {version!r}, expected a training state of version 2, 3 or 4")
        own = ("workers",) if version == PACKED_EPOCH else ("model", "optimizer")
        skipped = {"workers", "model", "optimizer"} - set(own)
        values = {}
        for field in fields(cls):
            if field.name in skipped:
                continue
            if field.name not in content:
                raise HvpflowError(f"{where} lacks the entry {field.name!r} of a training state")
            values[field.name] = content[field.name]
        for name in ("config", "rng", "loader", *(() if version == PACKED_EPOCH else own)):
            _expect(values[name], Mapping, name, "a mapping", where)
        _expect(values["recipe_identity"], str, "recipe_identity", "text", where)
        for name in ("cursor", "step", "completed_epochs"):
            if not is_count(values[name]):
                raise HvpflowError(f"{where}: {name} is {values[name]!r}, expected a whole number from 0 on")
        if version == PACKED_EPOCH:
            if not same(content.get("kind"), PACKED_EPOCH_KIND):
                raise HvpflowError(f"{where}: kind is {content.get('kind')!r}, expected {PACKED_EPOCH_KIND!r}")
            _expect(values["workers"], list, "workers", "a list", where)
            if not same(content.get("num_workers"), len(values["workers"])):
                raise HvpflowError(
                    f"{where}: num_workers is {content.get('num_workers')!r}, but {len(values['workers'])} are listed"
                )
        return cls(**values)


def same(found: object, expected: object) -> bool:
    """Equality that asks for the type first: a tensor in a number's place must not be compared element by element."""
    return type(found) is type(expected) and found == expected


def is_count(value: object) -> bool:
    """Whether ``value`` is a whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _expect(value: object, kind: type, name: str, expected: str, where: str) -> None:
    if not isinstance(value, kind):
        raise HvpflowError(f"{where}: {name} is a {type(value).__name__}, expected {expected}")


def write_training_state(path: Path, state: TrainingState) -> None:
    """Write ``state`` atomically."""
    write_pt(path, state.to_dict())


def read_training_state(path: Path) -> TrainingState:
    """Read a training state of any version, ours or foreign. Its tensors may be mapped from the file.

    Raises:
        HvpflowError: see ``load_pt`` and ``TrainingState.from_dict``.
    """
    return TrainingState.from_dict(load_pt(path), str(path))
