"""Rules of matrix products and of the embedding: linear in each operand, curved only where two operands move.

For y = x Wᵀ: y' = x'Wᵀ + xW'ᵀ and ⟨ȳ, D²⟩ = 2⟨ȳ, x'W'ᵀ⟩ = 2⟨ȳᵀx', W'⟩; contracted over tokens first, the
temporary is as large as the weight, not as the output. These are three products. Where y itself is known, two do
(``paired_products``), at the price of a few passes over the output, which a CPU hardly feels and a GPU would.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hvpflow.curvature.rules import Call, Moving, Workspace, inner, rule

aten = torch.ops.aten


def linear_tangent(
    work: Workspace, x: Tensor | None, weight: Tensor, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None
) -> Tensor:
    """x'Wᵀ + xW'ᵀ + b', [K, N, o], for x [N, i], W [o, i], x' [K, N, i], W' [K, o, i], b' [K, o]; None stays fixed."""
    K = work.num_directions
    transposed = work.product_operand(weight).t()
    x = None if x is None or dweight is None else work.product_operand(x)
    if not work.loop_directions:
        output = None if dx is None else work.product_operand(dx) @ transposed
        if x is not None and dweight is not None:
            operands = x.expand(K, *x.shape), work.product_operand(dweight).transpose(1, 2)
            output = torch.bmm(*operands) if output is None else torch.baddbmm(output, *operands)
        if dbias is not None:
            output = dbias[:, None] if output is None else output + dbias[:, None].to(output.dtype)
        assert output is not None
        return output
    size = x.shape[0] if x is not None else dx.shape[1] if dx is not None else 1
    output = transposed.new_empty(K, size, weight.shape[0])
    for k in range(K):  # each product adds to what the one before wrote: no sums of whole outputs
        filled = False
        if dx is not None:
            operand = work.product_operand(dx[k])
            if dbias is None:
                torch.mm(operand, transposed, out=output[k])
            else:
                torch.addmm(dbias[k].to(output.dtype), operand, transposed, out=output[k])
            filled = True
        elif dbias is not None:
            output[k] = dbias[k]
            filled = True
        if x is not None and dweight is not None:
            operand = work.product_operand(dweight[k]).t()
            if filled:
                torch.addmm(output[k], x, operand, out=output[k])
            else:
                torch.mm(x, operand, out=output[k])
    return output


def linear_curvature(work: Workspace, adjoint: Tensor, dx: Tensor, dweight: Tensor) -> Tensor:
    """2⟨ȳᵀx', W'⟩, [K] float64, for ȳ [N, o], x' [K, N, i], W' [K, o, i]."""
    K = work.num_directions
    adjoint = work.product_operand(adjoint).t()
    if not work.loop_directions:
        return 2 * inner(torch.bmm(adjoint.expand(K, *adjoint.shape), work.product_operand(dx)), dweight)
    gathered = adjoint.new_empty(dweight.shape[1:])
    products = torch.empty_like(gathered, dtype=dweight.dtype)
    sums = dweight.new_empty(dweight.shape[:2])
    for k in range(K):
        torch.mm(adjoint, work.product_operand(dx[k]), out=gathered)
        torch.sum(torch.mul(gathered, dweight[k], out=products), -1, out=sums[k])
    return 2 * sums.sum(-1, dtype=torch.float64)


def balance(weight: Tensor, dweight: Tensor) -> list[float]:
    """ε of each direction for ``paired_products``: ‖W‖/‖W'‖ to the nearest power of two, for W [o, i], W' [K, o, i].

    The four terms of (x + εx')(W + εW')ᵀ/ε are then no larger than x'Wᵀ or xW'ᵀ, row by row of x, so that rounding
    costs what it costs in three products; a power of two adds none of its own.
    """
    fixed = float(torch.linalg.vector_norm(weight))
    moved = torch.linalg.vector_norm(dweight.flatten(1), dim=1).tolist()
    limits = 2.0**-60, 2.0**60
    return [min(max(2.0 ** round(math.log2(fixed / m)), limits[0]), limits[1]) if m and fixed else 1.0 for m in moved]


def paired_products(
    y: Tensor, shifted_x: Tensor, shifted_weight: Tensor, dx: Tensor, dweight: Tensor, adjoint: Tensor, epsilon: float,
    out: Tensor, scratch: Tensor,
) -> Tensor:  # fmt: skip
    """Write x'Wᵀ + xW'ᵀ to ``out`` [N, o] and return ⟨ȳ, x'W'ᵀ⟩ (float64), by two products instead of three.

    With C = x'W'ᵀ and D = (x + εx')(W + εW')ᵀ, Karatsuba's identity gives x'Wᵀ + xW'ᵀ = (D − y)/ε − εC, as y = xWᵀ is
    known from the primal pass and serves all directions. Shapes: y, ȳ, scratch [N, o]; x + εx', x' [N, i];
    W + εW', W' [o, i].
    """
    torch.mm(dx, dweight.t(), out=out)
    form = torch.sum(torch.mul(adjoint, out, out=scratch), -1).sum(dtype=torch.float64)
    out.add_(y, alpha=epsilon**-2)
    torch.addmm(out, shifted_x, shifted_weight.t(), beta=-epsilon, alpha=1 / epsilon, out=out)
    return form


def paired_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    """A linear layer whose output is kept for ``paired_products``. The graph puts it where that is worth it."""
    return F.linear(input, weight, bias)


def _linear_reads(moving: Moving) -> list[str]:
    return ["weight"] + ["input"] * ("weight" in moving)


@rule(aten.linear.default, reads=_linear_reads, curved=lambda moving: {"input", "weight"} <= moving)
def linear(call: Call) -> Tensor:
    work, shape = call.work, call.output.shape
    dx, dweight, dbias = (call.tangent(name) for name in ("input", "weight", "bias"))
    dx = None if dx is None else dx.reshape(work.num_directions, -1, dx.shape[-1])
    x = None if call["input"] is None else call["input"].reshape(-1, call["input"].shape[-1])
    if call.adjoint is not None and dx is not None and dweight is not None:
        work.total += linear_curvature(work, call.adjoint.reshape(-1, shape[-1]), dx, dweight)
    tangent = linear_tangent(work, x, call["weight"], dx, dweight, dbias)
    if tangent.shape[1] == 1:  # nothing but the bias moves
        return tangent.reshape(work.num_directions, *[1] * (len(shape) - 1), shape[-1]).expand(-1, *shape)
    return tangent.view(work.num_directions, *shape)


@rule(paired_linear, reads=lambda moving: ("input", "weight", "bias", "output"), curved=bool)
def paired_linear_rule(call: Call) -> Tensor:
    """``linear`` with input and weight moving, by two products a direction."""
    work = call.work
    if not work.loop_directions:
        return linear(call)
    dx, dweight, dbias = (call.tangent(name) for name in ("input", "weight", "bias"))
    weight, shape = call["weight"], call.output.shape
    assert call.adjoint is not None
    x, y, adjoint = (part.reshape(-1, part.shape[-1]) for part in (call["input"], call.value, call.adjoint))
    dx = dx.reshape(work.num_directions, *x.shape)
    output = y.new_empty(work.num_directions, *y.shape)
    shifted_x, shifted_weight, scratch = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(y)
    for k, epsilon in enumerate(balance(weight, dweight)):
        torch.add(x, dx[k], alpha=epsilon, out=shifted_x)
        torch.add(weight, dweight[k], alpha=epsilon, out=shifted_weight)
        form = paired_products(
            y, shifted_x, shifted_weight, dx[k], dweight[k], adjoint, epsilon, output[k], scratch
        )  # fmt: skip
        work.total[k] += 2 * form
        if call["bias"] is not None:  # it stands in y, but does not belong to the product
            offset = call["bias"] / epsilon
            output[k] += offset if dbias is None else offset.add_(dbias[k])
    return output.view(work.num_directions, *shape)


def _product_tangent(call: Call, left: str, right: str) -> Tensor | None:
    """a'b + ab', adding 2⟨ȳ, a'b'⟩; leading axes broadcast as in torch.matmul."""
    work, K = call.work, call.work.num_directions
    a, b = (None if call[name] is None else work.product_operand(call[name]) for name in (left, right))
    da, db = (call.tangent(name) for name in (left, right))
    rank = max(len(call.shapes[left]), len(call.shapes[right]))
    da, db = (
        None if t is None else work.product_operand(t.reshape(K, *[1] * (rank - t.dim() + 1), *t.shape[1:]))
        for t in (da, db)
    )
    parts = []
    if da is not None and b is not None:
        parts.append(da @ b)
    if db is not None and a is not None:
        parts.append(a @ db)
    if da is not None and db is not None:
        assert call.adjoint is not None
        work.total += 2 * inner((da @ db).to(call.adjoint.dtype), call.adjoint.expand(call.output.shape))
    return sum(parts[1:], parts[0]) if parts else None


def _matrices_read(moving: Moving) -> list[str]:
    pairs = [("self", "other"), ("self", "mat2"), ("mat1", "mat2")]
    return [b for pair in pairs for a, b in (pair, pair[::-1]) if a in moving]


def _vector_operand(arguments: dict[str, Any], moving: Moving) -> str | None:
    for value in arguments.values():
        fake = getattr(value, "meta", {}).get("val")
        if fake is not None and fake.dim() < 2:
            return "one operand is a vector"
    return None


@rule(
    aten.matmul.default,
    reads=_matrices_read,
    curved=lambda moving: {"self", "other"} <= moving,
    refuses=_vector_operand,
)
def matmul(call: Call) -> Tensor | None:
    return _product_tangent(call, "self", "other")


@rule(aten.mm.default, aten.bmm.default, reads=_matrices_read, curved=lambda moving: {"self", "mat2"} <= moving)
def mm(call: Call) -> Tensor | None:
    return _product_tangent(call, "self", "mat2")


@rule(
    aten.addmm.default,
    reads=_matrices_read,
    curved=lambda moving: {"mat1", "mat2"} <= moving,
    refuses=lambda arguments, moving: (
        "beta or alpha differs from 1" if (arguments["beta"], arguments["alpha"]) != (1, 1) else None
    ),
)
def addmm(call: Call) -> Tensor | None:
    """y = b + ac."""
    tangent = _product_tangent(call, "mat1", "mat2") if {"mat1", "mat2"} & set(call.tangents) else None
    if "self" not in call.tangents:
        return tangent
    added = call.aligned("self")
    return added.expand(-1, *call.output.shape) if tangent is None else tangent + added.to(tangent.dtype)


@rule(aten.embedding.default, reads=lambda moving: ("indices",))
def embedding(call: Call) -> Tensor:
    """Rows of the table's tangent: [K, *indices, width]."""
    stack, indices = call.tangent("weight"), call["indices"]
    return stack.index_select(1, indices.reshape(-1)).view(stack.shape[0], *indices.shape, stack.shape[-1])
