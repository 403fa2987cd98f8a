"""Vectors of parameter space, kept as one tensor a parameter. Norms are float64 sums of float64 products."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

Vector = dict[str, Tensor]
"""Parameter name -> tensor of its shape."""


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The unique trainable parameters in module order; a tied tensor counts once, under its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def zeros_like(parameters: Mapping[str, Tensor]) -> Vector:
    """A zero vector with the parameters' shapes, dtype and device."""
    return {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in parameters.items()}


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """Σ x² over all elements of all tensors."""
    return math.fsum(float(tensor.detach().double().square().sum()) for tensor in tensors)


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every element of every tensor is finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
