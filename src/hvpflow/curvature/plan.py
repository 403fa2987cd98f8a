"""What is known of a model's graph before any number is: its operations, what moves and bends, and who reads what."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from hvpflow.curvature.rules import Rule, node_inputs

aten = torch.ops.aten

ALIASES = {
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


@dataclass(slots=True)
class Step:
    """One operation of the tangent pass."""

    node: fx.Node
    rule: Rule
    bound: dict[str, Any]
    moving: frozenset[str]
    curved: bool
    final: bool
    owned: frozenset[str] = frozenset()
    """Arguments whose tangents the rule may overwrite."""
    last_tangents: list[fx.Node] = field(default_factory=list)
    """Nodes whose tangents nobody reads after this step."""
    make: list[fx.Node] = field(default_factory=list)
    """Nodes whose primal values are made again before this step, in order."""
    last_values: list[fx.Node] = field(default_factory=list)
    """Nodes whose primal values nobody reads after this step."""

    def reads(self) -> set[fx.Node]:
        """Nodes whose primal values the rule uses."""
        found: set[fx.Node] = set()
        for name in self.rule.reads(self.moving):
            found.update([self.node] if name == "output" else node_inputs(self.bound.get(name)))
        return found


@dataclass(slots=True)
class Plan:
    """Everything about the graph that does not depend on numbers."""

    nodes: list[fx.Node]
    """Operations the loss depends on, in order."""
    steps: list[Step]
    """Those of them that move."""
    sources: dict[fx.Node, Any]
    """Input node -> ("parameter" | "buffer" | "constant" | "input", name, index or tensor)."""
    parameters: dict[fx.Node, str]
    """Input node -> name of the trainable parameter; tied names meet in one."""
    loss: fx.Node
    curved: set[fx.Node]
    kept: set[fx.Node]
    """Operations whose primal value the primal pass keeps for the tangent pass."""
    last_primal: dict[fx.Node, list[fx.Node]]
    """Operation -> values that the primal pass may drop once it is done."""
    unused: list[str]
    """Trainable parameters that the loss does not depend on: they contribute zero."""
