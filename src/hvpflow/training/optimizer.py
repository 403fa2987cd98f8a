"""AdamW with weight decay on matrices only, and clipping by the global gradient norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hvpflow.runs.recipe import Recipe


def decays(parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices (and the embedding), not to the gains of normalisation layers."""
    return parameter.ndim >= 2


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two AdamW groups in the order checkpoints store them: 0 with decay (ndim >= 2), 1 without."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if decays(p)], "weight_decay": weight_decay},
        {"params": [p for p in parameters if not decays(p)], "weight_decay": 0.0},
    ]


def make_adamw(model: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.AdamW:
    """AdamW over the model's parameters; the fused kernel on CUDA if the recipe asks for it, the plain loop on CPU."""
    settings = recipe.optimizer
    fused = device.type == "cuda" and recipe.runtime.fused_optimizer
    return torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=fused,
        # The foreach loop needs a fixed choice: its default depends on the device, and a resumed state would differ.
        foreach=None if fused else True,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set every group's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: Iterable[Tensor], limit: float | None) -> Tensor:
    """Scale all gradients by min(1, limit / (‖g‖ + 1e-6)); returns ‖g‖ before clipping (0-dim).

    ``limit`` of None or 0 only measures.
    """
    parameters = list(parameters)
    # In float64, because PyTorch's float32 norm on CPU adds up one after the other: 1e-3 off for 10 M elements.
    squares = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) ** 2 for p in parameters if p.grad is not None]
    norm = torch.stack(squares).sum().sqrt().float()
    if limit:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm
