"""Memory does not drift: after thousands of batches a pass and a training hold what they held after the first few."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults_cases import TALLY

from hvpflow.curvature.gradient import add_gradient
from hvpflow.curvature.quadratic import make_engine
from hvpflow.data.epochs import Epoch
from hvpflow.measure.batches import EpochReader
from hvpflow.measure.epoch_pass import PartialSums, run_pass
from hvpflow.measure.progress import Progress
from hvpflow.measure.store import Store
from hvpflow.models.config import LlamaConfig
from hvpflow.models.llama import Llama
from hvpflow.runs.recipe import recipe_from_mapping
from hvpflow.training.learner import SingleLearner

MODEL = {"vocab_size": 64, "layers": 2, "width": 16, "heads": 2, "ffn_width": 24, "context_length": 16}
BATCH, DIRECTIONS = 4, 3
SLACK_BYTES = 4 * 2**20
"""What the allocator may take besides. One leaked batch of activations is about 100 kB, so 100 of them are seen."""


def resident_bytes() -> int:
    with Path("/proc/self/statm").open(encoding="ascii") as handle:
        return int(handle.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_tensors() -> tuple[int, int]:
    """Number and bytes of all tensors that Python can reach and that the test itself made."""
    gc.collect()
    found = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return len(found), sum(tensor.numel() * tensor.element_size() for tensor in found)


@pytest.fixture(autouse=True)
def _only_what_this_test_makes() -> Iterator[None]:
    """What earlier tests of the process left, compiled graphs with symbolic sizes among it, is not looked at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Watch:
    """Looks at memory every so many batches, as the stop question of a pass."""

    def __init__(self, every: int) -> None:
        self.every, self.calls = every, 0
        self.tensors: list[tuple[int, int]] = []
        self.resident: list[int] = []

    def __call__(self) -> bool:
        self.calls += 1
        if self.calls % self.every == 0:
            self.tensors.append(live_tensors())
            self.resident.append(resident_bytes())
        return False

    def check(self) -> None:
        first = len(self.tensors) // 4  # the allocator and lazily made parts have settled by then
        assert len(self.tensors) >= 8
        assert set(self.tensors[first:]) == {self.tensors[first]}, self.tensors
        growth = max(self.resident[first:]) - self.resident[first]
        assert growth <= SLACK_BYTES, f"{growth} bytes more in {self.calls} batches: {self.resident}"


class RandomSplit:
    """Stands for a token cache that never ends."""

    def read_blocks(self, block_ids: np.ndarray, length: int) -> np.ndarray:
        return np.random.default_rng(int(block_ids[0])).integers(0, MODEL["vocab_size"], (len(block_ids), length + 1))


def make_reader(batches: int) -> EpochReader:
    epoch = Epoch(
        case="seen",
        block_ids=np.arange(batches * BATCH),
        batch_blocks=BATCH,
        num_workers=1,
        context_length=MODEL["context_length"],
        identity={},
    )
    return EpochReader(epoch=epoch, split=RandomSplit(), device=torch.device("cpu"))  # type: ignore[arg-type]


LENGTHS = [pytest.param(400, id="short"), pytest.param(3_000, marks=pytest.mark.slow, id="long")]


@pytest.mark.parametrize("batches", LENGTHS)
@pytest.mark.parametrize("kind", ["taylor", pytest.param("jvp-of-grad", marks=pytest.mark.slow)])
def test_a_pass_over_many_batches(tmp_path: Path, kind: Any, batches: int) -> None:
    batches //= 1 if kind == "taylor" else 5  # the other engine is that much slower
    model = Llama(LlamaConfig(**MODEL)).eval()
    reader = make_reader(batches)
    engine = make_engine(model, reader.read_padded(reader.epoch.block_ids[:BATCH], BATCH), kind=kind)
    directions = {name: torch.randn(DIRECTIONS, *value.shape) for name, value in model.named_parameters()}
    watch = Watch(every=batches // 20)
    run_pass(
        engine,
        reader,
        directions,
        [str(number) for number in range(DIRECTIONS)],
        batch_size=BATCH,
        partial=PartialSums(Store(tmp_path).context({}), "partial", {}, list(range(DIRECTIONS))),
        save_seconds=0.0,
        stop=watch,
        progress=Progress(lambda line: None, "soak", total_tokens=reader.epoch.num_tokens),
        label="soak",
    )
    assert watch.calls == batches
    watch.check()
    TALLY[f"batches of a pass watched for drifting memory ({kind})"] += batches


@pytest.mark.parametrize("batches", LENGTHS)
def test_many_gradients_and_updates(batches: int) -> None:
    training = {"tokens_per_parameters": 2.0, "epoch_tokens_per_parameters": 0.5, "batch_tokens": 64}
    runtime = {"device": "cpu", "amp": False}
    mapping = {"model": MODEL, "runtime": runtime, "training": training | {"micro_batch_size": BATCH}}
    recipe = recipe_from_mapping(mapping)
    learner = SingleLearner(recipe, torch.device("cpu"))
    reader, watch = make_reader(batches), Watch(every=batches // 20)
    into = {name: torch.zeros_like(value) for name, value in learner.model().named_parameters()}
    for number in range(batches):
        tokens, targets = reader.read(reader.epoch.block_ids[number * BATCH : (number + 1) * BATCH])
        learner.update(tokens, targets, 1e-3, number + 1)
        add_gradient(learner.model(), tokens, targets, into, scale=1.0)
        watch()
    watch.check()
    TALLY["updates watched for drifting memory"] += batches
