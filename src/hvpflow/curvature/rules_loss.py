"""Rules of the cross-entropy, alone and fused with the output layer.

loss = Σ_n s_n (lse(z_n) − z_n[target]): with p = softmax(z), loss' = Σ s_n⟨p − onehot, z'⟩ and
⟨loss̄, D²⟩ = Σ_n s_n ⟨p, c²⟩, c = z' − ⟨p, z'⟩. This is the Gauss-Newton part of vᵀHv. Ignored targets have s_n = 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hvpflow.curvature.rules import Call, Moving, Workspace, inner, rule, widen
from hvpflow.curvature.rules_norm import variance_form

aten = torch.ops.aten

MEAN, SUM = 1, 2
"""PyTorch's numbers for the reductions."""


def token_scales(targets: Tensor, ignore_index: int, reduction: int, dtype: torch.dtype) -> Tensor:
    """s_n, [N]: 1 for a counted token (1/count under the mean), 0 for an ignored one."""
    counted = (targets != ignore_index).to(dtype)
    return counted / counted.sum() if reduction == MEAN else counted


def _unsupported(arguments: dict[str, Any], moving: Moving) -> str | None:
    if arguments["weight"] is not None:
        return "it has class weights"
    if arguments["target"].meta["val"].dtype.is_floating_point:
        return "its targets are probabilities"
    if arguments["self"].meta["val"].dim() != 2:
        return "its logits are not [tokens, classes]"
    return None


@rule(aten.cross_entropy_loss.default, reads=lambda moving: ("self", "target"), curved=bool, refuses=_unsupported)
def cross_entropy(call: Call) -> Tensor | None:
    z, targets, dz = widen(call["self"]), call["target"], call.tangent("self")
    assert call.adjoint is not None
    scale = token_scales(targets, call["ignore_index"], call["reduction"], z.dtype)
    p = z.softmax(-1)
    average, contribution = variance_form(p, scale * call.adjoint, dz)
    call.work.total += contribution
    call.work.gauss_newton += contribution
    if call.final:
        return None
    smoothing = call["label_smoothing"]
    index = targets.clamp(min=0).expand(dz.shape[0], -1)[..., None]
    aimed = (1 - smoothing) * dz.gather(-1, index).squeeze(-1) + smoothing * dz.mean(-1)
    tangent = scale * (average - aimed)
    return tangent if call["reduction"] == 0 else tangent.sum(-1)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss, its gradient with respect to x, and the normalisers, over chunks of tokens in one sweep."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, reduction: int,
        elements: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        flat, aims = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        amp = torch.is_autocast_enabled(x.device.type)
        matrix = weight.to(torch.bfloat16) if amp else weight
        dtype = widen(x).dtype
        scale = token_scales(aims, ignore_index, reduction, dtype)
        gradient = torch.empty_like(flat, dtype=matrix.dtype)
        normalisers = torch.empty(len(aims), dtype=dtype, device=x.device)
        loss = torch.zeros((), dtype=torch.float64, device=x.device)
        step = max(1, elements // weight.shape[0])
        with torch.autocast(x.device.type, enabled=False):
            for start in range(0, len(aims), step):
                rows = slice(start, start + step)
                z = widen(torch.mm(flat[rows].to(matrix.dtype), matrix.t()))
                if bias is not None:
                    z += bias
                index = aims[rows].clamp(min=0)[:, None]
                aimed = z.gather(1, index).squeeze(1)
                highest = z.amax(-1, keepdim=True)
                p = z.sub_(highest).exp_()
                mass = p.sum(-1, keepdim=True)
                lse = (highest + mass.log()).squeeze(1)
                loss += ((lse - aimed) * scale[rows]).sum(dtype=torch.float64)
                p.mul_(scale[rows, None] / mass)
                p.scatter_add_(1, index, -scale[rows, None])
                torch.mm(p.to(matrix.dtype), matrix, out=gradient[rows])
                normalisers[rows] = lse
        ctx.save_for_backward(gradient.view(x.shape).to(x.dtype))
        ctx.mark_non_differentiable(normalisers)
        return loss.to(dtype), normalisers

    @staticmethod
    def backward(ctx: Any, *adjoints: Any) -> Any:
        return ctx.saved_tensors[0] * adjoints[0], None, None, None, None, None, None


def head_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, reduction: int
) -> tuple[Tensor, Tensor]:
    """cross_entropy(x Wᵀ + b, targets) and logsumexp of each token's logits [N], without the logits of the batch.

    The graph puts it where it finds the pair. Differentiable in x alone: that is all the engine asks of it.
    """
    elements = 1 << 23 if x.device.type == "cpu" else 1 << 28
    return _ChunkedCrossEntropy.apply(x, weight, bias, targets, ignore_index, reduction, elements)


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


def _first_moment(p: Tensor, dz: Tensor) -> Tensor:
    return (p * widen(dz)).sum(-1)


@rule(
    head_cross_entropy,
    reads=lambda moving: ("x", "weight", "bias", "targets", "output"),
    curved=bool,
)
def head_rule(call: Call) -> Any:
    """Output layer and cross-entropy over blocks of the vocabulary, all tokens at once.

    For a block b: z_b and p_b again (one product for all directions), then per direction z'_b = x'W_bᵀ + xW'_bᵀ + b'_b,
    its moments under p, and the output layer's own 2⟨(s(p − onehot))_bᵀ x', W'_b⟩. A block of W' is read once. The
    variance is ⟨p, (z' − a)²⟩ − ⟨p, z' − a⟩² for any a per token; a is the mean over the first block, so that nothing
    cancels.
    """
    work, K = call.work, call.work.num_directions
    width = call["x"].shape[-1]
    x, weight = work.product_operand(call["x"].reshape(-1, width)), call["weight"]
    targets, lse = call["targets"].reshape(-1), call.value[1]
    dx, dweight, dbias = (call.tangent(name) for name in ("x", "weight", "bias"))
    dx = None if dx is None else work.product_operand(dx.reshape(K, -1, width))
    assert call.adjoint is not None
    N, V = len(targets), weight.shape[0]
    scale = token_scales(targets, call["ignore_index"], call["reduction"], lse.dtype) * call.adjoint
    counted, index = scale != 0, targets.clamp(min=0)
    moments = torch.zeros(3, K, N, dtype=torch.float64, device=work.device)
    shift: list[Tensor] = []
    first_order = torch.zeros(K, dtype=torch.float64, device=work.device)
    step = max(1, work.head_elements // N)
    if work.loop_directions:
        step = min(step, 256)  # a block and its weights then stay in a core's cache through products and moments
    buffer = x.new_empty(N * min(step, V))
    scratch = None if work.compile_rules or work.amp else torch.empty_like(buffer)
    for start in range(0, V, step):
        block = slice(start, min(V, start + step))
        size = block.stop - block.start
        matrix = work.product_operand(weight[block])
        p = widen(torch.mm(x, matrix.t()))
        if call["bias"] is not None:
            p += call["bias"][block]
        p.sub_(lse[:, None]).exp_()
        residual = p * scale[:, None]
        inside = (index >= block.start) & (index < block.stop) & counted
        rows = inside.nonzero().squeeze(1)
        residual[rows, index[rows] - block.start] -= scale[rows]
        mass = p.sum(-1)
        residual_t = work.product_operand(residual).t()
        dz = buffer[: N * size].view(N, size)
        for k in range(K):
            block_direction = None if dweight is None else dweight[k, block]
            offset = None if dbias is None else dbias[k, block].to(x.dtype)
            if shift[k:]:
                lowered = -shift[k][:, None].to(x.dtype)
                offset = lowered if offset is None else offset + lowered
            _logit_tangent(work, dz, x, matrix, None if dx is None else dx[k], block_direction, offset)
            if len(shift) == k:
                shift.append(_first_moment(p, dz) / mass.clamp(min=torch.finfo(mass.dtype).tiny))
                dz -= shift[k][:, None].to(dz.dtype)
            if scratch is None:
                first, second = work.pointwise(_moments)(p, dz)
            else:
                first, second = _moments_in(p, dz, scratch[: N * size].view(N, size))
            moments[0, k] += mass
            moments[1, k] += first
            moments[2, k] += second
            if dx is not None and block_direction is not None:
                gathered = torch.mm(residual_t, dx[k])
                work.total[k : k + 1] += 2 * inner(widen(gathered)[None], block_direction[None])
            if not call.final:
                first_order[k] += (residual * dz).sum(dtype=torch.float64)
    mass64, first64, second64 = moments
    variance = second64 / mass64 - (first64 / mass64) ** 2
    contribution = (variance * scale).sum(-1)
    work.total += contribution
    work.gauss_newton += contribution
    # Σ residual over the vocabulary is 0, so the shift does not change the first derivative.
    return None if call.final else (first_order.to(lse.dtype) / call.adjoint, None)


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
