"""The two orders of sequences, against an independent reading of their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvpflow.data.order import (
    complete_groups,
    derived_seed,
    group_order,
    random_stream,
    range_order,
    shard_offsets_from,
)


def offsets_of(total: int, shard_tokens: int) -> np.ndarray:
    return np.array([*range(0, total, shard_tokens), total], dtype=np.int64)


def test_golden_orders() -> None:
    assert derived_seed(42, 2) == 955475868
    assert range_order(10, 4, 42).tolist() == [9, 8, 7, 4, 6, 5, 0, 3, 2, 1]
    found = group_order(offsets_of(100, 20), 2, 6, 9, 42)
    assert found is not None
    assert found[1] == 14
    assert found[0].tolist() == [0, 4, 6, 1, 2, 3, 5, 10, 7]


@given(blocks=st.integers(1, 200), size=st.integers(1, 60), seed=st.integers(0, 2**32 - 1))
def test_ranges_are_a_permutation_of_whole_ranges(blocks: int, size: int, seed: int) -> None:
    order = range_order(blocks, size, seed)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(blocks))
    visited = [block // size for block in order.tolist()]
    changes = [index for index in range(1, blocks) if visited[index] != visited[index - 1]]
    assert len(changes) == -(-blocks // size) - 1
    first_range = visited[0]
    expected = first_range * size + random_stream(seed, 1, first_range).permutation(
        min(size, blocks - first_range * size)
    )
    assert order[: len(expected)].tolist() == expected.tolist()


@given(total=st.integers(2, 400), shard=st.integers(1, 90), group=st.integers(1, 4), length=st.integers(1, 40))
def test_groups_own_the_blocks_that_start_in_them(total: int, shard: int, group: int, length: int) -> None:
    offsets = offsets_of(total, shard)
    groups = list(complete_groups(offsets, group, length))
    for number, (first, end) in enumerate(groups):
        low, high = number * group * shard, min((number + 1) * group * shard, total)
        owned = [block for block in range(total) if low <= block * length < high]
        assert list(range(first, end)) == owned
        assert end * length + 1 <= total
    following = (len(groups) + 1) * group * shard
    assert following > total or -(-following // length) * length + 1 > total


@given(
    total=st.integers(50, 600),
    shard=st.integers(5, 90),
    group=st.integers(1, 3),
    length=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_smaller_budget_reads_a_prefix(total: int, shard: int, group: int, length: int, seed: int) -> None:
    offsets = offsets_of(total, shard)
    groups = list(complete_groups(offsets, group, length))
    available = groups[-1][1] if groups else 0
    assert group_order(offsets, group, length, available + 1, seed) is None
    if not available:
        return
    whole = group_order(offsets, group, length, available, seed)
    assert whole is not None
    assert sorted(whole[0].tolist()) == list(range(available))
    for budget in {1, available // 2 + 1, available}:
        part = group_order(offsets, group, length, budget, seed)
        assert part is not None
        assert part[0].tolist() == whole[0][:budget].tolist()
        assert part[1] == next(end for _, end in groups if end >= budget)


@pytest.mark.parametrize(
    ("start", "expected"),
    [(0, [0, 10, 20, 25]), (10, [0, 10, 15]), (12, [0, 8, 13]), (19, [0, 1, 6]), (24, [0, 1])],
)
def test_a_cut_shard_still_counts(start: int, expected: list[int]) -> None:
    assert shard_offsets_from(np.array([0, 10, 20, 25]), start).tolist() == expected
