"""A start-up comparison of an engine with the slow exact one, on a few sequences and one direction."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hvpflow.curvature.directions import Directions, QuadraticForms, trainable_parameters
from hvpflow.curvature.reference import jvp_of_grad
from hvpflow.errors import HvpflowError


def check_engine(
    engine: Callable[[Tensor, Tensor, Directions], QuadraticForms],
    model: nn.Module,
    tokens: Tensor,
    targets: Tensor,
    tolerance: float,
    *,
    seed: int = 0,
) -> float:
    """Return the relative difference between ``engine`` and ``jvp_of_grad`` on one random-sign direction.

    ``tokens`` and ``targets`` are a few sequences [B, T]. The difference is the larger of those of vᵀHv and of its
    Gauss-Newton part, both relative to the larger of the two values' magnitudes, since vᵀHv may cancel. Raises
    HvpflowError where it exceeds ``tolerance`` or is not a number.
    """
    generator = torch.Generator().manual_seed(seed)
    direction = {
        name: torch.randint(0, 2, (1, *parameter.shape), generator=generator)
        .mul_(2)
        .sub_(1)
        .to(device=parameter.device, dtype=parameter.dtype)
        for name, parameter in trainable_parameters(model).items()
    }
    expected = jvp_of_grad(model, tokens, targets, direction)
    measured = engine(tokens, targets, direction)
    scale = max(float(part.abs()) for part in expected) or 1.0
    difference = max(float((mine - theirs).abs()) / scale for mine, theirs in zip(measured, expected, strict=True))
    if not difference <= tolerance:
        raise HvpflowError(
            f"the curvature engine disagrees with the exact reference by {difference:.2e} of the value on "
            f"{tokens.shape[0]} sequences (vᵀHv {float(measured.total):.6e}, expected {float(expected.total):.6e}; "
            f"Gauss-Newton part {float(measured.gauss_newton):.6e}, expected {float(expected.gauss_newton):.6e}); "
            f"at most {tolerance:.1e} is accepted in this precision. Choose `engine: jvp-of-grad` or a higher precision"
        )
    return difference
