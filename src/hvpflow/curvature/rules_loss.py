"""The rule of the cross-entropy.

loss = Σ_n s_n (lse(z_n) − z_n[target]): with p = softmax(z), loss' = Σ s_n⟨p − onehot, z'⟩ and
⟨loss̄, D²⟩ = Σ_n s_n ⟨p, c²⟩, c = z' − ⟨p, z'⟩. This is the Gauss-Newton part of vᵀHv. Ignored targets have s_n = 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hvpflow.curvature.rules import Call, Moving, rule, widen
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
