"""What a local rule is, the table of rules, and what a rule may ask for while it runs.

The loss is a chain of operations u = f(inputs). Along θ + εv every u has a first derivative u' (its tangent) and a
second one, u'' = Df[inputs''] + D²f[inputs', inputs']. Unrolled from the loss down with the adjoints ū = ∂loss/∂u,

    vᵀHv = loss'' = Σ over operations of ⟨ū, D²f[inputs', inputs']⟩,

because parameters move on a straight line. A rule maps tangents of the inputs to the tangent of the output and adds
⟨ū, D²f[…]⟩ of its operation. Operations with D²f = 0 add nothing and need neither values nor adjoint.

Legend for all rule files: B sequences, T positions, N = B·T tokens, K directions; a tangent carries K in front.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

Moving = frozenset[str]
"""Names of the arguments of one operation that depend on a trainable parameter."""


@dataclass(kw_only=True, slots=True)
class Workspace:
    """What all rules of one pass share: the precision of products, the slice sizes, the running sums."""

    num_directions: int
    device: torch.device
    amp: bool
    """Matrix products in bfloat16."""
    compile_rules: bool
    """Compile each pointwise rule once; every layer uses the same kernels."""
    loop_directions: bool
    """One matrix product per direction, accumulated in place: best on a CPU. Otherwise batched products."""
    paired_width: int | None
    """Inputs of a layer from which on two products stand for three; None: never."""
    slice_elements: int
    """Elements of one temporary of a sliced rule, all directions together: on a CPU it should stay in the cache."""
    head_tokens: int
    head_columns: int
    """Shape of one block of logits of the fused head."""
    total: Tensor = field(init=False)
    gauss_newton: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.total = torch.zeros(self.num_directions, dtype=torch.float64, device=self.device)
        self.gauss_newton = torch.zeros_like(self.total)

    def product_operand(self, x: Tensor) -> Tensor:
        """Return ``x`` in the precision of matrix products."""
        return x.to(torch.bfloat16) if self.amp else x

    def pointwise(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, compiled once for all its uses if so wished."""
        return compiled(function) if self.compile_rules else function


_COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    if function not in _COMPILED:
        _COMPILED[function] = torch.compile(function, dynamic=None)
    return _COMPILED[function]


@dataclass(kw_only=True, slots=True)
class Call:
    """One application of one operation in the tangent pass."""

    arguments: dict[str, Any]
    """Argument name -> primal value. A tensor that the rule did not ask for is None."""
    tangents: dict[str, Any]
    """Argument name -> tangent [K, *shape]; absent where the argument does not move. Lists keep their structure."""
    adjoint: Tensor | None
    """∂loss/∂output, [*output shape]; only for curved operations."""
    output: Any
    """Shape and dtype of the output (a fake tensor or a tuple of them)."""
    value: Any
    """Primal output, where the rule asked for it."""
    shapes: dict[str, Any]
    """Argument name -> shape of a tensor, a list of them for a list of tensors, None otherwise."""
    work: Workspace
    owned: frozenset[str]
    """Arguments whose tangents nobody else reads, now or later, in memory of their own: they may be overwritten."""
    final: bool
    """Whether the output is the loss itself, whose tangent nobody reads."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def tangent(self, name: str) -> Any:
        return self.tangents.get(name)

    def aligned(self, name: str) -> Tensor:
        """Tangent of an argument that is broadcast: [K, 1, …, *shape], as many axes as K and the output have."""
        stack = self.tangents[name]
        return stack.reshape(stack.shape[0], *[1] * (self.output.dim() - stack.dim() + 1), *stack.shape[1:])


@dataclass(frozen=True, slots=True)
class Rule:
    apply: Callable[[Call], Any]
    reads: Callable[[Moving], Iterable[str]]
    """Names of the arguments whose primal values the rule uses; "output" for the operation's own value."""
    curved: Callable[[Moving], bool]
    """Whether D² can differ from zero, given what moves."""
    refuses: Callable[[dict[str, Any], Moving], str | None]
    """Why these arguments (values or graph nodes, by name) are beyond the rule; None if they are not."""


RULES: dict[Any, Rule] = {}


def rule(
    *operations: Any,
    reads: Callable[[Moving], Iterable[str]] = lambda moving: (),
    curved: Callable[[Moving], bool] = lambda moving: False,
    refuses: Callable[[dict[str, Any], Moving], str | None] = lambda arguments, moving: None,
) -> Callable[[Callable[[Call], Any]], Callable[[Call], Any]]:
    """Enter a function into the table as the rule of ``operations``."""

    def enter(function: Callable[[Call], Any]) -> Callable[[Call], Any]:
        for operation in operations:
            RULES[operation] = Rule(function, reads, curved, refuses)
        return function

    return enter


def bind(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults filled in."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        schema = target._schema.arguments
        bound = {a.name: a.default_value for a in schema if a.has_default_value()}
        bound.update(zip((a.name for a in schema), node.args, strict=False))
        return bound | node.kwargs
    arguments = inspect.signature(target).bind(*node.args, **node.kwargs)
    arguments.apply_defaults()
    return dict(arguments.arguments)


def node_inputs(value: Any) -> list[fx.Node]:
    """Return the graph nodes inside a structure of arguments."""
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def inner(left: Tensor, right: Tensor) -> Tensor:
    """⟨left, right⟩ over all axes but the first, [K] float64.

    The products are summed along the last axis in their own precision (PyTorch sums pairwise), then in float64.
    """
    sums = (left * right).sum(-1)
    return sums.reshape(sums.shape[0], -1).sum(-1, dtype=torch.float64)


def widen(x: Tensor) -> Tensor:
    """Return ``x`` in float32 at least: only matrix products work in less."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
