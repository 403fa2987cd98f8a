"""The two passes of the fast engine over a planned graph.

The primal pass runs the graph once under autograd, with PyTorch's fastest kernels (only first derivatives are asked
for), and keeps the values and adjoints that the rules read. The tangent pass then walks the graph with K tangents; a
tangent lives until its last reader has run, and so does a kept value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from hvpflow.curvature.directions import Directions
from hvpflow.curvature.plan import Plan, Step
from hvpflow.curvature.rules import Call, Workspace, node_inputs

Values = dict[fx.Node, Any]


def source_values(plan: Plan, model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Values:
    """Return the tensors that the graph's input nodes stand for."""
    values: Values = {}
    for node, (kind, source) in plan.sources.items():
        if kind == "parameter":
            values[node] = model.get_parameter(source).detach()
        elif kind == "buffer":
            values[node] = model.get_buffer(source)
        else:
            values[node] = inputs[source] if kind == "input" else source
    return values


def _leaf(value: Tensor) -> Tensor:
    """The tensor itself where a derivative already reaches it, else a fresh leaf: the first curved operations."""
    return value if value.requires_grad else value.detach().requires_grad_()


def primal_pass(plan: Plan, sources: Values, *, amp: bool) -> tuple[Values, dict[fx.Node, Tensor]]:
    """Return (values that rules read, adjoints of the curved operations)."""
    values: Values = dict(sources)
    kept: Values = {}
    adjoints: dict[fx.Node, Tensor] = {}
    leaves: dict[fx.Node, Tensor] = {}

    def note(node: fx.Node) -> Any:
        return lambda adjoint: adjoints.__setitem__(node, adjoint)

    device = next(iter(sources.values())).device.type
    with torch.enable_grad(), torch.autocast(device, torch.bfloat16, enabled=amp):
        for node in plan.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            value = node.target(*args, **kwargs)  # type: ignore[operator]
            if node in plan.curved:
                first, *rest = value if isinstance(value, tuple) else (value,)
                first = _leaf(first)
                if first.is_leaf:
                    leaves[node] = first
                else:  # a hook needs no reference to the tensor, so its storage can go as soon as it is used up
                    first.register_hook(note(node))
                value = (first, *rest) if rest else first
            if node in plan.kept:
                kept[node] = _detached(value)
            values[node] = value
            for spent in plan.last_primal[node]:
                del values[spent]
        loss = values[plan.loss]
        values.clear()
        if leaves and loss.requires_grad:
            found = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True)
            adjoints.update(
                (node, torch.zeros_like(leaf) if adjoint is None else adjoint)
                for (node, leaf), adjoint in zip(leaves.items(), found, strict=True)
            )
    return kept, adjoints


def _detached(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_detached(part) for part in value)
    return value.detach() if isinstance(value, Tensor) else value


def tangent_pass(
    plan: Plan, work: Workspace, sources: Values, kept: Values, adjoints: dict[fx.Node, Tensor], directions: Directions
) -> None:
    """Walk the graph with the tangents of ``directions``; the sums are left in ``work``. Empties kept and adjoints."""
    tangents: Values = {node: directions[name] for node, name in plan.parameters.items()}
    with torch.no_grad():
        for step in plan.steps:
            _make_again(step, work, sources, kept)
            adjoint = adjoints.pop(step.node, None) if step.curved else None
            tangent = step.rule.apply(_call(step, work, sources, kept, adjoint, tangents))
            for node in step.last_tangents:
                tangents.pop(node, None)
            for node in step.last_values:
                kept.pop(node, None)
            if tangent is not None:
                tangents[step.node] = tangent


def _make_again(step: Step, work: Workspace, sources: Values, kept: Values) -> None:
    """Add to ``kept`` what ``step`` reads and the primal pass did not keep."""
    if not step.make:
        return
    with torch.autocast(work.device.type, torch.bfloat16, enabled=work.amp):
        for node in step.make:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: sources[n] if n in sources else kept[n])
            kept[node] = node.target(*args, **kwargs)  # type: ignore[operator]


def _call(step: Step, work: Workspace, sources: Values, kept: Values, adjoint: Tensor | None, tangents: Values) -> Call:
    readable = set(step.rule.reads(step.moving))

    def value(node: fx.Node) -> Any:
        return sources[node] if node in sources else kept.get(node)

    def shape(bound: Any) -> Any:
        if isinstance(bound, (list, tuple)):
            return [shape(part) for part in bound]
        fake = bound.meta.get("val") if isinstance(bound, fx.Node) else None
        return fake.shape if isinstance(fake, Tensor) else None

    if step.curved and adjoint is None:
        # Autograd found no path from the loss: everything after this operation is constant in it.
        adjoint = torch.zeros(step.node.meta["val"].shape, device=work.device)
    return Call(
        arguments={
            name: fx.map_arg(bound, value) if name in readable or not node_inputs(bound) else None
            for name, bound in step.bound.items()
        },
        tangents={name: fx.map_arg(step.bound[name], tangents.get) for name in step.moving},
        adjoint=adjoint,
        output=step.node.meta.get("val"),
        value=kept.get(step.node),
        shapes={name: shape(bound) for name, bound in step.bound.items()},
        work=work,
        owned=step.owned,
        final=step.final,
    )
