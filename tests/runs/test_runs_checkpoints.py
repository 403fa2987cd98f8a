"""Reading and writing: reference hashes and positions, round trips, determinism, averages."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs_cases import WORKERS, ordinary_state, random_weights, worker_weights

from hvpflow.errors import HvpflowError
from hvpflow.runs import pt_files
from hvpflow.runs.arena import average, pack, storage_layout, storage_size, unpack
from hvpflow.runs.checkpoints import read_checkpoint, result_key, weights_hash
from hvpflow.runs.inspect import inspect_checkpoint
from hvpflow.runs.run import Run, open_run
from hvpflow.runs.safetensors_files import read_metadata, write_safetensors
from hvpflow.runs.state_format import read_training_state, write_training_state

RESULTS = ["ordinary-new-float64", "ordinary-old-float64", "ordinary-old-float32", "packed-old-float64"]


@pytest.mark.parametrize("result", RESULTS)
def test_hashes_and_positions_equal_the_reference(reference: Path, result: str) -> None:
    run = open_run(reference / "runs" / result.rsplit("-", 1)[0])
    entries = json.loads((reference / "results" / result / "manifest.json").read_text())["checkpoints"]
    assert [entry["name"] for entry in entries] == run.checkpoints()
    for entry in entries:
        record = inspect_checkpoint(run, entry["name"])
        assert {key: record[key] for key in ("weights_hash", "tokens", "step", "epoch")} == {
            key: entry[key] for key in ("weights_hash", "tokens", "step", "epoch")
        }
        assert record["result_key"] == entry.get("result_key", entry["weights_hash"])
        assert record["cursor"] * run.recipe.model.context_length == record["tokens"]
        workers = record["workers"] or []
        assert [(w["worker"], w["weights_hash"]) for w in workers] == [
            (w["worker"], w["weights_hash"]) for w in entry.get("workers", [])
        ]
        # The reference's paths start with the run directory's name at that time.
        for ours, theirs in zip(workers, entry.get("workers", []), strict=True):
            assert Path(theirs["path"]).parts[2:] == Path(ours["path"]).parts


def test_packed_reference_without_workers_is_keyed_by_the_average(reference: Path) -> None:
    run = open_run(reference / "runs" / "packed-old")
    for name in ("epoch-001.pt", "epoch-001.safetensors", "final.pt"):
        record = inspect_checkpoint(run, name, workers=False)
        assert record["workers"] is None
        assert record["result_key"] == record["weights_hash"]


def test_formats_of_one_state_agree(packed: Run) -> None:
    export, epoch = (read_checkpoint(packed, name) for name in ("epoch-002.safetensors", "epoch-002.pt"))
    final = read_checkpoint(packed, "final.pt")
    assert (export.format, epoch.format, final.format) == ("safetensors", "packed-epoch", "packed-training-state")
    for checkpoint in (export, epoch, final):
        assert list(checkpoint.weights) == list(packed.recipe.model.parameter_shapes())
        assert weights_hash(checkpoint.weights) == weights_hash(export.weights)
        assert checkpoint.workers is not None
        for read, written in zip(checkpoint.workers, worker_weights(packed.recipe), strict=True):
            assert weights_hash(read) == weights_hash(written)
    assert export.worker_paths == [f"node-{worker:03d}/epoch-002.safetensors" for worker in range(WORKERS)]
    assert epoch.worker_paths == [f"node-{worker:03d}/epoch-002.pt" for worker in range(WORKERS)]
    assert final.worker_paths == ["final.pt"] * WORKERS
    assert (export.cursor, export.step, export.epoch) == (epoch.cursor, epoch.step, epoch.epoch)


def test_position_follows_from_the_epoch(ordinary: Run) -> None:
    boundaries = ordinary.recipe.sampling().boundaries()
    for name, epoch in (("epoch-002.safetensors", 2), ("epoch-002.pt", 2), ("final.pt", 4)):
        record = inspect_checkpoint(ordinary, name)
        assert (record["cursor"], record["tokens"]) == (boundaries[epoch - 1], boundaries[epoch - 1] * 4)
        assert (record["step"], record["epoch"]) == (boundaries[epoch - 1] // 8, epoch)


def test_inspect_records_are_equal_to_the_byte_and_hold_no_absolute_path(packed: Run) -> None:
    texts = {json.dumps(inspect_checkpoint(packed, "epoch-002.pt")) for _ in range(2)}
    assert len(texts) == 1
    assert str(packed.directory) not in texts.pop()


def test_hash_is_the_documented_one() -> None:
    weights = {"b": torch.tensor([1.0, -2.0]), "a": torch.arange(6.0).reshape(2, 3).T}
    content = b"a(torch.float32, (3, 2))" + np.array([[0, 3], [1, 4], [2, 5]], dtype="<f4").tobytes()
    content += b"b(torch.float32, (2,))" + np.array([1, -2], dtype="<f4").tobytes()
    assert weights_hash(weights) == hashlib.sha256(content).hexdigest()


def test_result_key_tells_workers_of_equal_average_apart() -> None:
    keys = {result_key("a", workers) for workers in (None, ["b", "c"], ["c", "b"], ["b"])}
    assert len(keys) == 4
    assert result_key("a", None) == "a"


def test_safetensors_are_readable_by_the_library_and_equal_to_the_byte(ordinary: Run, tmp_path: Path) -> None:
    weights = random_weights(ordinary.recipe, 7)
    metadata = {f"key-{number}": number for number in range(20)}
    write_safetensors(tmp_path / "one.safetensors", weights, metadata)
    shuffled = dict(reversed(weights.items()))
    write_safetensors(tmp_path / "two.safetensors", shuffled, dict(reversed(metadata.items())))
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()
    loaded = safetensors.torch.load_file(tmp_path / "one.safetensors")
    assert weights_hash(loaded) == weights_hash(weights)
    assert read_metadata(tmp_path / "one.safetensors") == {key: str(value) for key, value in metadata.items()}
    # Without metadata the bytes are the library's own.
    write_safetensors(tmp_path / "plain.safetensors", weights)
    assert (tmp_path / "plain.safetensors").read_bytes() == safetensors.torch.save(weights)


def test_training_state_round_trip(ordinary: Run, tmp_path: Path) -> None:
    state = ordinary_state(ordinary.recipe, 3)
    for name in ("one.pt", "two.pt"):
        write_training_state(tmp_path / name, state)
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "two.pt").read_bytes()
    read = read_training_state(tmp_path / "one.pt")
    assert (read.config, read.cursor, read.best_loss, read.loader) == (
        state.config,
        state.cursor,
        state.best_loss,
        state.loader,
    )
    assert read.model is not None
    assert weights_hash(read.model) == weights_hash(random_weights(ordinary.recipe, 0))
    # Ours need no permission for any type.
    torch.load(tmp_path / "one.pt", weights_only=True)


def test_foreign_layouts_of_the_same_state_are_read(ordinary: Run) -> None:
    content = ordinary_state(ordinary.recipe, 2).to_dict()
    content["model"] = OrderedDict(reversed(content["model"].items()))
    content["rng"] |= {"numpy": np.random.RandomState(0).get_state()}
    torch.save(content, ordinary.directory / "epoch-002.pt")
    checkpoint = read_checkpoint(ordinary, "epoch-002.pt")
    assert list(checkpoint.weights) == list(ordinary.recipe.model.parameter_shapes())


def test_weights_read_do_not_depend_on_the_file_any_more(ordinary: Run) -> None:
    for name in ("epoch-002.pt", "epoch-002.safetensors"):
        path = ordinary.directory / name
        checkpoint = read_checkpoint(ordinary, name)
        before = weights_hash(checkpoint.weights)
        path.write_bytes(bytes(path.stat().st_size))
        assert weights_hash(checkpoint.weights) == before


def test_arena_layout_matches_the_reference(reference: Path) -> None:
    run = open_run(reference / "runs" / "packed-old")
    assert storage_size(run.recipe.model.parameter_shapes()) == 70976
    state = read_training_state(run.directory / "final.pt")
    assert state.model is not None
    assert [dict(entry) for entry in state.model["layout"]] == storage_layout(run.recipe.model.parameter_shapes())


@given(sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=5))
@settings(max_examples=25, deadline=None)
def test_arena_keeps_every_worker(sizes: list[list[int]]) -> None:
    shapes = {f"p{index}": tuple(size) for index, size in enumerate(sizes)}
    parts = [{name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(3)]
    storage = pack(parts, shapes)
    assert storage.shape == (3, storage_size(shapes))
    assert all(entry["start"] % 64 == 0 for entry in storage_layout(shapes))
    for views, part in zip(unpack(storage, shapes), parts, strict=True):
        assert weights_hash(views) == weights_hash(part)


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_average_is_the_sum_in_worker_order_to_the_bit(workers: int) -> None:
    # Sizes beside the vector widths, whose last elements torch alone would add up in another order.
    parts = [{name: torch.randn(size) for name, size in (("a", 101), ("b", 7), ("c", 64))} for _ in range(workers)]
    for name, mean in average(parts).items():
        total = torch.zeros_like(mean)
        for part in parts:
            total += part[name]
        assert torch.equal(mean, total / workers)


def test_full_disk_keeps_the_old_file(ordinary: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ordinary.directory / "final.pt"
    before = path.read_bytes()

    def save_to_full_device(file: object, content: dict[str, object]) -> None:
        with open("/dev/full", "wb", buffering=0) as full:
            real_save(full, content)

    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    real_save = pt_files.save_to
    monkeypatch.setattr(pt_files, "save_to", save_to_full_device)
    with pytest.raises(HvpflowError, match="no room on the disk"):
        write_training_state(path, ordinary_state(ordinary.recipe, 4))
    assert path.read_bytes() == before
    assert not list(ordinary.directory.glob(".final*"))
