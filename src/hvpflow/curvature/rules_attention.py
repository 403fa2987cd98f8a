"""The rule of scaled-dot-product attention: causal, masked, grouped-query.

o = Pv, P = softmax(s), s = σqkᵀ + mask. With s' = σ(q'kᵀ + qk'ᵀ), c = s' − ⟨P, s'⟩ per row, P' = Pc,
dP = ōvᵀ and dS = P(dP − ⟨P, dP⟩):

    o' = P'v + Pv',    ⟨ō, D²⟩ = Σ dS·c² + 2σ⟨dSᵀq', k'⟩ + 2⟨ō, P'v'⟩.

The first term is the softmax's, the second the product qkᵀ's, the third the product Pv's. P and dS serve every
direction. The rule runs over slices of heads and of queries, so no [T, T] tensor of the whole batch ever exists, and
with a causal mask a slice of queries meets only the keys that it may see.

Extra legend: J items (batch × key heads), G query heads per key head, E head size, R = G·(queries of a slice) rows,
S keys of a slice.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hvpflow.curvature.rules import Call, Moving, Workspace, inner, rule, widen
from hvpflow.curvature.rules_norm import softmax_form

aten = torch.ops.aten


def attention_probabilities(scores: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """Softmax of [J, R, S] scores under a mask (boolean: True is visible; otherwise added); an unseen row gives 0.

    With ``causal`` the mask is the causal one alone, under which every row sees the first key.
    """
    scores = widen(scores)
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)
    if causal:
        return scores.softmax(-1)
    unseen = scores.amax(-1, keepdim=True) == -math.inf
    return scores.softmax(-1).masked_fill(unseen, 0)


def _softmax_step(work: Workspace, P: Tensor, dS: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
    """``softmax_form`` of fresh scores ``ds``; without a compiler it overwrites them, to stay within the cache."""
    if work.compile_rules or ds.dtype != P.dtype:
        return work.pointwise(softmax_form)(P, dS, ds)
    weighted = P * ds
    c = ds.sub_(weighted.sum(-1, keepdim=True))
    torch.mul(P, c, out=weighted)
    form = c.square_().mul_(dS).sum(-1).reshape(c.shape[0], -1).sum(-1, dtype=torch.float64)
    return weighted, form


def attention_form(
    work: Workspace, P: Tensor, dS: Tensor, adjoint: Tensor, dq: Tensor, rows: Tensor, columns: Tensor, values: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tangent [K, J, R, F] and curvature [K] of one slice; σ is already in the keys and their tangents.

    P, dS [J, R, S]; adjoint [J, R, F]; dq [K, J, R, E]; rows [q', q] [K, J, R, 2E]; columns [k, k'] [K, J, S, 2E];
    values [v, v'] [K, J, S, 2F]. The two halves of s' are one product over 2E, P'[v, v'] is one as well; what
    multiplies P or dS stands side by side for all K, so neither is copied per direction.
    """
    K, J, R, E = dq.shape
    S, F = values.shape[2], values.shape[3] // 2
    flat = (K * J, S, -1)
    ds = torch.bmm(rows.reshape(K * J, R, 2 * E), columns.reshape(flat).transpose(1, 2)).view(K, J, R, S)
    dP, form = _softmax_step(work, P, dS, ds)
    moved = torch.bmm(work.product_operand(dP).view(K * J, R, S), values.reshape(flat)).view(K, J, R, 2 * F)
    form = form + 2 * inner(widen(moved[..., F:]), widen(adjoint))

    def aside(x: Tensor) -> Tensor:  # [K, J, n, E] -> [J, n, K·E]
        return x.permute(1, 2, 0, 3).reshape(J, x.shape[2], -1)

    gathered = torch.bmm(work.product_operand(dS).transpose(1, 2), aside(dq)).view(J, S, K, E).permute(2, 0, 1, 3)
    form = form + 2 * inner(widen(gathered), widen(columns[..., E:]))
    tangent = torch.bmm(work.product_operand(P), aside(values[..., F:])).view(J, R, K, F).permute(2, 0, 1, 3)
    return tangent.add_(moved[..., :F]), form


def attention_form_of_one(
    work: Workspace, P: Tensor, dS: Tensor, adjoint: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``attention_form`` of a single direction, on operands as they are: nothing is set side by side or copied.

    q, dq [J, R, E]; k, dk [J, S, E] with σ inside; v, dv [J, S, F]. Returns [J, R, F] and [1].
    """
    ds = torch.bmm(dq, k.transpose(1, 2))
    torch.baddbmm(ds, q, dk.transpose(1, 2), out=ds)
    dP, form = _softmax_step(work, P, dS, ds[None])
    dP = work.product_operand(dP[0])
    form = form + 2 * inner(widen(torch.bmm(dP, dv))[None], widen(adjoint))
    form = form + 2 * inner(widen(torch.bmm(work.product_operand(dS).transpose(1, 2), dq))[None], widen(dk))
    tangent = torch.bmm(work.product_operand(P), dv)
    return torch.baddbmm(tangent, dP, v, out=tangent), form


def _grouped(call: Call) -> tuple[int, int]:
    """(items, query heads per key head)."""
    query, key = call.shapes["query"], call.shapes["key"]
    groups = query[-3] // key[-3] if call["enable_gqa"] and len(query) > 2 else 1
    return math.prod(query[:-2]) // groups, groups


def _mask(call: Call, items: int, groups: int) -> Tensor | None:
    """The mask as [items or 1, groups or 1, queries, keys]."""
    mask, shape = call["attn_mask"], call.shapes["query"]
    if mask is None:
        return None
    size = (shape[-2], call.shapes["key"][-2])
    if mask.numel() == mask.shape[-1] * mask.shape[-2]:
        return mask.reshape(1, 1, *mask.shape[-2:]).expand(1, 1, *size)
    return mask.expand(*shape[:-2], *size).reshape(items, groups, *size)


def _unsupported(arguments: dict[str, Any], moving: Moving) -> str | None:
    if "attn_mask" in moving:
        return "its mask moves with the parameters"
    if arguments["dropout_p"]:
        return "it has active dropout, so the loss is random"
    query, key, value = (arguments[name].meta["val"].shape for name in ("query", "key", "value"))
    grouped = arguments["enable_gqa"]
    if query[: -3 if grouped else -2] != key[: -3 if grouped else -2] or key[:-2] != value[:-2]:
        return f"query {tuple(query)}, key {tuple(key)} and value {tuple(value)} differ in their leading axes"
    return None


@rule(
    aten.scaled_dot_product_attention.default,
    reads=lambda moving: ("query", "key", "value", "attn_mask"),
    curved=bool,
    refuses=_unsupported,
)
def attention(call: Call) -> Tensor:
    work, K = call.work, call.work.num_directions
    items, groups = _grouped(call)
    T, E = call.shapes["query"][-2:]
    keys, F = call.shapes["value"][-2:]
    scale = call["scale"] if call["scale"] is not None else 1 / math.sqrt(E)
    mask = _mask(call, items, groups)
    lead = {"query": (items, groups), "key": (items,), "value": (items,)}

    def primal(name: str) -> Tensor:
        return call[name].reshape(*lead[name], *call[name].shape[-2:])

    def tangent(name: str) -> Tensor:
        stack = call.tangent(name)
        if stack is None:
            return torch.zeros((), dtype=widen(call[name]).dtype, device=work.device).expand(K, *primal(name).shape)
        return stack.reshape(K, *lead[name], *stack.shape[-2:])

    assert call.adjoint is not None
    values = primal("query"), primal("key"), primal("value"), call.adjoint.reshape(items, groups, T, F)
    tangents = tangent("query"), tangent("key"), tangent("value")
    output = tangents[2].new_empty(K, items, groups, T, F)
    causal = bool(call["is_causal"])
    slice_elements = work.slice_elements if work.loop_directions else work.slice_elements // K
    step_queries = min(T, 128) if causal else min(T, max(1, work.slice_elements // (groups * keys)))
    step_items = max(1, slice_elements // (groups * step_queries * keys))
    hidden = None
    if causal and mask is None:
        hidden = torch.full((T, keys), -math.inf, dtype=widen(values[0]).dtype, device=work.device).triu_(1)
    for first in range(0, items, step_items):
        part = slice(first, first + step_items)
        q, k, v, adjoint = (work.product_operand(value[part]) for value in values)
        dq, dk, dv = (work.product_operand(stack[:, part]) for stack in tangents)
        k, n = k * scale, q.shape[0]
        dk = dk * scale
        if not work.loop_directions:
            rows = torch.cat((dq, q.expand(K, *q.shape)), -1)
            columns = torch.cat((k.expand(K, *k.shape), dk), -1)
            both = torch.cat((v.expand(K, *v.shape), dv), -1)
        for start in range(0, T, step_queries):
            stop = min(T, start + step_queries)
            seen = min(stop, keys) if causal else keys
            size = groups * (stop - start)
            here = slice(start, stop)
            adjoints = adjoint[:, :, here].reshape(n, size, F)
            visible = None
            if mask is not None:
                visible = (mask if mask.shape[0] == 1 else mask[part])[:, :, here, :seen]
                visible = visible.expand(-1, groups, -1, -1).flatten(1, 2)
            elif hidden is not None:
                visible = hidden[here, :seen].expand(groups, -1, -1).flatten(0, 1)
            queries = q[:, :, here].reshape(n, size, E)
            scores = torch.bmm(queries, k[:, :seen].transpose(1, 2))
            P = attention_probabilities(scores, visible, causal=hidden is not None)
            dP = widen(torch.bmm(adjoints, v[:, :seen].transpose(1, 2)))
            dS = P * dP.sub_((P * dP).sum(-1, keepdim=True))
            if not work.loop_directions:
                moved, contribution = attention_form(
                    work, P, dS, adjoints, dq[:, :, :, here].reshape(K, n, size, E),
                    rows[:, :, :, here].reshape(K, n, size, 2 * E), columns[:, :, :seen], both[:, :, :seen],
                )  # fmt: skip
                output[:, part, :, here] = moved.view(K, n, groups, stop - start, F)
                work.total += contribution
                continue
            for index in range(K):
                moved, contribution = attention_form_of_one(
                    work, P, dS, adjoints, queries, k[:, :seen], v[:, :seen],
                    dq[index, :, :, here].reshape(n, size, E), dk[index, :, :seen], dv[index, :, :seen],
                )  # fmt: skip
                output[index, part, :, here] = moved.view(n, groups, stop - start, F)
                work.total[index] += contribution[0]
    return output.view(K, *call.output.shape)


def _attention_reads(moving: Moving) -> tuple[str, ...]:
    return ("query", "key", "value", "attn_mask")
