"""The output layer and the cross-entropy as one operation: logits exist block by block only.

Extra legend: V vocabulary, v rows of a block of it, n tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvpflow.curvature.rules import Call, Workspace, inner, rule, widen
from hvpflow.curvature.rules_linear import balance, paired_products
from hvpflow.curvature.rules_loss import token_scales

CPU_TILE = 1 << 10, 1 << 9
"""Tokens and columns of one block of logits: large enough for fast products, small enough for the caches."""


class _BlockedCrossEntropy(torch.autograd.Function):
    """Loss, its gradient with respect to x, and the normalisers, in one sweep over blocks of logits.

    The softmax is normalised at the end: a block with a larger maximum shrinks the sums of those before it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, reduction: int,
        tile: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        flat, aims = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        low = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else weight.dtype
        dtype = widen(x).dtype
        scale = token_scales(aims, ignore_index, reduction, dtype)
        gradient = torch.empty_like(flat, dtype=dtype)
        normalisers = torch.empty(len(aims), dtype=dtype, device=x.device)
        loss = torch.zeros((), dtype=torch.float64, device=x.device)
        with torch.autocast(x.device.type, enabled=False):
            for start in range(0, len(aims), tile[0]):
                rows = slice(start, start + tile[0])
                index = aims[rows].clamp(min=0)
                lse, aimed, slope = _sweep(flat[rows].to(low), weight, bias, index, tile[1])
                slope *= scale[rows, None]
                gradient[rows] = slope.sub_(scale[rows, None] * weight[index])
                loss += ((lse - aimed) * scale[rows]).sum(dtype=torch.float64)
                normalisers[rows] = lse
        ctx.save_for_backward(gradient.view(x.shape).to(x.dtype))
        ctx.mark_non_differentiable(normalisers)
        return loss.to(dtype), normalisers

    @staticmethod
    def backward(ctx: Any, *adjoints: Any) -> Any:
        return ctx.saved_tensors[0] * adjoints[0], None, None, None, None, None, None


def _sweep(
    x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(logsumexp [n], logit of ``index`` [n], Σ_v p_v W_v [n, i]) of the logits x Wᵀ + b, for x [n, i]."""
    highest = torch.full((len(x),), -torch.inf, dtype=widen(x).dtype, device=x.device)
    mass, aimed = torch.zeros_like(highest), torch.zeros_like(highest)
    average = torch.zeros(x.shape, dtype=highest.dtype, device=x.device)
    for start in range(0, len(weight), columns):
        matrix = weight[start : start + columns].to(x.dtype)
        z = widen(torch.mm(x, matrix.t()))
        if bias is not None:
            z += bias[start : start + columns]
        here = index - start
        inside = (here >= 0) & (here < len(matrix))
        aimed += z.gather(1, here.clamp(0, len(matrix) - 1)[:, None]).squeeze(1).where(inside, aimed.new_zeros(()))
        top = torch.maximum(highest, z.amax(-1))
        shrink = (highest - top).exp_()
        p = z.sub_(top[:, None]).exp_()
        mass = mass * shrink + p.sum(-1)
        average *= shrink[:, None]
        if x.dtype == average.dtype:
            torch.addmm(average, p, matrix, out=average)
        else:
            average += torch.mm(p.to(x.dtype), matrix)
        highest = top
    return highest + mass.log(), aimed, average.div_(mass[:, None])


def head_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, reduction: int
) -> tuple[Tensor, Tensor]:
    """cross_entropy(x Wᵀ + b, targets) and logsumexp of each token's logits [N], without the logits of the batch.

    The graph puts it where it finds the pair. Differentiable in x alone: that is all the engine asks of it.
    """
    tile = CPU_TILE if x.device.type == "cpu" else (1 << 13, 1 << 15)
    return _BlockedCrossEntropy.apply(x, weight, bias, targets, ignore_index, reduction, tile)


def _moments(p: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
    """⟨p, z'⟩ and ⟨p, z'²⟩ over a block of the vocabulary, [n] each."""
    dz = widen(dz)
    weighted = p * dz
    return weighted.sum(-1), (weighted * dz).sum(-1)


def _moments_in(p: Tensor, dz: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """``_moments`` without new memory: a block larger than the cache is read and written as seldom as can be."""
    torch.mul(p, dz, out=scratch)
    first = scratch.sum(-1)
    return first, scratch.mul_(dz).sum(-1)


@dataclass(kw_only=True, slots=True)
class _Layer:
    """What all blocks and chunks of tokens share."""

    work: Workspace
    weight: Tensor
    bias: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    """[K, V], less its mean."""
    middle: Tensor
    """Mean of the weight's rows, [i]."""
    dmiddle: Tensor | None
    """The same of the directions, [K, i]."""
    epsilons: list[float] | None
    """For ``paired_products``; None where three products are made."""


@rule(
    head_cross_entropy,
    reads=lambda moving: ("x", "weight", "bias", "targets", "output"),
    curved=bool,
)
def head_rule(call: Call) -> Any:
    """Output layer and cross-entropy over blocks of the vocabulary.

    For a block b: z_b and p_b again (one product for all directions), then per direction z'_b = x'W_bᵀ + xW'_bᵀ + b'_b,
    its moments under p, and the output layer's own 2⟨s(p − onehot), x'W'_bᵀ⟩. W, W' and b' are taken less their means
    over the vocabulary: that moves all logits of a token by one number, which no term sees, and keeps what all tangents
    of a token's logits have in common, which may be large, out of ⟨p, z'²⟩ − ⟨p, z'⟩².
    """
    work, K = call.work, call.work.num_directions
    x, weight = work.product_operand(call["x"].reshape(-1, call["x"].shape[-1])), call["weight"]
    targets, lse = call["targets"].reshape(-1), call.value[1]
    dx, dweight, dbias = (call.tangent(name) for name in ("x", "weight", "bias"))
    dx = None if dx is None else work.product_operand(dx.reshape(K, *x.shape))
    wide = work.loop_directions and work.paired_width is not None and weight.shape[1] >= work.paired_width
    paired = wide and dx is not None and dweight is not None
    layer = _Layer(
        work=work,
        weight=weight,
        bias=call["bias"],
        dweight=dweight,
        dbias=None if dbias is None else dbias - dbias.mean(1, keepdim=True),
        middle=weight.mean(0),
        dmiddle=None if dweight is None else dweight.mean(1),
        epsilons=balance(weight, dweight) if paired else None,
    )
    assert call.adjoint is not None
    scale = token_scales(targets, call["ignore_index"], call["reduction"], lse.dtype) * call.adjoint
    slopes = torch.zeros(K, dtype=torch.float64, device=work.device)
    for start in range(0, len(targets), work.head_tokens):
        rows = slice(start, start + work.head_tokens)
        chunk = None if dx is None else dx[:, rows]
        slopes += _chunk(layer, x[rows], chunk, lse[rows], targets[rows], scale[rows], final=call.final)
    return None if call.final else (slopes.to(lse.dtype) / call.adjoint, None)


def _chunk(
    layer: _Layer, x: Tensor, dx: Tensor | None, lse: Tensor, targets: Tensor, scale: Tensor, *, final: bool
) -> Tensor:
    """Add the curvature of a chunk of tokens, x [n, i], x' [K, n, i]; return loss' [K] float64, or 0 if ``final``."""
    work, K, V, n = layer.work, layer.work.num_directions, layer.weight.shape[0], x.shape[0]
    counted, index = scale != 0, targets.clamp(min=0)
    mass = torch.zeros(n, dtype=torch.float64, device=work.device)
    moments = torch.zeros(2, K, n, dtype=torch.float64, device=work.device)
    slopes = torch.zeros(K, dtype=torch.float64, device=work.device)
    step = min(V, work.head_columns)
    space = x.new_empty(2, n * step)
    shifted_x: list[Tensor] = []
    if layer.epsilons is not None and dx is not None:
        shifted_x = [torch.add(x, dx[k], alpha=epsilon) for k, epsilon in enumerate(layer.epsilons)]
    for start in range(0, V, step):
        block = slice(start, min(V, start + step))
        z = torch.mm(x, work.product_operand(layer.weight[block]).t())
        p = widen(z) if layer.bias is None else widen(z) + layer.bias[block]
        p = (p - lse[:, None]).exp_()
        mass += p.sum(-1)
        residual = p * scale[:, None]
        inside = ((index >= block.start) & (index < block.stop) & counted).nonzero().squeeze(1)
        residual[inside, index[inside] - block.start] -= scale[inside]
        matrix = work.product_operand(layer.weight[block] - layer.middle)
        if shifted_x:
            z -= (x @ layer.middle)[:, None]
        dz, scratch = space[:, : z.numel()].view(2, *z.shape)
        for k in range(K):
            direction = None
            if layer.dweight is not None and layer.dmiddle is not None:
                direction = layer.dweight[k, block] - layer.dmiddle[k]
            offset = None if layer.dbias is None else layer.dbias[k, block].to(x.dtype)
            if shifted_x and layer.epsilons and dx is not None and direction is not None:
                epsilon = layer.epsilons[k]
                moved = torch.add(matrix, direction, alpha=epsilon)
                form = paired_products(z, shifted_x[k], moved, dx[k], direction, residual, epsilon, dz, scratch)
                work.total[k] += 2 * form
                if offset is not None:
                    dz += offset
            else:
                _logit_tangent(work, dz, x, matrix, None if dx is None else dx[k], direction, offset)
                if dx is not None and direction is not None:
                    gathered = torch.mm(work.product_operand(residual).t(), dx[k])
                    work.total[k : k + 1] += 2 * inner(widen(gathered)[None], direction[None])
            if work.compile_rules or work.amp:
                first, second = work.pointwise(_moments)(p, dz)
            else:
                first, second = _moments_in(p, dz, scratch)
            moments[0, k] += first
            moments[1, k] += second
            if not final:
                slopes[k] += (residual * dz).sum(dtype=torch.float64)
    first_moment, second_moment = moments / mass
    contribution = ((second_moment - first_moment**2) * scale).sum(-1)
    work.total += contribution
    work.gauss_newton += contribution
    return slopes


def _logit_tangent(
    work: Workspace, out: Tensor, x: Tensor, matrix: Tensor, dx: Tensor | None, dweight: Tensor | None,
    offset: Tensor | None,
) -> None:  # fmt: skip
    """out [N, v] = x'Wᵀ + xW'ᵀ + offset for a block of v rows of W; each product adds to what stands there."""
    products = []
    if dx is not None:
        products.append((dx, matrix.t()))
    if dweight is not None:
        products.append((x, work.product_operand(dweight).t()))
    if not products:
        out.copy_(offset if offset is not None else torch.zeros_like(out))
        return
    if offset is None:
        torch.mm(*products[0], out=out)
    else:
        torch.addmm(offset, *products[0], out=out)
    for pair in products[1:]:
        torch.addmm(out, *pair, out=out)
