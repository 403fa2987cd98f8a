"""The arena [W, S] of a packed run: row w is worker w's parameters, end to end.

Each parameter starts at a multiple of 64 elements, in parameter order; what lies between the parameters is zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64

Shapes = Mapping[str, tuple[int, ...]]


def storage_layout(shapes: Shapes) -> list[dict[str, Any]]:
    """Where each parameter lies in a row of the arena."""
    layout, start = [], 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        padded = -(-numel // _ALIGNMENT) * _ALIGNMENT
        layout.append({"name": name, "shape": tuple(shape), "start": start, "numel": numel, "padded_numel": padded})
        start += padded
    return layout


def storage_size(shapes: Shapes) -> int:
    """S: elements of a row of the arena."""
    return sum(entry["padded_numel"] for entry in storage_layout(shapes))


def unpack(storage: Tensor, shapes: Shapes) -> list[dict[str, Tensor]]:
    """The workers' parameters as views into ``storage`` [W, S]."""
    layout = storage_layout(shapes)
    return [
        {entry["name"]: row[entry["start"] : entry["start"] + entry["numel"]].view(entry["shape"]) for entry in layout}
        for row in storage
    ]


def pack(workers: Sequence[Mapping[str, Tensor]], shapes: Shapes) -> Tensor:
    """The arena [W, S] of the workers' parameters."""
    storage = torch.zeros(len(workers), storage_size(shapes))
    for views, worker in zip(unpack(storage, shapes), workers, strict=True):
        for name, view in views.items():
            view.copy_(worker[name])
    return storage


def average(workers: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The workers' float32 mean, by one reduction over the rows of their arena.

    The arena matters: torch adds up the last columns of a row length that is no multiple of its vector width in
    another order, so for more than four workers means of single tensors differ from this in the last bit.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in workers[0].items()}
    return unpack(pack(workers, shapes).mean(0, keepdim=True), shapes)[0]
