"""Rules of operations that are linear in what moves: the tangent goes through the same operation, D² = 0.

A tangent has the directions in front, so an axis counted from the front moves by one and one counted from the back
stays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hvpflow.curvature.rules import Call, Moving, rule

aten = torch.ops.aten


def _axis(dim: int) -> int:
    return dim + 1 if dim >= 0 else dim


def _axes(dims: Any, rank: int) -> list[int]:
    """Axes of a reduction; none given means all of the ``rank`` axes of the operand."""
    if dims is None:
        return list(range(1, rank + 1))
    dims = [dims] if isinstance(dims, int) else list(dims)
    return [_axis(dim) for dim in dims] or list(range(1, rank + 1))


@rule(operator.getitem)
def item(call: Call) -> Tensor:
    """The parameters of ``operator.getitem`` are called a and b."""
    return call.tangent("a")[call["b"]]


@rule(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
def reshape(call: Call) -> Tensor:
    """The output's shape says all; a copy is made only where the tangent's layout demands one."""
    return call.tangent("self").reshape(call.work.num_directions, *call.output.shape)


@rule(aten.transpose.int)
def transpose(call: Call) -> Tensor:
    return call.tangent("self").transpose(_axis(call["dim0"]), _axis(call["dim1"]))


@rule(aten.t.default, aten.numpy_T.default, aten.mT.default)
def matrix_transpose(call: Call) -> Tensor:
    tangent = call.tangent("self")
    return tangent.transpose(-1, -2) if tangent.dim() > 2 else tangent


@rule(aten.permute.default)
def permute(call: Call) -> Tensor:
    rank = len(call["dims"])
    return call.tangent("self").permute(0, *(dim % rank + 1 for dim in call["dims"]))


@rule(aten.slice.Tensor)
def slice_axis(call: Call) -> Tensor:
    start = 0 if call["start"] is None else call["start"]
    end = torch.iinfo(torch.int64).max if call["end"] is None else call["end"]
    return aten.slice.Tensor(call.tangent("self"), _axis(call["dim"]), start, end, call["step"])


@rule(aten.select.int)
def select(call: Call) -> Tensor:
    return call.tangent("self").select(_axis(call["dim"]), call["index"])


@rule(aten.split.Tensor)
def split(call: Call) -> Any:
    return call.tangent("self").split(call["split_size"], _axis(call["dim"]))


@rule(aten.split_with_sizes.default, aten.split.sizes)
def split_with_sizes(call: Call) -> Any:
    sizes = call["split_sizes" if "split_sizes" in call.arguments else "split_size"]
    return call.tangent("self").split(list(sizes), _axis(call["dim"]))


@rule(aten.chunk.default)
def chunk(call: Call) -> Any:
    return call.tangent("self").chunk(call["chunks"], _axis(call["dim"]))


@rule(aten.unbind.int)
def unbind(call: Call) -> Any:
    return call.tangent("self").unbind(_axis(call["dim"]))


@rule(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
def expand(call: Call) -> Tensor:
    return call.aligned("self").expand(call.work.num_directions, *call.output.shape)


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(call: Call) -> Tensor:
    return call.tangent("self").repeat_interleave(call["repeats"], _axis(call["dim"]))


def _parts(call: Call) -> list[Tensor]:
    """Tangents of a list of tensors, zeros for those that do not move."""
    K = call.work.num_directions
    moving = call.tangent("tensors")
    like = next(part for part in moving if part is not None)
    return [
        part if part is not None else like.new_zeros(()).expand(K, *shape)
        for part, shape in zip(moving, call.shapes["tensors"], strict=True)
    ]


@rule(aten.cat.default)
def cat(call: Call) -> Tensor:
    return torch.cat(_parts(call), _axis(call["dim"]))


@rule(aten.stack.default)
def stack(call: Call) -> Tensor:
    return torch.stack(_parts(call), _axis(call["dim"]))


@rule(aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.type_as.default)
def convert(call: Call) -> Tensor:
    if call.work.amp:  # the graph was traced without autocast: a conversion it asks for may undo a choice of precision
        return call.tangent("self")
    return call.tangent("self").to(device=call.output.device, dtype=call.output.dtype)


@rule(
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
)
def identity(call: Call) -> Tensor:
    """The same values; whether a tangent is contiguous is no one's concern."""
    return call.tangent("self")


def _active_dropout(arguments: dict[str, Any], moving: Moving) -> str | None:
    return "it is active, so the loss is random" if arguments["train"] and arguments["p"] > 0 else None


@rule(aten.dropout.default, refuses=_active_dropout)
def dropout(call: Call) -> Tensor:
    return call.tangent("input")


@rule(aten.neg.default)
def negative(call: Call) -> Tensor:
    return -call.tangent("self")


def _sum(call: Call, sign: int) -> Tensor:
    """y = a ± s·b: y' = a' ± s·b'. Where only one moves and the other is larger, its tangent is broadcast."""
    scale = sign * call["alpha"]
    K, shape = call.work.num_directions, call.output.shape
    if "self" not in call.tangents:
        moved = call.aligned("other")
        return (moved if scale == 1 else moved * scale).expand(K, *shape)
    if "other" not in call.tangents:
        return call.aligned("self").expand(K, *shape)
    left, right = call.aligned("self"), call.aligned("other")
    if scale == 1:
        for name, mine, other in (("self", left, right), ("other", right, left)):
            fits = mine.shape == (K, *shape) and mine.is_contiguous() and mine.dtype == torch.result_type(mine, other)
            if name in call.owned and fits:
                return mine.add_(other)
    return left + right if scale == 1 else torch.sub(left, right, alpha=-scale)


@rule(aten.add.Tensor, aten.add.Scalar)
def add(call: Call) -> Tensor:
    return _sum(call, 1)


@rule(aten.sub.Tensor, aten.sub.Scalar)
def subtract(call: Call) -> Tensor:
    return _sum(call, -1)


@rule(aten.rsub.Scalar)
def subtract_from(call: Call) -> Tensor:
    """y = b − s·a with a constant b."""
    return call.tangent("self") * -call["alpha"]


@rule(aten.mul.Scalar)
def scale(call: Call) -> Tensor:
    return call.tangent("self") * call["other"]


@rule(aten.div.Scalar)
def divide(call: Call) -> Tensor:
    return call.tangent("self") / call["other"]


def _reduce(call: Call, reduction: Callable[..., Tensor]) -> Tensor:
    tangent = call.tangent("self")
    axes = _axes(call.arguments.get("dim"), tangent.dim() - 1)
    return reduction(tangent, axes, keepdim=call.arguments.get("keepdim", False)) if axes else tangent


@rule(aten.sum.default, aten.sum.dim_IntList)
def total(call: Call) -> Tensor:
    return _reduce(call, torch.sum)


@rule(aten.mean.default, aten.mean.dim)
def mean(call: Call) -> Tensor:
    return _reduce(call, torch.mean)


@rule(aten.masked_fill.Scalar, reads=lambda moving: ("mask",))
def masked_fill(call: Call) -> Tensor:
    """A constant written over some entries: their tangent is zero."""
    K, shape = call.work.num_directions, call.output.shape
    return call.aligned("self").expand(K, *shape).masked_fill(call["mask"], 0)


@rule(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, reads=lambda moving: ("condition",))
def where(call: Call) -> Tensor:
    like = next(iter(call.tangents.values()))
    left, right = (call.aligned(name) if name in call.tangents else like.new_zeros(()) for name in ("self", "other"))
    return torch.where(call["condition"], left, right).expand(call.work.num_directions, *call.output.shape)
