"""The gradient of a summed loss, accumulated into tensors of the caller's precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hvpflow.curvature.directions import evaluation_mode, trainable_parameters
from hvpflow.errors import HvpflowError


def add_gradient(
    model: nn.Module, tokens: Tensor, targets: Tensor, into: dict[str, Tensor], *, scale: float, amp: bool = False
) -> float:
    """Add ``scale`` times the gradient of ``model(tokens, targets)`` to ``into`` in place; return the summed loss.

    ``tokens`` and ``targets`` are [B, T]; ``into`` maps every trainable parameter's name to a tensor of its shape, in
    any precision. Attention uses PyTorch's fastest kernel. ``amp`` runs matrix products in bfloat16.
    A parameter that the loss does not depend on receives nothing. Raises HvpflowError for a missing name.
    """
    parameters = trainable_parameters(model)
    if missing := [name for name in parameters if name not in into]:
        raise HvpflowError(f"no tensor to receive the gradient of {missing[0]!r}; expected one for every parameter")
    with evaluation_mode(model), torch.enable_grad():
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=amp):
            loss = model(tokens, targets)
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            into[name].add_(gradient, alpha=scale)
    return float(loss.detach())
