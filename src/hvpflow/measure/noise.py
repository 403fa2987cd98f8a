"""Noise directions vᵢ = gᵢ − ḡ: how one effective batch's gradient differs from the epoch's."""

from __future__ import annotations

import math

import numpy as np
from torch import nn

from hvpflow.measure.batches import EpochReader
from hvpflow.measure.mean_gradient import batch_gradient
from hvpflow.measure.vectors import Vector, squared_norm


def fill_noise(
    model: nn.Module,
    reader: EpochReader,
    block_ids: np.ndarray,
    mean: Vector,
    into: Vector,
    *,
    micro_batch_size: int,
    amp: bool,
) -> tuple[float, float]:
    """Make ``into``, a zero vector, the noise of one sample; return ‖gᵢ‖ and ‖vᵢ‖².

    gᵢ is the gradient of the token-mean loss of ``block_ids`` (a batch; in packed runs one worker's rows of it), in
    the parameters' precision, as ḡ is.
    """
    batch_gradient(model, reader, block_ids, into, micro_batch_size=micro_batch_size, amp=amp)
    gradient_norm = math.sqrt(squared_norm(into))
    for name, tensor in into.items():
        tensor.sub_(mean[name])
    return gradient_norm, squared_norm(into)
