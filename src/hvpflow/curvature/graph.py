"""The model as a flat list of operations, and the plan of which of them move and bend.

``torch.export`` before any decomposition keeps linear, rms_norm, layer_norm, silu, gelu and attention whole, one rule
each. The graph belongs to one shape of the batch; the engine keeps one plan per shape.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

import hvpflow.curvature.rules_attention
import hvpflow.curvature.rules_head
import hvpflow.curvature.rules_linear
import hvpflow.curvature.rules_loss
import hvpflow.curvature.rules_norm
import hvpflow.curvature.rules_pointwise
import hvpflow.curvature.rules_structure  # noqa: F401 (each fills the table of rules)
from hvpflow.curvature.directions import trainable_parameters
from hvpflow.curvature.fusion import fuse
from hvpflow.curvature.lifetimes import with_lifetimes
from hvpflow.curvature.plan import Plan, Step
from hvpflow.curvature.rules import RULES, bind, node_inputs
from hvpflow.curvature.rules_linear import paired_linear
from hvpflow.curvature.rules_pointwise import gated_product
from hvpflow.errors import HvpflowError

_STOPS = (torch.ops.aten.detach.default,)
"""Operations whose output is a constant to every derivative."""
_FRESH = (torch.ops.aten.linear.default, paired_linear, gated_product)
"""Operations whose tangent always lies in memory of its own."""


def make_plan(model: nn.Module, tokens: Tensor, targets: Tensor, *, paired_width: int | None = None) -> Plan:
    """Export ``model(tokens, targets)`` and plan the passes; raise HvpflowError where a rule is missing.

    Outputs of linear layers with ``paired_width`` inputs or more are kept, which saves them one product in three.
    """
    try:
        with torch.autocast(tokens.device.type, enabled=False):
            program = torch.export.export(model, (tokens, targets), strict=False)
    except Exception as problem:
        first_line = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise HvpflowError(
            f"the model cannot be exported as a graph of operations ({first_line}); "
            "choose the slower exact engine with `engine: jvp-of-grad`"
        ) from problem
    names = {id(parameter): name for name, parameter in trainable_parameters(model).items()}
    graph = program.graph
    sources: dict[fx.Node, Any] = {}
    parameters: dict[fx.Node, str] = {}
    user_inputs = 0
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.PARAMETER:
            sources[node] = ("parameter", spec.target)
            tensor = model.get_parameter(spec.target)
            if id(tensor) in names:
                parameters[node] = names[id(tensor)]
        elif spec.kind is InputKind.USER_INPUT:
            sources[node] = ("input", user_inputs)
            user_inputs += 1
        elif spec.kind is InputKind.BUFFER:
            sources[node] = ("buffer", spec.target)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            sources[node] = ("constant", program.constants[spec.target])
        else:
            raise HvpflowError(f"the model's graph has an input of kind {spec.kind.name}, which the engine cannot feed")
    output = next(node for node in graph.nodes if node.op == "output")
    results = node_inputs(output.args)
    if len(results) != 1 or results[0].meta["val"].numel() != 1:
        raise HvpflowError("model(tokens, targets) must return one scalar, the summed loss of the batch")

    needed = _ancestors(results[0])
    for node in reversed(graph.nodes):  # assertions about metadata would hide that a value has one reader
        if node.op == "call_function" and node not in needed:
            graph.erase_node(node)
    moving = set(parameters)
    for node in graph.nodes:
        reached = any(source in moving for source in node_inputs((node.args, node.kwargs)))
        if node.op == "call_function" and node.target not in _STOPS and reached and _differentiable(node):
            moving.add(node)
    fuse(graph, moving, paired_width=paired_width)
    loss = node_inputs(output.args)[0]
    needed = _ancestors(loss)
    nodes = [node for node in graph.nodes if node in needed and node.op != "placeholder"]
    steps = _steps([node for node in nodes if node in moving], moving, loss)
    unused = sorted(set(names.values()) - {name for node, name in parameters.items() if node in needed})
    return with_lifetimes(
        Plan(
            nodes=nodes,
            steps=steps,
            sources=sources,
            parameters=parameters,
            loss=loss,
            curved={step.node for step in steps if step.curved},
            kept=set(),
            last_primal={},
            unused=unused,
        )
    )


def _differentiable(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(v, Tensor) and v.dtype.is_floating_point for v in values)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, stack = {node}, [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                stack.append(source)
    return found


def _steps(nodes: list[fx.Node], moving: set[fx.Node], loss: fx.Node) -> list[Step]:
    steps: list[Step] = []
    refused: dict[str, str] = {}
    for node in nodes:
        rule = RULES.get(node.target) if node.op == "call_function" else None
        where = _module_path(node)
        if rule is None:
            refused.setdefault(str(node.target), f"{node.target} has no curvature rule (first used in {where})")
            continue
        bound = bind(node)
        names = frozenset(
            name for name, value in bound.items() if any(source in moving for source in node_inputs(value))
        )
        if reason := rule.refuses(bound, names):
            refused.setdefault(str(node.target), f"{node.target} in {where} is beyond its curvature rule: {reason}")
            continue
        if node is loss and node.target is operator.getitem:
            continue  # it only picks the loss from the output of the step before
        picked = loss.target is operator.getitem and list(node.users) == [loss]
        owned = frozenset(
            name
            for name, value in bound.items()
            if isinstance(value, fx.Node) and value.target in _FRESH and list(value.users) == [node]
        )
        steps.append(Step(node, rule, bound, names, rule.curved(names), node is loss or picked, owned))
    if refused:
        raise HvpflowError(
            "the fast curvature engine cannot differentiate this model: "
            + "; ".join(refused.values())
            + ". Choose the slower exact engine with `engine: jvp-of-grad`"
        )
    return steps


def _module_path(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "the model itself"
    path, kind = stack[-1][:2]
    kind = kind if isinstance(kind, str) else kind.__name__
    return f"{path or 'the model itself'} ({kind.rsplit('.', 1)[-1]})"
