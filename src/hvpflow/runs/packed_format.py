"""Packed runs' training states: all workers in one arena, or one file a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from hvpflow.errors import HvpflowError
from hvpflow.runs.arena import Shapes, storage_layout, storage_size, unpack
from hvpflow.runs.state_format import PACKED_WORKER_KIND, is_count, same
from hvpflow.runs.weights import check_names, check_tensor, check_weights

_ARENA_VERSION = _WORKER_VERSION = 1


def arena_model(storage: Tensor, shapes: Shapes) -> dict[str, Any]:
    """The ``model`` entry of a packed state."""
    return {"version": _ARENA_VERSION, "layout": storage_layout(shapes), "parameter_storage": storage}


def arena_optimizer(
    first_moments: Tensor, second_moments: Tensor, workers: list[dict[str, Any]], shapes: Shapes
) -> dict[str, Any]:
    """The ``optimizer`` entry of a packed state; ``workers`` hold the steps and the two groups of each."""
    return {
        "version": _ARENA_VERSION,
        "layout": storage_layout(shapes),
        "first_moment_storage": first_moments,
        "second_moment_storage": second_moments,
        "workers": workers,
    }


def check_arena_model(
    model: Mapping[str, Any], shapes: Shapes, num_workers: int, where: str
) -> list[dict[str, Tensor]]:
    """Check a packed state's ``model`` entry; returns the workers' parameters, independent of the file.

    Raises:
        HvpflowError: another layout, number of workers or type, values between the parameters, non-finite values.
    """
    storage = _check_storage(model, "parameter_storage", shapes, num_workers, where)
    return [
        check_weights(views, shapes, f"{where} (worker {worker})")
        for worker, views in enumerate(unpack(storage, shapes))
    ]


def check_arena_optimizer(
    optimizer: Mapping[str, Any], shapes: Shapes, num_workers: int, step: int, where: str
) -> None:
    """Check a packed state's ``optimizer`` entry.

    Raises:
        HvpflowError: as for the model, negative second moments, or step counters other than ``step``.
    """
    _check_storage(optimizer, "first_moment_storage", shapes, num_workers, where)
    second = _check_storage(optimizer, "second_moment_storage", shapes, num_workers, where)
    if (second < 0).any():
        raise HvpflowError(f"{where}: second_moment_storage holds negative values")
    workers = optimizer.get("workers")
    if not isinstance(workers, list) or len(workers) != num_workers:
        raise HvpflowError(f"{where}: the optimizer does not list {num_workers} workers")
    for number, worker in enumerate(workers):
        steps = worker.get("steps") if isinstance(worker, Mapping) else None
        groups = worker.get("groups") if isinstance(worker, Mapping) else None
        if not isinstance(steps, list) or len(steps) != len(shapes) or any(not _is_step(s, step) for s in steps):
            raise HvpflowError(f"{where} (worker {number}): the optimizer's step counters are not all {step}")
        if not isinstance(groups, list) or len(groups) != 2:
            raise HvpflowError(f"{where} (worker {number}): the optimizer does not have two parameter groups")


def _check_storage(entry: Mapping[str, Any], name: str, shapes: Shapes, num_workers: int, where: str) -> Tensor:
    if not same(entry.get("version"), _ARENA_VERSION) or not _same_layout(entry.get("layout"), shapes):
        raise HvpflowError(f"{where}: the layout of {name} is not that of the run's model section")
    layout, size = storage_layout(shapes), storage_size(shapes)
    storage = check_tensor(entry.get(name), name, (num_workers, size), where)
    used = torch.zeros(size, dtype=torch.bool)
    for item in layout:
        used[item["start"] : item["start"] + item["numel"]] = True
    if storage[:, ~used].any():
        raise HvpflowError(f"{where}: {name} holds values between the parameters, where zeros belong")
    return storage


def _same_layout(found: Any, shapes: Shapes) -> bool:
    layout = storage_layout(shapes)
    if not isinstance(found, list) or len(found) != len(layout):
        return False
    for item, expected in zip(found, layout, strict=True):
        if not isinstance(item, Mapping) or set(item) != set(expected):
            return False
        shape, numbers = item["shape"], ("start", "numel", "padded_numel", "name")
        if not isinstance(shape, (tuple, list)) or not all(is_count(size) for size in shape):
            return False
        if tuple(shape) != expected["shape"] or not all(same(item[key], expected[key]) for key in numbers):
            return False
    return True


def _names(group: Any) -> list[str]:
    names = group.get("params") if isinstance(group, Mapping) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, (list, tuple)) else []


def _is_step(value: Any, step: int) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and float(value) == step


@dataclass(kw_only=True, slots=True)
class WorkerState:
    """One worker's part of a packed epoch."""

    worker: int
    num_workers: int
    model_config: Mapping[str, Any]
    recipe_identity: str
    cursor: int
    step: int
    completed_epochs: int
    model: Mapping[str, Any]
    """name -> tensor."""
    optimizer: Mapping[str, Any]
    """``state``: name -> {step, exp_avg, exp_avg_sq}; ``param_groups``: two groups, whose params are names."""

    def to_dict(self) -> dict[str, Any]:
        """The dictionary on disk."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"version": _WORKER_VERSION, "kind": PACKED_WORKER_KIND, **content}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], where: str) -> WorkerState:
        """Check version, kind and the presence of all entries.

        Raises:
            HvpflowError: it is something else.
        """
        if not same(content.get("version"), _WORKER_VERSION) or not same(content.get("kind"), PACKED_WORKER_KIND):
            raise HvpflowError(f"{where} is no worker state (version 1, kind {PACKED_WORKER_KIND})")
        for field in fields(cls):
            if field.name not in content:
                raise HvpflowError(f"{where} lacks the entry {field.name!r} of a worker state")
            if field.type == "int" and not is_count(content[field.name]):
                raise HvpflowError(f"{where}: {field.name} is {content[field.name]!r}, expected a whole number")
            if field.type == "str" and not isinstance(content[field.name], str):
                raise HvpflowError(f"{where}: {field.name} is no text")
            if field.type == "Mapping[str, Any]" and not isinstance(content[field.name], Mapping):
                raise HvpflowError(f"{where}: {field.name} is no mapping")
        return cls(**{field.name: content[field.name] for field in fields(cls)})

    def check(self, shapes: Shapes, where: str) -> dict[str, Tensor]:
        """Check model and optimizer; returns the weights, independent of the file.

        Raises:
            HvpflowError: names, shapes, types, values, moments, step counters or groups are not as expected.
        """
        weights = check_weights(self.model, shapes, where)
        states = self.optimizer.get("state")
        if not isinstance(states, Mapping):
            raise HvpflowError(f"{where}: the optimizer has no state")
        check_names(list(states), shapes, f"{where}, optimizer")
        for name, shape in shapes.items():
            state = states[name]
            if not isinstance(state, Mapping) or not _is_step(state.get("step"), self.step):
                raise HvpflowError(f"{where}: the optimizer's step counter of {name!r} is not {self.step}")
            check_tensor(state.get("exp_avg"), f"exp_avg of {name}", shape, where)
            if (check_tensor(state.get("exp_avg_sq"), f"exp_avg_sq of {name}", shape, where) < 0).any():
                raise HvpflowError(f"{where}: exp_avg_sq of {name!r} holds negative values")
        # Matrices are decayed, vectors are not; each group is in parameter order.
        expected = [[name for name in shapes if (len(shapes[name]) >= 2) is matrices] for matrices in (True, False)]
        groups = self.optimizer.get("param_groups")
        if not isinstance(groups, list) or [_names(group) for group in groups] != expected:
            raise HvpflowError(f"{where}: the optimizer's two parameter groups are not the matrices and the vectors")
        return weights
