"""Operations that are cheaper in another form.

An activation and its gate, and an output layer and its cross-entropy, become one operation; a linear layer whose input
and weight both move becomes one that keeps its output.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from hvpflow.curvature.rules import bind
from hvpflow.curvature.rules_head import head_cross_entropy
from hvpflow.curvature.rules_linear import paired_linear
from hvpflow.curvature.rules_loss import MEAN, SUM
from hvpflow.curvature.rules_pointwise import gated_product

aten = torch.ops.aten

_ACTIVATIONS = {
    aten.silu.default: "silu",
    aten.gelu.default: "gelu",
    aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
}
_PER_TOKEN = (
    aten.view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.contiguous.default,
    aten.to.dtype,
    aten.slice.Tensor,
)
"""Operations that may stand between output layer and loss: they rearrange tokens and leave the logits' axis alone."""


def fuse(graph: fx.Graph, moving: set[fx.Node], *, paired_width: int | None) -> None:
    """Rewrite ``graph`` in place; ``moving`` (the nodes that depend on trainable parameters) is kept up to date."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node not in moving:
            continue
        if node.target is aten.mul.Tensor:
            _fuse_gate(graph, node, moving)
        elif node.target is aten.cross_entropy_loss.default:
            _fuse_head(graph, node, moving)
    if paired_width is not None:
        for node in graph.nodes:
            moves = node.target is aten.linear.default and {node.args[0], node.args[1]} <= moving
            if moves and _shape(node.args[1])[1] >= paired_width:
                node.target = paired_linear


def _shape(node: Any) -> torch.Size:
    return node.meta["val"].shape


def _fuse_gate(graph: fx.Graph, node: fx.Node, moving: set[fx.Node]) -> None:
    """φ(a)·b -> gated_product(a, b), where φ(a) is used nowhere else."""
    left, right = node.args[:2]
    for active, other in ((left, right), (right, left)):
        if (
            isinstance(active, fx.Node)
            and isinstance(other, fx.Node)
            and active is not other
            and {active, other} <= moving
            and active.target in _ACTIVATIONS
            and len(active.users) == 1
            and _shape(active) == _shape(other)
        ):
            name = _ACTIVATIONS[active.target]
            if active.kwargs.get("approximate", "none") == "tanh":
                name = "gelu_tanh"
            with graph.inserting_before(node):
                fused = graph.call_function(gated_product, (active.args[0], other, name))
            _replace(graph, node, fused, moving)
            graph.erase_node(active)
            return


def _fuse_head(graph: fx.Graph, node: fx.Node, moving: set[fx.Node]) -> None:
    """cross_entropy(rearranged(linear(x, W, b)), targets) -> head_cross_entropy(rearranged(x), W, b, targets)."""
    bound = bind(node)
    if bound["weight"] is not None or bound["label_smoothing"] or bound["reduction"] not in (MEAN, SUM):
        return
    if bound["target"].meta["val"].dtype.is_floating_point or bound["self"].meta["val"].dim() != 2:
        return
    chain: list[fx.Node] = []
    current = bound["self"]
    vocabulary = _shape(current)[-1]
    while current.target in _PER_TOKEN and len(current.users) == 1 and _leaves_last_axis(current, vocabulary):
        chain.append(current)
        current = current.args[0]
    if current.target is not aten.linear.default or len(current.users) != 1:
        return
    layer = bind(current)
    if any(part in moving and part.op != "placeholder" for part in (layer["weight"], layer["bias"])):
        return  # the fused operation gives no adjoint to a weight, which only a parameter can do without
    x = layer["input"]
    width = _shape(x)[-1]
    with graph.inserting_before(node):
        for step in reversed(chain):
            if step.target in (aten.to.dtype, aten.contiguous.default):
                continue  # the fused operation sees to both itself
            args = (x, *step.args[1:])
            size = [*_shape(step)[:-1], width]
            if step.target in (aten.view.default, aten.reshape.default):
                args = (x, size)
            fake = x.meta["val"].new_empty(size)
            x = graph.create_node("call_function", step.target, args, dict(step.kwargs))
            x.meta["val"] = fake
            if args[0] in moving:
                moving.add(x)
        fused = graph.call_function(
            head_cross_entropy,
            (x, layer["weight"], layer["bias"], bound["target"], bound["ignore_index"], bound["reduction"]),
        )
        loss = graph.call_function(operator.getitem, (fused, 0))
    fused.meta["val"] = (node.meta["val"], x.meta["val"].new_empty(_shape(x)[:-1]))
    fused.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
    moving.add(fused)
    _replace(graph, node, loss, moving)
    for step in [*chain, current]:
        graph.erase_node(step)


def _leaves_last_axis(node: fx.Node, vocabulary: int) -> bool:
    before, after = _shape(node.args[0]), _shape(node)
    if before[-1] != vocabulary or after[-1] != vocabulary:
        return False
    if node.target is aten.slice.Tensor:
        return bind(node)["dim"] % len(before) != len(before) - 1
    return True


def _replace(graph: fx.Graph, old: fx.Node, new: fx.Node, moving: set[fx.Node]) -> None:
    for key in ("val", "nn_module_stack"):
        if key in old.meta and key not in new.meta:
            new.meta[key] = old.meta[key]
    old.replace_all_uses_with(new)
    graph.erase_node(old)
    moving.discard(old)
    moving.add(new)
