"""How directions are made, numbered, cut into shards and stacked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvpflow.errors import HvpflowError
from hvpflow.measure import random as measure_random
from hvpflow.measure.consensus import fill_consensus
from hvpflow.measure.random import check_rademacher_stream, rademacher
from hvpflow.measure.stacks import case_directions, cut_shard, cut_stacks
from hvpflow.measure.vectors import squared_norm, vector_hash

SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 2, 40)}


@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), index=st.integers(0, 100))
def test_signs_are_the_low_bits_of_a_mersenne_twister(seed: int, index: int) -> None:
    drawn = rademacher(SHAPES, seed=seed, index=index, dtype=torch.float32)
    state = np.random.SeedSequence([seed, 3, index]).generate_state(1)[0]
    total = sum(tensor.numel() for tensor in drawn.values())
    bits = np.random.RandomState(state).randint(0, 2**32, total, dtype=np.uint32) & 1
    assert np.array_equal(torch.cat([tensor.reshape(-1) for tensor in drawn.values()]), bits * 2.0 - 1)
    assert {name: tuple(tensor.shape) for name, tensor in drawn.items()} == SHAPES


def test_a_changed_generator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_rademacher_stream()
    monkeypatch.setattr(
        measure_random, "rademacher", lambda shapes, **options: rademacher(shapes, **(options | {"index": 1}))
    )
    with pytest.raises(HvpflowError, match="other random bits"):
        check_rademacher_stream()


def test_consensus_errors_are_taken_in_the_precision_of_the_direction() -> None:
    worker, average = {"w": torch.tensor([1.0, 3.0])}, {"w": torch.tensor([1.0, 3.0]) + 2**-22}
    into = {"w": torch.zeros(2, dtype=torch.float64)}
    norm_squared = fill_consensus(worker, average, into)
    difference = worker["w"].double() - average["w"].double()
    assert torch.equal(into["w"], difference)
    assert norm_squared == float(difference @ difference)


def test_norms_add_up_in_float64() -> None:
    # In float32 the many small squares vanish beside the large one.
    vector = {"large": torch.tensor([1e4]), "small": torch.full((1000,), 0.5)}
    assert squared_norm(vector) == 1e8 + 250


def test_hashes_see_names_types_shapes_and_bits() -> None:
    base = {"a": torch.zeros(4), "b": torch.ones(2)}
    others = [
        {"a": torch.zeros(4), "c": torch.ones(2)},
        {"a": torch.zeros(2, 2), "b": torch.ones(2)},
        {"a": torch.zeros(4, dtype=torch.float64), "b": torch.ones(2)},
        {"a": torch.tensor([0.0, 0.0, 0.0, -0.0]), "b": torch.ones(2)},
    ]
    assert len({vector_hash(vector) for vector in [base, *others]}) == 5
    assert vector_hash(dict(reversed(base.items()))) == vector_hash(base)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9), st.integers(1, 12))
def test_shards_cut_the_directions_in_order(noise: int, randoms: int, workers: int, num_shards: int) -> None:
    directions = case_directions(range(0, 2 * noise, 2), randoms, workers)
    shards = [cut_shard(directions, shard, num_shards) for shard in range(num_shards)]
    assert [direction for shard in shards for direction in shard] == directions
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert [direction.kind for direction in directions] == ["noise"] * noise + ["random"] * randoms + [
        "consensus"
    ] * workers


@pytest.mark.parametrize("shard", [-1, 2])
def test_a_shard_that_does_not_exist_is_refused(shard: int) -> None:
    with pytest.raises(HvpflowError, match=rf"shard {shard} does not exist: 2 shard"):
        cut_shard(case_directions([0], 1, 0), shard, 2)


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 20))
def test_stacks_are_equal_and_as_few_as_possible(count: int, per_pass: int) -> None:
    directions = case_directions([], count, 0)
    stacks = cut_stacks(directions, per_pass)
    assert [direction for stack in stacks for direction in stack if direction is not None] == directions
    assert len(stacks) == -(-count // per_pass)
    assert len({len(stack) for stack in stacks}) <= 1
    assert all(len(stack) <= per_pass for stack in stacks)
    assert sum(direction is None for stack in stacks for direction in stack) < max(len(stacks), 1)
