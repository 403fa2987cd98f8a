"""Interrupted trainings continue to the bit: from every step, from every epoch state, and after a killed process."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from training_cases import assert_same_run, make_recipe, read_rows

from hvpflow.data.cache import TokenCache
from hvpflow.errors import HvpflowError
from hvpflow.files import write_json
from hvpflow.interruption import Interrupted
from hvpflow.runs.pt_files import load_pt
from hvpflow.runs.recipe import load_recipe, recipe_identity
from hvpflow.training import learner, loop, train_run


def test_interruption_after_any_step(
    cache: TokenCache, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One training, stopped by a signal after each of its 45 updates, publishes what an undisturbed one does."""
    update = learner.SingleLearner.update

    def signalled(self: learner.SingleLearner, *arguments: object) -> learner.Update:
        os.kill(os.getpid(), signal.SIGTERM)
        return update(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(learner.SingleLearner, "update", signalled)
    for step in range(1, 46):
        with pytest.raises(Interrupted, match=f"SIGTERM after step {step} of 45.*repeat the command"):
            train_run(make_recipe(), cache, tmp_path / "run")
        status = json.loads((tmp_path / "run" / "status.json").read_text())
        assert (status["status"], status["step"]) == ("interrupted", step)
        assert not list((tmp_path / "run").glob("*.pt"))
    train_run(make_recipe(), cache, tmp_path / "run")
    assert_same_run(tmp_path / "run", finished)


@pytest.mark.parametrize("call", range(1, 6))
def test_interruption_while_validating(
    cache: TokenCache, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Four epochs' validations, then the full one."""
    calls = 0
    original = loop.validate

    def signalled(*arguments: object, **named: object) -> tuple[float, int]:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "validate", signalled)
    with pytest.raises(Interrupted, match="SIGINT"):
        train_run(make_recipe(), cache, tmp_path / "run")
    train_run(make_recipe(), cache, tmp_path / "run")
    assert calls == 6, "only the interrupted validation was repeated"
    assert_same_run(tmp_path / "run", finished)


@pytest.mark.parametrize("epoch", [1, 2, 3, 4])
def test_every_epoch_state_continues(cache: TokenCache, finished: Path, tmp_path: Path, epoch: int) -> None:
    private = Path(shutil.copytree(finished / ".training", tmp_path / "run" / ".training"))
    for later in range(epoch + 1, 5):
        (private / f"epoch-{later:03d}.pt").unlink()
        (private / f"epoch-{later:03d}.safetensors").unlink()
    (private / "final.pt").unlink()
    lines: list[str] = []
    train_run(make_recipe(), cache, tmp_path / "run", progress=lines.append)
    assert any(f"continuing after step {[11, 23, 34, 45][epoch - 1]} " in line for line in lines)
    assert_same_run(tmp_path / "run", finished)


def test_damaged_states_are_passed_over(cache: TokenCache, finished: Path, tmp_path: Path) -> None:
    private = Path(shutil.copytree(finished / ".training", tmp_path / "run" / ".training"))
    (private / "rolling.pt").write_bytes((finished / "final.pt").read_bytes()[:-100])
    (private / "final.pt").unlink()
    (private / "epoch-004.pt").write_bytes(b"")
    (private / "result.json").unlink()
    lines: list[str] = []
    train_run(make_recipe(), cache, tmp_path / "run", progress=lines.append)
    assert any("not continuing from rolling.pt" in line for line in lines)
    assert_same_run(tmp_path / "run", finished)


def test_wider_retention_trains_only_what_is_missing(cache: TokenCache, finished: Path, tmp_path: Path) -> None:
    train_run(
        make_recipe(training={"checkpoint_policy": "explicit", "checkpoint_epochs": [2]}), cache, tmp_path / "run"
    )
    kept = (tmp_path / "run" / "epoch-002.safetensors").read_bytes()
    lines: list[str] = []
    wider = make_recipe(training={"checkpoint_policy": "explicit", "checkpoint_epochs": [2, 3]})
    train_run(wider, cache, tmp_path / "run", progress=lines.append)
    assert any("continuing after step 23 " in line for line in lines)
    assert not (tmp_path / "run.replaced-1").exists()
    assert (tmp_path / "run" / "epoch-002.safetensors").read_bytes() == kept
    for name in ("epoch-003.safetensors", "metrics.jsonl"):
        read = read_rows if name.endswith("jsonl") else Path.read_bytes
        assert read(tmp_path / "run" / name) == read(finished / name)
    assert list(load_recipe(tmp_path / "run" / "resolved.yaml").training.checkpoint_epochs) == [2, 3]


_CHILD = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
from training_cases import make_recipe
from hvpflow.data.cache import TokenCache
from hvpflow.errors import HvpflowError
from hvpflow.training import learner, loop, states, train_run
torch.set_num_threads(1)
loop._SAVE_SECONDS = 0.03
update = learner.SingleLearner.update
def slow(self, *arguments):
    result = update(self, *arguments)
    time.sleep(0.01)
    print(arguments[-1], flush=True)
    return result
learner.SingleLearner.update = slow
try:
    train_run(make_recipe(), TokenCache.open(Path(sys.argv[2])), Path(sys.argv[3]))
except HvpflowError as error:
    sys.exit(str(error))
"""


def test_killed_processes(cache: TokenCache, finished: Path, tmp_path: Path) -> None:
    """A process killed twice without warning and once with, each time at a random moment, then left to end."""
    seed = random.randrange(2**32)
    choose = random.Random(seed)
    command = [sys.executable, "-c", _CHILD, str(Path(__file__).parent), str(cache.directory), str(tmp_path / "run")]
    reached = 0
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        target = reached + choose.randint(3, 12)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                reached = int(line)
                if reached >= target:
                    break
            process.send_signal(number)
            _, errors = process.communicate()
        assert process.returncode != 0, f"seed {seed}: {errors}"
        if number == signal.SIGTERM:
            assert errors.strip().endswith("repeat the command to continue"), errors
    assert not (tmp_path / "run" / "final.pt").exists(), f"seed {seed}"
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(process.stdout.split()[0]) > 1, f"seed {seed}: nothing was kept"
    assert_same_run(tmp_path / "run", finished)


@pytest.mark.parametrize("name", ["ordinary-new", "ordinary-old"])
def test_a_foreign_training_continues_from_its_first_epoch(reference: Path, tmp_path: Path, name: str) -> None:
    """Another program's optimiser state and data order: its own later losses, norms and weights come out."""
    theirs = reference / "runs" / name
    cache = TokenCache.open(reference / "data" / "stdlib-512")
    recipe = load_recipe(theirs / "resolved.yaml")
    private = tmp_path / "run" / ".training"
    private.mkdir(parents=True)
    write_json(private / "identity.json", {"layout": 1, "recipe_identity": recipe_identity(recipe, cache.identity)})
    for suffix in ("pt", "safetensors"):
        shutil.copy(theirs / f"epoch-001.{suffix}", private)
    shutil.copy(theirs / "metrics.jsonl", private)
    train_run(recipe, cache, tmp_path / "run")

    found, expected = read_rows(tmp_path / "run" / "metrics.jsonl"), read_rows(theirs / "metrics.jsonl")
    assert len(found) == len(expected) == 18
    for ours, other in zip(found, expected):
        assert list(ours) == list(other)
        for key, value in other.items():
            tolerance = {"loss": 2e-6, "perplexity": 1e-5, "grad_norm": 2e-6, "lr": 1e-15}.get(key, 0.0)
            assert ours[key] == (pytest.approx(value, rel=tolerance, abs=0) if tolerance else value), (key, ours)
    left, right = load_pt(tmp_path / "run" / "final.pt"), load_pt(theirs / "final.pt")
    assert set(left) == set(right)
    for parameter, value in right["model"].items():
        assert (left["model"][parameter] - value).abs().max() < 2e-6
    for index, moments in right["optimizer"]["state"].items():
        assert left["optimizer"]["state"][index]["step"] == 101
        assert (left["optimizer"]["state"][index]["exp_avg"] - moments["exp_avg"]).abs().max() < 1e-5


def test_a_state_of_another_shape_is_refused(cache: TokenCache, finished: Path) -> None:
    import torch

    from hvpflow.runs.state_format import read_training_state

    other = learner.SingleLearner(make_recipe(model={"width": 32}), torch.device("cpu"))
    with pytest.raises(HvpflowError, match="does not fit the recipe's model"):
        other.load_state(read_training_state(finished / "epoch-001.pt"))
