"""ḡ, the gradient of the token-mean loss over the full epoch, and the gradients of single batches.

Both add up microbatch gradients in the parameters' own precision, each scaled by one over the tokens of the whole
set before it is added. Legend: B sequences, T positions, D parameters.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from hvpflow.curvature.gradient import add_gradient
from hvpflow.errors import HvpflowError
from hvpflow.interruption import Interrupted
from hvpflow.measure.batches import EpochReader, chunks, num_chunks
from hvpflow.measure.progress import Progress
from hvpflow.measure.vectors import Vector, load_vector, save_vector, trainable, zeros_like

_SAVE_SHARE = 20
"""Saving partial sums may take one part in this many of the time."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeanGradient:
    """ḡ and the epoch's mean loss."""

    vector: Vector
    loss: float
    seconds: float


def batch_gradient(
    model: nn.Module, reader: EpochReader, block_ids: np.ndarray, into: Vector, *, micro_batch_size: int, amp: bool
) -> None:
    """Add the gradient of these blocks' token-mean loss to ``into``."""
    scale = 1 / (len(block_ids) * reader.epoch.context_length)
    for piece in chunks(block_ids, micro_batch_size):
        add_gradient(model, *reader.read(piece), into, scale=scale, amp=amp)


def compute_mean_gradient(
    model: nn.Module,
    reader: EpochReader,
    *,
    micro_batch_size: int,
    amp: bool,
    partial_path: Path,
    partial_key: str,
    save_seconds: float,
    stop: Callable[[], bool],
    report: Callable[[str], None],
    label: str,
) -> MeanGradient:
    """Compute ḡ, continuing from partial sums that an interrupted worker left under the same ``partial_key``.

    Raises:
        HvpflowError: a loss or gradient that is not finite.
        Interrupted: ``stop`` said so; the partial sums are saved.
    """
    epoch, parameters = reader.epoch, trainable(model)
    into = zeros_like(parameters)
    summed_loss, spent, first = 0.0, 0.0, 0
    try:
        found = load_vector(partial_path, into)
    except ValueError as error:
        report(f"damaged partial sums of a mean gradient, started again: {error}")
        found = None
    if found is not None and found[1].get("key") == partial_key:
        into, metadata = found
        first, summed_loss, spent = int(metadata["next"]), float(metadata["loss"]), float(metadata["seconds"])
    started = last_save = time.monotonic()
    save_cost = 0.0
    total = num_chunks(epoch.block_ids, micro_batch_size)
    progress = Progress(report, f"{label}: mean gradient", total_tokens=epoch.num_tokens)
    progress.skip(first * micro_batch_size * epoch.context_length)
    scale = 1 / epoch.num_tokens
    for number in range(first, total):
        now = time.monotonic()
        stopping = stop()
        if stopping or (number > first and now - last_save >= max(save_seconds, _SAVE_SHARE * save_cost)):
            metadata = {"key": partial_key, "next": str(number), "loss": repr(summed_loss)}
            save_vector(partial_path, into, {**metadata, "seconds": repr(spent + now - started)})
            last_save = time.monotonic()
            save_cost = last_save - now
        if stopping:
            raise Interrupted(f"{label}: stopped by a signal in the mean gradient; repeat the command to continue")
        piece = epoch.block_ids[number * micro_batch_size : (number + 1) * micro_batch_size]
        loss = add_gradient(model, *reader.read(piece), into, scale=scale, amp=amp)
        if not math.isfinite(loss):
            raise HvpflowError(
                f"{label}: the loss of sequences {_named(piece)} is {loss}; the weights cannot be measured"
            )
        summed_loss += loss
        progress.advance(len(piece) * epoch.context_length)
    for name, tensor in into.items():
        if not bool(torch.isfinite(tensor).all()):
            raise HvpflowError(f"{label}: the mean gradient is not finite in {name}; the weights cannot be measured")
    return MeanGradient(vector=into, loss=summed_loss / epoch.num_tokens, seconds=spent + time.monotonic() - started)


def _named(block_ids: np.ndarray) -> str:
    return ", ".join(str(block) for block in block_ids[:4]) + (" …" if len(block_ids) > 4 else "")
