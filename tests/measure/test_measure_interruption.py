"""A worker that is stopped anywhere, by whatever, is continued to the record of an undisturbed one, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from measure_cases import make_run, measure, without_times

from hvpflow import files
from hvpflow.data.cache import TokenCache
from hvpflow.errors import HvpflowError
from hvpflow.interruption import Interrupted
from hvpflow.measure import mean_gradient, session
from hvpflow.runs.run import Run

OPTIONS: dict[str, Any] = {
    **{"engine": "jvp-of-grad", "directions_per_pass": 2, "hvp_batch_size": 5},
    **{"noise_samples": 2, "random_samples": 1, "save_seconds": 0.0},
}
MICROBATCHES, BATCHES = 6, 3


class Killed(BaseException):
    """Stands for a kill: nothing in the package catches it."""


class Trip:
    """Calls ``action`` at the n-th call of any watched function, and counts the calls."""

    def __init__(self) -> None:
        self.calls, self.at = 0, -1
        self.action: Callable[[], None] = lambda: None

    def arm(self, at: int, action: Callable[[], None]) -> None:
        self.calls, self.at, self.action = 0, at, action

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                self.action()
            return function(*arguments, **options)

        return watched


def kill() -> None:
    raise Killed


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[tuple[Run, TokenCache]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_run(tmp_path)
    torch.set_num_threads(threads)


def watch_computing(trip: Trip, patch: pytest.MonkeyPatch) -> None:
    """Watch every engine call and every microbatch gradient."""
    make_engine = session.make_engine
    patch.setattr(session, "make_engine", lambda *a, **o: trip.watch(make_engine(*a, **o)))
    patch.setattr(mean_gradient, "add_gradient", trip.watch(mean_gradient.add_gradient))


STRIDES = [5, pytest.param(1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("stride", STRIDES)
def test_killed_at_every_step_of_computing(
    tiny: tuple[Run, TokenCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    trip = Trip()
    watch_computing(trip, monkeypatch)
    undisturbed = without_times(measure(*tiny, tmp_path / "undisturbed", **OPTIONS))
    steps = trip.calls
    # The epoch's gradient, the check, two passes, and the two batches of each noise sample (3 sequences).
    assert steps == MICROBATCHES + 1 + 2 * BATCHES + 2 * 2
    for step in range(1, steps + 1, stride):
        store = tmp_path / f"killed-{step}"
        trip.arm(step, kill)
        with pytest.raises(Killed):
            measure(*tiny, store, **OPTIONS)
        trip.arm(-1, kill)
        assert without_times(measure(*tiny, store, **OPTIONS)) == undisturbed
        # Continued, not begun again: at most the interrupted step, the check and the noise's own batches come twice.
        assert trip.calls <= steps - (step - 1) + 1 + 4
        assert not [path for path in store.glob("*/*") if "partial" in path.name or path.name.endswith(".tmp")]


@pytest.mark.parametrize("stride", STRIDES)
def test_killed_at_every_writing(
    tiny: tuple[Run, TokenCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    trip = Trip()
    monkeypatch.setattr(files.os, "fsync", trip.watch(os.fsync))
    undisturbed = without_times(measure(*tiny, tmp_path / "undisturbed", **OPTIONS))
    writings = trip.calls
    assert writings > 10
    for writing in range(1, writings + 1, stride):
        store = tmp_path / f"killed-{writing}"
        trip.arm(writing, kill)
        with pytest.raises(Killed):
            measure(*tiny, store, **OPTIONS)
        trip.arm(-1, kill)
        assert without_times(measure(*tiny, store, **OPTIONS)) == undisturbed


def test_signals_save_and_say_so(tiny: tuple[Run, TokenCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trip = Trip()
    watch_computing(trip, monkeypatch)
    options = OPTIONS | {"save_seconds": 1000.0}
    undisturbed = without_times(measure(*tiny, tmp_path / "undisturbed", **options))
    before = signal.getsignal(signal.SIGTERM)
    for step, number in ((3, signal.SIGTERM), (9, signal.SIGINT), (13, signal.SIGTERM), (16, signal.SIGTERM)):
        store = tmp_path / f"stopped-{step}"
        trip.arm(step, lambda number=number: os.kill(os.getpid(), number))
        with pytest.raises(Interrupted, match="repeat the command to continue"):
            measure(*tiny, store, **options)
        assert trip.calls <= step + 1
        assert list(store.glob("*/partial-*")) or step == 9
        assert signal.getsignal(signal.SIGTERM) is before
        trip.arm(-1, kill)
        assert without_times(measure(*tiny, store, **options)) == undisturbed
    assert issubclass(Interrupted, HvpflowError)


def test_partial_sums_of_a_member_that_was_finished_then_are_not_used_for_it_now(
    tiny: tuple[Run, TokenCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trip = Trip()
    watch_computing(trip, monkeypatch)
    store = tmp_path / "store"
    undisturbed = without_times(measure(*tiny, store, **OPTIONS))
    first, second = sorted(store.glob("*/noise-*.json"))
    first.unlink()
    trip.arm(MICROBATCHES + 1 + 2 + 3, kill)  # ḡ again, the check, the lost sample's batches; within its pass
    with pytest.raises(Killed):
        measure(*tiny, store, **OPTIONS)
    (partial,) = store.glob("*/partial-*.json")
    assert json.loads(partial.read_text())["value"]["next_batch"] > 0
    second.unlink()  # its place in the kept sums is that of a zero direction
    trip.arm(-1, kill)
    assert without_times(measure(*tiny, store, **OPTIONS)) == undisturbed


@pytest.mark.parametrize("damage", ["bits", "truncated", "older"])
def test_damaged_partial_sums_are_not_used(
    tiny: tuple[Run, TokenCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    trip = Trip()
    watch_computing(trip, monkeypatch)
    undisturbed = without_times(measure(*tiny, tmp_path / "undisturbed", **OPTIONS))
    for step, pattern in ((4, "partial-mean*"), (14, "partial-*.json")):
        store = tmp_path / f"store-{step}"
        trip.arm(step, kill)
        with pytest.raises(Killed):
            measure(*tiny, store, **OPTIONS)
        (path,) = store.glob(f"*/{pattern}")
        content = bytearray(path.read_bytes())
        if damage == "bits":
            content[len(content) // 2] ^= 4
        elif damage == "truncated":
            content = content[: len(content) // 2]
        else:
            content = content.replace(b'"threads": 1', b'"threads": 2')
        path.write_bytes(content)
        trip.arm(-1, kill)
        assert without_times(measure(*tiny, store, **OPTIONS)) == undisturbed


CHILD = """
import sys, time
from pathlib import Path
import torch
from measure_cases import CHECKPOINT, measure
from hvpflow.data.cache import TokenCache
from hvpflow.files import write_json
from hvpflow.interruption import RETRY_STATUS, Interrupted
from hvpflow.measure import session
from hvpflow.runs.run import open_run

directory, store, pause = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(1)
make_engine = session.make_engine

def slow_engine(*arguments, **options):
    engine = make_engine(*arguments, **options)
    return lambda *a: (time.sleep(pause), engine(*a))[1]

session.make_engine = slow_engine
try:
    record = measure(open_run(directory / "run"), TokenCache.open(directory / "cache"), store, **OPTIONS)
except Interrupted as error:
    print(error)
    sys.exit(RETRY_STATUS)
write_json(store / "record.json", record)
"""


def start_child(directory: Path, store: Path, pause: float) -> subprocess.Popen[str]:
    code = CHILD.replace("OPTIONS", repr(OPTIONS))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(directory), str(store), str(pause)],
        **{"env": environment, "stdout": subprocess.PIPE, "text": True},
    )


def wait_for(condition: Callable[[], bool], child: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert child.poll() is None, "the worker ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)])
def test_a_stopped_process_is_continued(
    tiny: tuple[Run, TokenCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    store = tmp_path / "store"
    child = start_child(tmp_path, store, pause=0.5)
    wait_for(lambda: any(store.glob("*/partial-*.json")), child)
    child.send_signal(number)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == status
    assert ("stopped by a signal" in output) == (status == 75)
    trip = Trip()
    watch_computing(trip, monkeypatch)
    continued = without_times(measure(*tiny, store, **OPTIONS))
    assert trip.calls <= 1 + 2 * BATCHES - 1 + 2 * 2  # no mean gradient, and not the whole first pass
    assert continued == without_times(measure(*tiny, tmp_path / "undisturbed", **OPTIONS))


def test_two_workers_on_one_store_write_the_same(tiny: tuple[Run, TokenCache], tmp_path: Path) -> None:
    children = [start_child(tmp_path, tmp_path / "store", pause=0.05) for _ in range(2)]
    for child in children:
        child.communicate(timeout=120)
        assert child.returncode == 0
    together = json.loads((tmp_path / "store" / "record.json").read_text())
    assert without_times(together) == without_times(measure(*tiny, tmp_path / "alone", **OPTIONS))
