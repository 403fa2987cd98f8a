"""Rules of normalisations: RMSNorm, LayerNorm, softmax, log-softmax, logsumexp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hvpflow.curvature.rules import Call, Moving, Workspace, inner, rule, widen

aten = torch.ops.aten


def norm_form(
    x: Tensor, weight: Tensor | None, adjoint: Tensor, dx: Tensor, dweight: Tensor | None, dbias: Tensor | None,
    eps: float, centred: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tangent [K, n, w] and curvature [K] of y = νw + b, ν = xr, r = (mean x² + ε)^−½ along each row of x [n, w].

    With u = x'r, m = mean(νu), q = mean(u²) per row: r' = −mr and r'' = (3m² − q)r, so ν' = u − mν and
    ⟨ȳ, D²⟩ = Σ_rows (m² − q)⟨ȳw, ν⟩ − 2m⟨ȳw, ν'⟩ + 2⟨ȳν', w'⟩. LayerNorm is the same after centring x and x'.
    """
    x, adjoint, dx = widen(x), widen(adjoint), widen(dx)
    if centred:
        x, dx = x - x.mean(-1, keepdim=True), dx - dx.mean(-1, keepdim=True)
    r = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    nu, u = x * r, dx * r
    product = u * nu
    m = product.mean(-1)
    q = torch.mul(u, u, out=product).mean(-1)
    dnu = u.addcmul_(m[..., None], nu, value=-1)
    weighted = adjoint if weight is None else adjoint * weight
    along = (weighted * nu).sum(-1)
    torch.mul(weighted, dnu, out=product)
    form = ((m * m - q) * along - 2 * m * product.sum(-1)).sum(-1, dtype=torch.float64)
    if dweight is not None:
        form = form + 2 * inner(torch.mul(adjoint, dnu, out=product).sum(1), dweight)
    tangent = dnu if weight is None else dnu.mul_(weight)
    if dweight is not None:
        tangent = tangent.addcmul_(nu, dweight[:, None])
    if dbias is not None:
        tangent = tangent.add_(dbias[:, None])
    return tangent, form


def norm_tangent(
    work: Workspace, x: Tensor, weight: Tensor | None, adjoint: Tensor, dx: Tensor, dweight: Tensor | None,
    dbias: Tensor | None, eps: float, centred: bool,
) -> Tensor:  # fmt: skip
    """Run ``norm_form`` over slices of the rows; return the tangent [K, N, w], add the curvature."""
    K, N, width = dx.shape
    size = max(1, work.slice_elements // (K * width))
    form = work.pointwise(norm_form)
    if size >= N:
        tangent, contribution = form(x, weight, adjoint, dx, dweight, dbias, eps, centred)
        work.total += contribution
        return tangent
    output = torch.empty(K, N, width, dtype=widen(dx).dtype, device=dx.device)
    for start in range(0, N, size):
        rows = slice(start, start + size)
        tangent, contribution = form(x[rows], weight, adjoint[rows], dx[:, rows], dweight, dbias, eps, centred)
        output[:, rows] = tangent
        work.total += contribution
    return output


def _normalise(call: Call, *, centred: bool) -> Tensor:
    work, K = call.work, call.work.num_directions
    x, weight = call["input"], call["weight"]
    width = 1
    for length in call["normalized_shape"]:
        width *= length
    eps = call["eps"] if call["eps"] is not None else torch.finfo(widen(x).dtype).eps
    dweight, dbias = (
        None if call.tangent(name) is None else call.tangent(name).reshape(K, width) for name in ("weight", "bias")
    )
    if call.tangent("input") is None:
        x = widen(x).reshape(-1, width)
        x = x - x.mean(-1, keepdim=True) if centred else x
        tangent = x.new_zeros(K, *x.shape)
        if dweight is not None:
            tangent += x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * dweight[:, None]
        if dbias is not None:
            tangent += dbias[:, None]
        return tangent.view(K, *call.output.shape)
    assert call.adjoint is not None
    tangent = norm_tangent(
        work, x.reshape(-1, width), None if weight is None else weight.reshape(width), call.adjoint.reshape(-1, width),
        call.tangent("input").reshape(K, -1, width), dweight, dbias, eps, centred,
    )  # fmt: skip
    return tangent.view(K, *call.output.shape)


def _norm_reads(moving: Moving) -> tuple[str, ...]:
    return ("input", "weight") if moving & {"input", "weight"} else ("input",)


def _input_moves(moving: Moving) -> bool:
    return "input" in moving


@rule(aten.rms_norm.default, reads=_norm_reads, curved=_input_moves)
def rms_norm(call: Call) -> Tensor:
    return _normalise(call, centred=False)


@rule(aten.layer_norm.default, reads=_norm_reads, curved=_input_moves)
def layer_norm(call: Call) -> Tensor:
    return _normalise(call, centred=True)


def softmax_form(p: Tensor, slope: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
    """p = softmax(z), slope = p(p̄ − ⟨p, p̄⟩): with c = z' − ⟨p, z'⟩ along the last axis, (pc, Σ slope·c²).

    From log p = z − lse(z): p' = pc and p'' = p(c² − ⟨p, c²⟩). Shapes [*S], [*S], [K, *S].
    """
    dz = widen(dz)
    c = dz - (p * dz).sum(-1, keepdim=True)
    return p * c, inner(c * c, slope)


def variance_form(p: Tensor, scale: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
    """The mean ⟨p, z'⟩ [K, n] and the scaled sum of variances Σ_n scale_n ⟨p, (z' − mean)²⟩ [K], z' [K, n, V]."""
    dz = widen(dz)
    average = (p * dz).sum(-1)
    c = dz - average[..., None]
    return average, inner((p * c * c).sum(-1), scale)


def _last(tensor: Tensor, dim: int, rank: int) -> Tensor:
    return tensor.movedim(dim % rank - rank, -1)


@rule(aten.softmax.int, aten._softmax.default, reads=lambda moving: ("self",), curved=bool)
def softmax(call: Call) -> Tensor:
    assert call.adjoint is not None
    rank = call["self"].dim()
    p = _last(call["self"], call["dim"], rank).softmax(-1)
    adjoint = _last(widen(call.adjoint), call["dim"], rank)
    tangent, contribution = softmax_form(
        p, p * (adjoint - (p * adjoint).sum(-1, keepdim=True)), _last(call.tangent("self"), call["dim"], rank)
    )
    call.work.total += contribution
    return tangent.movedim(-1, call["dim"] % rank - rank)


@rule(aten.log_softmax.int, aten._log_softmax.default, reads=lambda moving: ("self",), curved=bool)
def log_softmax(call: Call) -> Tensor:
    """y = z − lse(z): y' = z' − ⟨p, z'⟩ and ⟨ȳ, D²⟩ = −Σ_rows (Σȳ)⟨p, c²⟩."""
    assert call.adjoint is not None
    rank = call["self"].dim()
    p, dz = _last(call["self"], call["dim"], rank).softmax(-1), _last(call.tangent("self"), call["dim"], rank)
    scale = -_last(call.adjoint, call["dim"], rank).sum(-1)
    average, contribution = variance_form(p.flatten(0, -2), scale.flatten(), dz.flatten(1, -2))
    call.work.total += contribution
    return (dz - average.view(*dz.shape[:-1], 1)).movedim(-1, call["dim"] % rank - rank)


@rule(
    aten.logsumexp.default,
    reads=lambda moving: ("self",),
    curved=bool,
    refuses=lambda arguments, moving: _single_axis(arguments),
)
def logsumexp(call: Call) -> Tensor:
    """y = lse(z): y' = ⟨p, z'⟩ and ⟨ȳ, D²⟩ = Σ_rows ȳ⟨p, c²⟩."""
    assert call.adjoint is not None
    rank, dim = call["self"].dim(), call["dim"][0]
    p, dz = _last(call["self"], dim, rank).softmax(-1), _last(call.tangent("self"), dim, rank)
    average, contribution = variance_form(p.flatten(0, -2), call.adjoint.flatten(), dz.flatten(1, -2))
    call.work.total += contribution
    return average.view(call.work.num_directions, *call.output.shape)


def _single_axis(arguments: dict[str, Any]) -> str | None:
    return None if len(arguments["dim"]) == 1 else "it reduces more than one axis"
