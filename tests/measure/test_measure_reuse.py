"""What is measured once is not measured again, and what differs in anything is."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from measure_cases import CHECKPOINT, make_run, measure, without_times

from hvpflow.data.cache import TokenCache
from hvpflow.measure import records, session, worker
from hvpflow.runs.run import Run, open_run

BASE: dict[str, Any] = {"engine": "jvp-of-grad", "directions_per_pass": 2, "hvp_batch_size": 5}
BATCHES = 3  # of 5, 5 and 2 sequences
CHECK = 1  # engine call of the start-up check


class Counter:
    """Engine calls and mean gradients since the last ``take``."""

    def __init__(self) -> None:
        self.engine = self.mean = 0

    def take(self) -> tuple[int, int]:
        counts = (self.engine, self.mean)
        self.engine = self.mean = 0
        return counts


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    counter = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            setattr(counter, name, getattr(counter, name) + 1)
            return function(*arguments, **options)

        return wrapper

    make_engine = session.make_engine
    monkeypatch.setattr(session, "make_engine", lambda *a, **o: counted("engine", make_engine(*a, **o)))
    monkeypatch.setattr(worker, "compute_mean_gradient", counted("mean", worker.compute_mean_gradient))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield counter
    torch.set_num_threads(threads)


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Run, TokenCache]:
    return make_run(tmp_path)


def test_a_repeated_measurement_computes_nothing(
    tiny: tuple[Run, TokenCache], tmp_path: Path, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cache = tiny
    first = measure(run, cache, tmp_path / "store", **BASE)
    assert counter.take() == (CHECK + 3 * BATCHES, 1)  # 3 + 2 directions are stacks of 2, 2 and 1
    (run.directory / CHECKPOINT).touch()
    shutil.move(tmp_path / "store", tmp_path / "elsewhere")
    monkeypatch.setattr(session, "Llama", None)  # not even the model is built
    again = measure(run, cache, tmp_path / "elsewhere", **BASE)
    assert counter.take() == (0, 0)
    assert without_times(again) == without_times(first)
    assert again["timing"]["total_seconds"] == first["timing"]["total_seconds"]


def test_more_directions_cost_no_repeated_pass(tiny: tuple[Run, TokenCache], tmp_path: Path, counter: Counter) -> None:
    run, cache = tiny
    few = measure(run, cache, tmp_path / "store", **BASE, noise_samples=2)
    counter.take()
    more = measure(run, cache, tmp_path / "store", **BASE, noise_samples=2, random_samples=6)
    assert counter.take() == (CHECK + 2 * BATCHES, 0)
    assert without_times(more["noise"]) == without_times(few["noise"])
    assert without_times(more["random"][:2]) == without_times(few["random"])
    # Removed when the noise was complete, the mean gradient is computed again for more of it: the same bits on a CPU.
    everything = measure(run, cache, tmp_path / "store", **BASE, noise_samples="all", random_samples=6)
    assert counter.take() == (CHECK + 2 * BATCHES, 1)  # [n0 n1] [n2 n3]: one of each pair is new
    assert everything["mean_gradient"]["sha256"] == few["mean_gradient"]["sha256"]
    kept = {row["batch_index"]: row for row in everything["noise"]}
    assert without_times([kept[row["batch_index"]] for row in few["noise"]]) == without_times(few["noise"])
    fewer = measure(run, cache, tmp_path / "store", **BASE, noise_samples=1, random_samples=1)
    assert counter.take() == (0, 0)
    assert without_times(fewer["random"]) == without_times(few["random"][:1])


def test_the_mean_gradient_is_kept_until_all_noise_is_done(
    tiny: tuple[Run, TokenCache], tmp_path: Path, counter: Counter
) -> None:
    run, cache = tiny
    options = BASE | {"noise_samples": 4, "random_samples": 2, "num_shards": 3}
    kept = lambda: len(list((tmp_path / "store").glob("*/mean-gradient-*.safetensors")))  # noqa: E731
    records_ = []
    for shard, (engine, mean, left) in enumerate([(1, 1, 1), (1, 0, 0), (1, 0, 0)]):
        records_.append(measure(run, cache, tmp_path / "store", **options, shard=shard))
        assert counter.take() == (CHECK + engine * BATCHES, mean)
        assert kept() == left
    assert [row["batch_index"] for record in records_ for row in record["noise"]] == [0, 1, 2, 3]
    assert records_[2]["mean_gradient"] is None
    whole = measure(run, cache, tmp_path / "store", **options | {"num_shards": 1})
    assert counter.take() == (0, 0)
    assert without_times(whole["noise"]) == without_times([row for record in records_ for row in record["noise"]])
    assert len({record["identity"] for record in [*records_, whole]}) == 4


def test_whatever_differs_is_measured_afresh(
    tiny: tuple[Run, TokenCache], tmp_path: Path, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cache = tiny
    store = tmp_path / "store"
    base = measure(run, cache, store, **BASE)
    whole = counter.take()

    def changed(**options: Any) -> dict[str, Any]:
        record = measure(run, cache, store, options.pop("case", "seen"), **BASE | options)
        assert counter.take() == whole
        assert record["identity"] != base["identity"]
        return record

    changed(case="unseen")
    changed(dtype="float32")
    changed(hvp_batch_size=4)
    assert measure(run, cache, store, **BASE, seed=1)["random"] != base["random"]
    counter.take()

    # A model section that leaves no trace in the weights.
    text = (run.directory / "resolved.yaml").read_text()
    for old, new in (
        ("heads: 2", "heads: 1"),
        ("rope_theta: 10000.0", "rope_theta: 9999.0"),
        ("norm_eps: 1.0e-05", "norm_eps: 1.0e-04"),
    ):
        assert old in text
        (run.directory / "resolved.yaml").write_text(text.replace(old, new))
        run = open_run(run.directory)
        assert changed()["random"][0]["quadratic"] != base["random"][0]["quadratic"]
    (run.directory / "resolved.yaml").write_text(text)
    run = open_run(run.directory)

    monkeypatch.setattr(records, "MEASUREMENT_VERSION", 0)
    changed()
    monkeypatch.undo()

    weights = safetensors.torch.load_file(run.directory / CHECKPOINT)
    weights["norm.weight"][0] += 1e-6
    safetensors.torch.save_file(weights, run.directory / CHECKPOINT)
    altered = measure(run, cache, store, **BASE)
    assert altered["random"][0]["quadratic"] != base["random"][0]["quadratic"]


def test_states_with_one_average_share_all_but_the_consensus(tmp_path: Path, counter: Counter) -> None:
    run, cache = make_run(tmp_path, workers=2)
    options = BASE | {"noise_samples": 1, "random_samples": 1}
    first = measure(run, cache, tmp_path / "store", **options)
    counter.take()
    nodes = [run.directory / f"node-00{worker}" for worker in range(2)]
    swapped = run.directory / "swapped"
    nodes[0].rename(swapped)
    nodes[1].rename(nodes[0])
    swapped.rename(nodes[1])
    second = measure(run, cache, tmp_path / "store", **options)
    assert counter.take() == (CHECK + BATCHES, 0)
    assert second["weights_hash"] == first["weights_hash"]
    assert second["result_key"] != first["result_key"]
    assert without_times(second["noise"]) == without_times(first["noise"])
    assert second["consensus"][0]["quadratic"] == pytest.approx(first["consensus"][1]["quadratic"], rel=1e-12)
    without = measure(run, cache, tmp_path / "store", **options, consensus=False)
    assert counter.take() == (0, 0)
    assert without["consensus"] is None
    assert without["result_key"] == without["weights_hash"]


def test_every_damaged_entry_is_computed_again_to_the_same_bits(
    tiny: tuple[Run, TokenCache], tmp_path: Path, counter: Counter
) -> None:
    run, cache = tiny
    store = tmp_path / "store"
    undisturbed = without_times(measure(run, cache, store, **BASE))
    counter.take()
    entries = sorted(store.glob("*/*.json"))
    assert len(entries) == 7  # five directions, the mean gradient, the engine check
    for entry in entries:
        lines: list[str] = []
        content = bytearray(entry.read_bytes())
        position = content.index(b'"value"') + len(content) // 4
        content[position] ^= 1
        entry.write_bytes(content)
        assert without_times(measure(run, cache, store, **BASE, progress=lines.append)) == undisturbed
        assert sum("damaged" in line for line in lines) == 1
        assert sum(counter.take()) > 0
    assert without_times(measure(run, cache, store, **BASE)) == undisturbed
    assert counter.take() == (0, 0)


def test_finished_work_of_another_machine_is_used_and_said(
    tiny: tuple[Run, TokenCache], tmp_path: Path, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cache = tiny
    few = measure(run, cache, tmp_path / "store", **BASE)
    counter.take()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    more = measure(run, cache, tmp_path / "store", **BASE, random_samples=4)
    assert counter.take() == (CHECK + 2 * BATCHES, 0)  # [n0 n1] [n2 r0] [r1 r2] [r3 -]
    assert more["policy"] == few["policy"]
    assert [policy["threads"] for policy in more["other_policies"]] == [64]


def test_no_tensor_outlives_its_batch(
    tiny: tuple[Run, TokenCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []
    make_engine = session.make_engine

    def counting(*arguments: Any, **options: Any) -> Callable[..., Any]:
        engine = make_engine(*arguments, **options)

        def count_and_call(*inputs: Any) -> Any:
            gc.collect()
            alive.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
            return engine(*inputs)

        return count_and_call

    monkeypatch.setattr(session, "make_engine", counting)
    gc.freeze()  # what was there before is not looked at
    try:
        measure(*tiny, tmp_path / "store", noise_samples=3, random_samples=1, hvp_batch_size=1, directions_per_pass=2)
    finally:
        gc.unfreeze()
    passes = alive[CHECK:]
    assert len(passes) == 2 * 12
    assert max(passes[2:12]) == min(passes[2:12])
    assert max(passes[12:]) <= max(passes[:12])
