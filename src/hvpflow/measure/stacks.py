"""Which directions a case has, how shards cut them, and which of them share a pass over the epoch. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hvpflow.errors import HvpflowError

Kind = Literal["noise", "random", "consensus"]


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction: a noise sample, a Rademacher vector, or a worker's consensus error, by its number."""

    kind: Kind
    index: int

    def __str__(self) -> str:
        names = {"noise": "noise sample", "random": "random direction", "consensus": "consensus error of worker"}
        return f"{names[self.kind]} {self.index}"


Stack = tuple[Direction | None, ...]
"""The members of one pass by position; None is a zero direction that fills the stack."""


def case_directions(noise_indices: Sequence[int], random_samples: int, num_workers: int) -> list[Direction]:
    """All directions of a case, in the order that shards and stacks count: noise, random, consensus.

    ``num_workers`` is 0 where no consensus errors are measured.
    """
    return [
        *(Direction("noise", int(index)) for index in noise_indices),
        *(Direction("random", index) for index in range(random_samples)),
        *(Direction("consensus", worker) for worker in range(num_workers)),
    ]


def cut_shard(directions: Sequence[Direction], shard: int, num_shards: int) -> list[Direction]:
    """The contiguous slice that shard ``shard`` (from 0) of ``num_shards`` measures; lengths differ by one at most.

    Raises:
        HvpflowError: no such shard.
    """
    if not 0 <= shard < num_shards:
        raise HvpflowError(f"shard {shard} does not exist: {num_shards} shard(s), counted from 0")
    start, end = (len(directions) * number // num_shards for number in (shard, shard + 1))
    return list(directions[start:end])


def cut_stacks(directions: Sequence[Direction], per_pass: int) -> list[Stack]:
    """Cut ``directions`` into equal stacks of at most ``per_pass``, the last one filled up with None.

    The number of passes is the least possible, and stacks are then made as small as it allows: 12 directions at 8 a
    pass are 6 + 6. Members and positions depend on the list alone, never on what is finished already: a rounding
    error may depend on the position, so a continued run must not move a direction.
    """
    if not directions:
        return []
    num_passes = -(-len(directions) // per_pass)
    size = -(-len(directions) // num_passes)
    padded: list[Direction | None] = [*directions, *[None] * (size * num_passes - len(directions))]
    return [tuple(padded[start : start + size]) for start in range(0, len(padded), size)]
