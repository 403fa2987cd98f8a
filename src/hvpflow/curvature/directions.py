"""Stacks of directions, the result of a measurement, and the parameters that may move.

Legend: B sequences, T positions, K directions, D parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hvpflow.errors import HvpflowError, nearest

Directions = dict[str, Tensor]
"""Parameter name -> [K, *shape of the parameter]; the names of ``trainable_parameters``, each exactly once."""


class QuadraticForms(NamedTuple):
    """The curvature of one batch's summed loss along K directions."""

    total: Tensor
    """[K] float64 on the CPU: vᵀHv."""
    gauss_newton: Tensor
    """[K] float64 on the CPU: the part of vᵀHv that comes from the loss over the logits, vᵀJᵀ(∂²loss/∂z²)Jv."""

    def difference(self, exact: QuadraticForms) -> float:
        """The largest difference from ``exact``, of either part, relative to the larger of its two parts.

        The parts of one direction share a scale because vᵀHv has no definite sign and may cancel. NaN where a part is.
        """
        scale = torch.maximum(exact.total.abs(), exact.gauss_newton.abs()).clamp_min(1e-300)
        return float(torch.stack([(mine - its).abs() / scale for mine, its in zip(self, exact, strict=True)]).max())


def trainable_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the unique parameters that require a gradient; a tied tensor appears once, under its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def check_directions(parameters: dict[str, Tensor], directions: Directions) -> int:
    """Return K; raise HvpflowError where names, shapes, dtypes or devices do not fit the parameters."""
    if unknown := [name for name in directions if name not in parameters]:
        raise HvpflowError(
            f"direction for {unknown[0]!r}, which is no trainable parameter{nearest(unknown[0], parameters)}; "
            "give one entry for each name of named_parameters() that requires a gradient"
        )
    if missing := [name for name in parameters if name not in directions]:
        raise HvpflowError(f"no direction for parameter {missing[0]!r} ({len(missing)} missing); give zeros to hold it")
    if not parameters:
        raise HvpflowError("the model has no trainable parameter, so it has no curvature to measure")
    num_directions = next(iter(directions.values())).shape[0] if next(iter(directions.values())).dim() else 0
    for name, parameter in parameters.items():
        stack = directions[name]
        if tuple(stack.shape) != (num_directions, *parameter.shape) or num_directions == 0:
            raise HvpflowError(
                f"directions[{name!r}] has shape {tuple(stack.shape)}, expected [K, *{tuple(parameter.shape)}] "
                f"with the same K >= 1 for every parameter (K = {num_directions} from the first)"
            )
        if stack.dtype != parameter.dtype or stack.device != parameter.device:
            raise HvpflowError(
                f"directions[{name!r}] is {stack.dtype} on {stack.device}, the parameter {parameter.dtype} on "
                f"{parameter.device}; convert the directions"
            )
    return num_directions


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout and its like off inside the block: curvature is that of one fixed function."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def to_host(values: Tensor) -> Tensor:
    """Return scalars as float64 on the CPU."""
    return values.detach().to(device="cpu", dtype=torch.float64)
