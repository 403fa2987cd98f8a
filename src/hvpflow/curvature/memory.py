"""An estimate of what a pass will hold, from the planned graph, before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx

from hvpflow.curvature.plan import ALIASES, Plan
from hvpflow.curvature.rules import Workspace


def _bytes(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        return sum(_bytes(part) for part in value)
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _all_bytes(nodes: Iterable[fx.Node]) -> int:
    return sum(_bytes(node.meta["val"]) for node in nodes)


def _root(node: fx.Node) -> fx.Node:
    while node.target in ALIASES and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def estimate_bytes(plan: Plan, work: Workspace) -> tuple[int, int]:
    """Return (bytes of a pass whatever K, bytes of each direction), the weights themselves left out.

    A pass holds values and adjoints that are still to be read, and the temporaries of one slice or of one direction in
    one layer. A direction holds itself and, at the fullest moment, the tangents alive at once, with the one being made
    counted twice for a rule's own copies. Both are taken where they are largest, be it in different steps.
    """
    values = {_root(node) for node in plan.kept} - set(plan.sources)
    adjoints = _all_bytes(plan.curved)
    tangents: dict[fx.Node, int] = {}
    readers: dict[fx.Node, int] = {}
    fixed = each = 0
    for step in plan.steps:
        values |= {_root(node) for node in step.make} - set(plan.sources)
        layer = 0 if step.final else _all_bytes([step.node, *step.node.all_input_nodes])
        fixed = max(fixed, _all_bytes(values) + adjoints + layer)
        adjoints -= _bytes(step.node.meta["val"]) if step.curved else 0
        values -= {_root(node) for node in step.last_values}
        root = _root(step.node)
        new = 0 if root in plan.sources or step.final else _bytes(root.meta["val"])
        own = 2 * new if root is step.node else 0
        if step.final:
            own = _all_bytes(node for node in step.node.all_input_nodes if node not in plan.sources)
        each = max(each, sum(tangents.values()) + own)
        if not step.final and root not in plan.sources:
            tangents[root] = new
            readers[root] = readers.get(root, 0) + 1
        for node in step.last_tangents:
            root = _root(node)
            readers[root] = readers.get(root, 1) - 1
            if readers[root] <= 0:
                tangents.pop(root, None)
    itemsize = max(
        (_bytes(node.meta["val"]) // max(1, node.meta["val"].numel()) for node in plan.parameters), default=4
    )
    slices = 8 * work.slice_elements + 4 * work.head_tokens * work.head_columns
    return fixed + slices * itemsize, _all_bytes(plan.parameters) + each
