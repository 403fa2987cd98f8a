"""Consensus errors e_w = x_w − x̄: how one worker's parameters differ from the published average."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hvpflow.measure.vectors import Vector, squared_norm


def fill_consensus(worker: Mapping[str, Tensor], average: Mapping[str, Tensor], into: Vector) -> float:
    """Make ``into`` the consensus error and return ‖e_w‖².

    Both states are float32 (the average was taken in float32) and are cast to the precision of ``into`` before they
    are subtracted.
    """
    for name, tensor in into.items():
        tensor.copy_(worker[name]).sub_(average[name].to(tensor))
    return squared_norm(into)
