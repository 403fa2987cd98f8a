"""One pass over the epoch for a stack of directions: Σ over curvature batches of vᵀHv, in float64, resumable.

Legend: B sequences, T positions, K directions. H is the Hessian of the *summed* loss here; dividing by the epoch's
tokens comes last.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvpflow.curvature.quadratic import Directions, Engine
from hvpflow.errors import HvpflowError
from hvpflow.interruption import Interrupted
from hvpflow.measure.batches import EpochReader, num_chunks
from hvpflow.measure.progress import Progress
from hvpflow.measure.store import Context


@dataclasses.dataclass(kw_only=True, slots=True)
class PassSums:
    """Sums over the batches before ``next_batch``, by position in the stack."""

    next_batch: int
    total: list[float]
    gauss_newton: list[float]
    seconds: float


class PartialSums:
    """Where a running pass keeps its sums, so that another worker can go on.

    The key holds whatever may change a rounding error: members and their positions, batch size, threads, device.
    """

    def __init__(self, context: Context, name: str, key: Mapping[str, Any], needed: Sequence[int]) -> None:
        self._context, self._name, self._key, self._needed = context, name, key, list(needed)

    def load(self) -> PassSums | None:
        """Kept sums, unless they miss a needed position (it was finished then and its entry is lost now)."""
        kept = self._context.get(self._name, self._key)
        if kept is None or not set(self._needed) <= set(kept["members"]):
            return None
        return PassSums(
            next_batch=kept["next_batch"],
            total=kept["total"],
            gauss_newton=kept["gauss_newton"],
            seconds=kept["seconds"],
        )

    def save(self, sums: PassSums) -> None:
        self._context.put(self._name, self._key, {"members": self._needed, **dataclasses.asdict(sums)})

    def remove(self) -> None:
        self._context.remove(self._name)


def run_pass(
    engine: Engine,
    reader: EpochReader,
    directions: Directions,
    names: Sequence[str],
    *,
    batch_size: int,
    partial: PartialSums,
    save_seconds: float,
    stop: Callable[[], bool],
    progress: Progress,
    label: str,
) -> PassSums:
    """Return the sums over the whole epoch; ``names`` are the K members' names for messages.

    Raises:
        HvpflowError: a quadratic form that is not finite.
        Interrupted: ``stop`` said so; the sums so far are saved.
    """
    block_ids, length = reader.epoch.block_ids, reader.epoch.context_length
    sums = partial.load() or PassSums(
        next_batch=0, total=[0.0] * len(names), gauss_newton=[0.0] * len(names), seconds=0.0
    )
    total = torch.tensor(sums.total, dtype=torch.float64)
    gauss_newton = torch.tensor(sums.gauss_newton, dtype=torch.float64)
    started = last_save = time.monotonic()
    before, first = sums.seconds, sums.next_batch
    progress.skip(min(first * batch_size, len(block_ids)) * length)

    def snapshot(next_batch: int) -> PassSums:
        seconds = before + time.monotonic() - started
        return PassSums(
            next_batch=next_batch, total=total.tolist(), gauss_newton=gauss_newton.tolist(), seconds=seconds
        )

    num_batches = num_chunks(block_ids, batch_size)
    for number in range(first, num_batches):
        stopping = stop()
        if stopping or (number > first and time.monotonic() - last_save >= save_seconds):
            partial.save(snapshot(number))
            last_save = time.monotonic()
        if stopping:
            raise Interrupted(f"{label}: stopped by a signal after saving; repeat the command to continue")
        piece = block_ids[number * batch_size : (number + 1) * batch_size]
        forms = engine(*reader.read_padded(piece, batch_size), directions)
        _check_finite(forms.total, names, f"{label}, curvature batch {number}")
        _check_finite(forms.gauss_newton, names, f"{label}, curvature batch {number}, Gauss-Newton part")
        total += forms.total.cpu()
        gauss_newton += forms.gauss_newton.cpu()
        progress.advance(len(piece) * length)
    sums = snapshot(num_batches)
    # Kept until the members' own entries are written, which is the caller's next step.
    partial.save(sums)
    return sums


def _check_finite(values: torch.Tensor, names: Sequence[str], where: str) -> None:
    bad = [name for name, value in zip(names, values.tolist()) if value != value or abs(value) == float("inf")]
    if bad:
        raise HvpflowError(
            f"{where}: the quadratic form of {', '.join(bad)} is not finite; the weights cannot be measured in this "
            "precision (try float64, or amp off)"
        )
