"""The face of the curvature engine: vᵀHv of a batch's summed loss for a stack of directions.

Legend: B sequences, T positions, K directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from hvpflow.curvature.directions import Directions, QuadraticForms
from hvpflow.curvature.reference import jvp_of_grad

__all__ = ["Directions", "Engine", "QuadraticForms", "choose_num_directions", "make_engine"]

Engine = Callable[[Tensor, Tensor, Directions], QuadraticForms]


def make_engine(
    model: nn.Module,
    example: tuple[Tensor, Tensor],
    *,
    kind: Literal["taylor", "jvp-of-grad"] = "taylor",
    amp: bool = False,
    compile_rules: bool = False,
) -> Engine:
    """Return the function (tokens [B, T], targets [B, T], directions) -> QuadraticForms for ``model``."""

    def engine(tokens: Tensor, targets: Tensor, directions: Directions) -> QuadraticForms:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=amp):
            return jvp_of_grad(model, tokens, targets, directions)

    return engine


def choose_num_directions(model: nn.Module, batch_size: int, length: int, *, memory_bytes: int) -> int:
    """Return the number of directions per pass that fits ``memory_bytes``."""
    return 8
