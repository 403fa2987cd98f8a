"""An estimate of what a pass will hold, from the planned graph, before anything is computed."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from hvpflow.curvature.graph import Plan
from hvpflow.curvature.rules import Workspace

aten = torch.ops.aten

_ALIASES = {
    operator.getitem,
    aten.view.default,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.transpose.int,
    aten.permute.default,
    aten.t.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.expand.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.to.dtype,
}
"""Operations whose output usually shares its input's storage."""


def _bytes(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        return sum(_bytes(part) for part in value)
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _all_bytes(nodes: Iterable[fx.Node]) -> int:
    return sum(_bytes(node.meta["val"]) for node in nodes)


def _root(node: fx.Node) -> fx.Node:
    while node.target in _ALIASES and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def estimate_bytes(plan: Plan, work: Workspace) -> tuple[int, int]:
    """Return (bytes of a pass whatever K, bytes of each direction), the weights themselves left out.

    A pass holds the kept values, the adjoints, and the temporaries of one slice or of one direction in one layer. A
    direction holds itself and, at the fullest moment, the tangents alive at once, with the one being made counted twice
    for a rule's own copies.
    """
    roots = {_root(node) for node in plan.kept} - set(plan.sources)
    fixed = _all_bytes(roots) + _all_bytes(plan.curved)
    itemsize = max(
        (_bytes(node.meta["val"]) // max(1, node.meta["val"].numel()) for node in plan.parameters), default=4
    )
    layers = [_all_bytes([step.node, *step.node.all_input_nodes]) for step in plan.steps if not step.final]
    fixed += max(layers, default=0)
    slices = 8 * work.slice_elements + 4 * work.head_tokens * work.head_columns
    directions = _all_bytes(plan.parameters)
    alive: dict[fx.Node, int] = {}
    readers: dict[fx.Node, int] = {}
    fullest = 0
    for step in plan.steps:
        root = _root(step.node)
        new = 0 if root in plan.sources or step.final else _bytes(root.meta["val"])
        own = 2 * new if root is step.node else 0
        if step.final:
            own = _all_bytes(node for node in step.node.all_input_nodes if node not in plan.sources)
        fullest = max(fullest, sum(alive.values()) + own)
        if not step.final and root not in plan.sources:
            alive[root] = new
            readers[root] = readers.get(root, 0) + 1
        for node in step.last_tangents:
            root = _root(node)
            readers[root] = readers.get(root, 1) - 1
            if readers[root] <= 0:
                alive.pop(root, None)
    return fixed + slices * itemsize, directions + fullest
