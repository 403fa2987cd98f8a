"""Truncated files, flipped bits and zeroed stretches: refused or made again, and never another number."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from faults_cases import CHECKPOINTS, DAMAGES, ROUNDS, TALLY, Bench, Step, choices, content, store_contexts

from hvpflow.pipeline.integrity import remove_damaged


def damage(path: Path, kind: str, *labels: object) -> None:
    """Damage ``path`` in place, so that hard links to it are damaged too."""
    data = path.read_bytes()
    changed = DAMAGES[kind](data, choices("damage", kind, path.name, *labels)) if data else b"\0"
    with path.open("r+b") as handle:
        handle.write(changed)
        handle.truncate()
    TALLY[f"damaged {describe(path)} ({kind})"] += 1


def describe(path: Path) -> str:
    if "store" in path.parts:
        return "store entry"
    if "work" in path.parts:
        return "measure record"
    if path.parent.name in ("inspect", "samples"):
        return f"{path.parent.name} record"
    if path.parent.name == "cache":
        return "cache manifest" if path.suffix == ".json" else "cache shard"
    return f"{path.suffix} file of a run"


def refused_or_equal(bench: Bench, step: Step, output: Path, context: str) -> bool:
    """Run ``step``: it must refuse and write nothing, or (the damage being harmless) make what it makes undisturbed."""
    before = output.read_bytes() if output.exists() else None
    status = bench.run(step)
    if status == 0:
        expected = bench.baseline / output.relative_to(bench.place)
        assert content(output) == content(expected), f"{context}: another number was made"
        return False
    assert status == 1, f"{context}: status {status}\n{bench.server.said()}"
    bench.refused(step, context)
    assert (output.read_bytes() if output.exists() else None) == before, context
    return True


@pytest.mark.parametrize("kind", list(DAMAGES))
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(bench: Bench, name: str, kind: str) -> None:
    step = bench.find("inspect", CHECKPOINTS.index(name))
    bench.restore()
    path = bench.place / "disk" / "run" / name
    output = bench.place / "disk" / "results" / "inspect" / f"{name}.json"
    for attempt in range(8 * ROUNDS):
        shutil.copyfile(bench.baseline / "disk" / "run" / name, path)
        damage(path, kind, attempt)
        output.unlink(missing_ok=True)
        found = refused_or_equal(bench, step, output, f"{kind} of {name}, attempt {attempt}")
        assert found or kind != "truncate"
    shutil.copyfile(bench.baseline / "disk" / "run" / name, path)
    bench.finish(step, name)
    bench.check_equal(name)


@pytest.mark.parametrize("kind", list(DAMAGES))
def test_checkpoint_damaged_after_its_inspection(bench: Bench, kind: str) -> None:
    """Measuring reads the file again, and compares."""
    step = bench.find("measure")
    bench.restore(before=step)
    for attempt in range(2 * ROUNDS):
        path = bench.place / "disk" / "run" / "epoch-001.safetensors"
        shutil.copyfile(bench.baseline / "disk" / "run" / path.name, path)
        damage(path, kind, attempt)
        (output,) = (bench.baseline / "disk" / "results").glob("work/*/epoch-001.safetensors/seen/0.json")
        output = bench.place / output.relative_to(bench.baseline)
        refused_or_equal(bench, step, output, f"{kind} of {path.name}, attempt {attempt}")
        output.unlink(missing_ok=True)


@pytest.mark.parametrize("kind", list(DAMAGES))
@pytest.mark.parametrize("pattern", ["train-*.bin", "validation-*.bin", "manifest.json"])
def test_token_cache(bench: Bench, pattern: str, kind: str) -> None:
    """A training and a measurement refuse it; with the file back they go on."""
    for name in ("train", "measure"):
        step = bench.find(name)
        for attempt in range(ROUNDS):
            bench.restore(before=step)
            files = sorted((bench.place / "disk" / "cache").glob(pattern))
            path = choices("shard", pattern, kind, name, attempt).choice(files)
            damage(path, kind, name, attempt)
            context = f"{name} with {kind} of {path.name}, attempt {attempt}"
            if name == "train":
                output = bench.place / "disk" / "run" / "final.pt"
            else:
                (known,) = (bench.baseline / "disk" / "results").glob("work/*/epoch-001.safetensors/seen/0.json")
                output = bench.place / known.relative_to(bench.baseline)
            found = refused_or_equal(bench, step, output, context)
            assert found or path.suffix == ".json", f"{context}: a damaged shard was used"
            shutil.copyfile(bench.baseline / "disk" / "cache" / path.name, path)
            bench.finish(step, context)
            bench.check_whole(context)


@pytest.mark.parametrize("kind", list(DAMAGES))
def test_store_entries(bench: Bench, kind: str) -> None:
    """Damaged entries are computed again, to the same bits."""
    step = bench.find("measure")
    for attempt in range(2 * ROUNDS):
        bench.restore()
        results = bench.place / "disk" / "results"
        (record,) = results.glob("work/*/epoch-001.safetensors/seen/0.json")
        (context,) = store_contexts(results, "epoch-001.safetensors", "seen")
        record.unlink()
        entries = sorted(context.glob("*.json"))
        choose = choices("entries", kind, attempt)
        for path in choose.sample(entries, len(entries) // 2):
            damage(path, kind, attempt)
        bench.finish(step, f"{kind} of store entries, attempt {attempt}")
        bench.check_whole(f"{kind} of store entries, attempt {attempt}")
        assert content(record) == content(bench.baseline / record.relative_to(bench.place))


@pytest.mark.parametrize("kind", list(DAMAGES))
def test_partial_sums(bench: Bench, kind: str) -> None:
    """What a killed worker left is damaged before the next one finds it."""
    step = bench.find("measure")
    for attempt in range(2 * ROUNDS):
        choose = choices("partial", kind, attempt)
        bench.restore(before=step)
        context = f"{kind} of partial sums, attempt {attempt}"
        bench.run(step, kill_after=choose.uniform(0.3, 0.9) * bench.cpu[step], extra=0.0, signal=9)
        for path in sorted((bench.place / "disk" / "results" / "store").glob("*/[!.]*")):
            if path.name.startswith(("partial", "mean")):
                damage(path, kind, attempt)
        bench.finish(step, context)
        bench.check_whole(context)


@pytest.mark.parametrize("kind", list(DAMAGES))
def test_states_of_an_interrupted_training(bench: Bench, kind: str) -> None:
    """A training continues from the newest state that is whole, to the same weights."""
    step = bench.find("train")
    for attempt in range(2 * ROUNDS):
        choose = choices("states", kind, attempt)
        bench.restore(before=step)
        context = f"{kind} of a training's states, attempt {attempt}"
        bench.run(step, kill_after=choose.uniform(0.3, 0.95) * bench.cpu[step], extra=0.0, signal=9)
        states = sorted((bench.place / "disk" / "run" / ".training").glob("[!.]*.pt"))
        for path in choose.sample(states, -(-len(states) // 2)):
            damage(path, kind, attempt)
            if path.name != "rolling.pt" and choose.random() < 0.5:
                path.unlink()
        bench.finish(step, context)
        for name in CHECKPOINTS:
            output = bench.place / "disk" / "results" / "inspect" / f"{name}.json"
            if not (bench.place / "disk" / "run" / name).samefile(bench.place / "disk" / "run" / ".training" / name):
                raise AssertionError(f"{context}: {name} is no link")
            refused_or_equal(bench, bench.find("inspect", CHECKPOINTS.index(name)), output, context)


def test_damage_through_a_link_is_mended_by_deleting_the_published_file(bench: Bench) -> None:
    """The published file and training's own are one; deleting the former and repeating the command trains it again."""
    step = bench.find("train")
    for name in ("final.pt", "epoch-002.safetensors", "epoch-002.pt"):
        bench.restore()
        path = bench.place / "disk" / "run" / name
        assert path.samefile(bench.place / "disk" / "run" / ".training" / name)
        damage(path, "flip" if path.suffix == ".pt" else "truncate", "link")
        path.unlink()
        bench.finish(step, name)
        assert content(path) == content(bench.baseline / "disk" / "run" / name)
        bench.check_whole(name)


@pytest.mark.parametrize("kind", list(DAMAGES))
@pytest.mark.parametrize(
    ("pattern", "reader"),
    [("inspect/*.json", "samples"), ("work/*/*/*/0.json", "samples"), ("samples/*.json", "summary")],
    ids=["inspect", "measure", "samples"],
)
def test_records(bench: Bench, pattern: str, reader: str, kind: str) -> None:
    """The step that reads a damaged record refuses it; once removed, as an analysis does, all is made again."""
    step = bench.find(reader)
    for attempt in range(ROUNDS):
        bench.restore()
        results = bench.place / "disk" / "results"
        for path in sorted(results.glob(pattern)):
            damage(path, kind, attempt)
        context = f"{kind} of {pattern}, attempt {attempt}"
        output = results / ("summary.csv" if reader == "summary" else "samples/epoch-001.safetensors.seen.json")
        refused_or_equal(bench, step, output, context)
        said: list[str] = []
        remove_damaged(results, said.append)
        assert all("is damaged" in line for line in said)
        for later in bench.steps[2:-1]:
            bench.finish(later, context)
        bench.check_equal(context)


def test_a_changed_summary_is_noticed(bench: Bench) -> None:
    bench.restore()
    results = bench.place / "disk" / "results"
    damage(results / "summary.csv", "flip")
    os.utime(results / "summary.csv")
    said: list[str] = []
    remove_damaged(results, said.append)
    assert len(said) == 1 and "summary.csv is not the one" in said[0]
    for step in bench.steps[-2:]:
        bench.finish(step, "summary")
    bench.check_equal("summary")
