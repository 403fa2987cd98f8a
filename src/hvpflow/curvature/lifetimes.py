"""How long the values of a plan are needed, and which of them are rather made again than kept.

The tangent pass reads values of the primal pass. What follows from other kept values by a cheap operation (a sum of the
residual stream, a normalisation, a rotation) is made again when it is first read: once per batch, for all directions.
"""

from __future__ import annotations

import torch
from torch import fx

from hvpflow.curvature.plan import ALIASES, Plan, Step
from hvpflow.curvature.rules_pointwise import gated_product

aten = torch.ops.aten

_CHEAP = ALIASES | {
    aten.add.Tensor,
    aten.cat.default,
    aten.flatten.using_ints,
    aten.layer_norm.default,
    aten.mul.Tensor,
    aten.neg.default,
    aten.relu.default,
    aten.reshape.default,
    aten.rms_norm.default,
    aten.silu.default,
    aten.sub.Tensor,
    gated_product,
}
"""Operations that cost a pass or two over their operands, and nothing random."""


def with_lifetimes(plan: Plan) -> Plan:
    """Fill in what the plan keeps, makes again, and drops, and when."""
    reads = {id(step): step.reads() - set(plan.sources) for step in plan.steps}
    wanted = set().union(*reads.values())
    plan.kept = {node for node in wanted if not _can_be_made(node, wanted, plan)}
    made: set[fx.Node] = set()
    uses: list[set[fx.Node]] = []
    for step in plan.steps:
        for node in sorted(reads[id(step)], key=plan.nodes.index):
            _make(node, plan, made, step)
        used = {source for node in step.make for source in node.all_input_nodes} | set(step.make)
        uses.append((used - set(plan.sources)) | reads[id(step)])
    seen_values: set[fx.Node] = set()
    seen_tangents: set[fx.Node] = set()
    for step, used in zip(reversed(plan.steps), reversed(uses), strict=True):
        step.last_values = list(used - seen_values)
        seen_values |= used
        tangents = {node for node in step.node.all_input_nodes if node not in plan.sources}
        step.last_tangents = list(tangents - seen_tangents)
        seen_tangents |= tangents
    seen: set[fx.Node] = {plan.loss}
    for node in reversed(plan.nodes):
        inputs = {source for source in node.all_input_nodes if source not in plan.sources}
        plan.last_primal[node] = list(inputs - seen)
        seen |= inputs
    return plan


def _can_be_made(node: fx.Node, wanted: set[fx.Node], plan: Plan) -> bool:
    """Whether cheap operations lead to ``node`` from inputs and values that are wanted anyway."""
    return node.target in _CHEAP and all(
        source in plan.sources or source in wanted or _can_be_made(source, wanted, plan)
        for source in node.all_input_nodes
    )


def _make(node: fx.Node, plan: Plan, made: set[fx.Node], step: Step) -> None:
    """Have ``step`` make ``node`` and what it is made of, unless that is there already."""
    if node in plan.sources or node in plan.kept or node in made:
        return
    for source in node.all_input_nodes:
        _make(source, plan, made, step)
    made.add(node)
    step.make.append(node)
