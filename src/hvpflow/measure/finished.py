"""Which directions of a (checkpoint, case) are finished: each direction's place in the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from hvpflow.data.epochs import Epoch
from hvpflow.measure.stacks import Direction
from hvpflow.measure.store import Context


@dataclasses.dataclass(kw_only=True)
class FinishedWork:
    """The store's view of one (checkpoint, case)."""

    context: Context
    epoch: Epoch
    seed: int
    worker_hashes: Sequence[str] | None
    mean_hash: str = ""
    """Hash of ḡ, on whose bits every noise direction depends; empty until it is known."""

    def entry(self, direction: Direction) -> tuple[str, dict[str, Any]]:
        """Name and key of a direction's entry: everything that decides its numbers beside the context."""
        index = direction.index
        if direction.kind == "noise":
            # The seed decides which samples are drawn, not what a sample is.
            batch, mean = self.epoch.sample_batch(index), self.mean_hash
            key = {"direction": "noise", "index": index, "batch": batch, "mean_gradient": mean}
            return f"noise-{index}-{mean[:16]}", key
        if direction.kind == "random":
            return f"random-{self.seed}-{index}", {"direction": "random", "seed": self.seed, "index": index}
        assert self.worker_hashes is not None
        worker_hash = self.worker_hashes[index]
        key = {"direction": "consensus", "worker": index, "weights_hash": worker_hash}
        return f"consensus-{index}-{worker_hash[:16]}", key

    def get(self, direction: Direction) -> dict[str, Any] | None:
        """What is known of a finished direction; None where it is not finished, or its entry is damaged."""
        return self.context.get(*self.entry(direction))

    def put(self, direction: Direction, value: dict[str, Any]) -> None:
        """Keep a finished direction."""
        self.context.put(*self.entry(direction), value)

    def pending(self, directions: Iterable[Direction | None]) -> list[Direction]:
        """Those that are not finished."""
        return [direction for direction in directions if direction is not None and self.get(direction) is None]
