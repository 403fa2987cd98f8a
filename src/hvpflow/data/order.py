"""From a seed to the order in which sequences are read: two pure functions, one for each loader version.

Version 1 shuffles ranges of a fixed number of blocks, and the ranges among themselves; the order depends on how many
blocks are read in all. Version 2 shuffles within groups of whole shards that follow one another in file order; the
order of the first blocks does not depend on how many are read.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def random_stream(*entropy: int) -> np.random.Generator:
    """NumPy's default generator (PCG64), seeded by a list of integers."""
    return np.random.default_rng(np.random.SeedSequence(list(entropy)))


def derived_seed(*entropy: int) -> int:
    """A 32-bit seed drawn from a list of integers."""
    return int(np.random.SeedSequence(list(entropy)).generate_state(1)[0])


def range_order(num_blocks: int, range_blocks: int, seed: int) -> np.ndarray:
    """Version 1: block ids 0 … ``num_blocks``-1, int64, shuffled in ranges of ``range_blocks`` blocks.

    Ranges are visited in a random order (entropy [seed, 0]); the rows of range r in a random order of their own
    (entropy [seed, 1, r]). Only the range at the end of the ids may be short.
    """
    num_ranges = -(-num_blocks // range_blocks)
    pieces = []
    for index in random_stream(seed, 0).permutation(num_ranges).tolist():
        first = index * range_blocks
        size = min(range_blocks, num_blocks - first)
        pieces.append(first + random_stream(seed, 1, index).permutation(size))
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def complete_groups(shard_offsets: np.ndarray, group_size: int, length: int) -> Iterator[tuple[int, int]]:
    """Version 2: (first block, end block) of each complete shuffle group, in file order.

    A group is ``group_size`` consecutive shards and owns the blocks whose first token lies in it. It is complete when
    all its shards exist and its last block can be read whole; the enumeration stops before the first that is not.

    Args:
        shard_offsets: int64 [num_shards + 1], tokens before each shard, and the total.
        group_size: shards in a group.
        length: tokens from one block's start to the next's.
    """
    total = int(shard_offsets[-1])
    for start in range(0, len(shard_offsets) - group_size, group_size):
        first = -(-int(shard_offsets[start]) // length)
        end = -(-int(shard_offsets[start + group_size]) // length)
        if end * length + 1 > total:
            return
        yield first, end


def group_order(
    shard_offsets: np.ndarray, group_size: int, length: int, num_blocks: int, seed: int
) -> tuple[np.ndarray, int] | None:
    """Version 2: the first ``num_blocks`` block ids of the order, int64, and the end block of the last group they use.

    Rows of group g come in a random order of their own (entropy [seed, 1, g]). The last group is shuffled whole and
    then cut, so a larger ``num_blocks`` only appends. None where the complete groups hold fewer blocks.
    """
    pieces, available = [], 0
    for index, (first, end) in enumerate(complete_groups(shard_offsets, group_size, length)):
        pieces.append(first + random_stream(seed, 1, index).permutation(end - first))
        available = end
        if available >= num_blocks:
            return np.concatenate(pieces)[:num_blocks], end
    return None


def shard_offsets_from(shard_offsets: np.ndarray, start_token: int) -> np.ndarray:
    """Shard offsets relative to ``start_token``: the shard in which it lies comes first, however much of it is cut."""
    rest = shard_offsets[shard_offsets > start_token] - start_token
    return np.concatenate([np.zeros(1, dtype=np.int64), rest])
