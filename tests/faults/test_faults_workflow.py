"""The whole workflow and its launcher: killed, started twice, and locked by a predecessor that is no more."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from faults_cases import CASES, MEASURED, ROUNDS, TALLY, Bench, choices, content, files_below
from workflow_cases import environment

OUTPUT = "again"
WORDS = ("analyze", "--run", "disk/run", "--output", OUTPUT, "--device", "cpu", "--no-plots", "--no-compile-hvp")
OPTIONS = ("--checkpoints", MEASURED[0], "--noise-samples", "3", "--random-samples", "2", "--directions-per-pass", "4")


def start(place: Path, words: Sequence[str]) -> subprocess.Popen[str]:
    """Start hvpflow on one CPU, so that it uses as many threads as the bench."""
    command = [sys.executable, "-m", "hvpflow.cli", *words]
    cpu = min(os.sched_getaffinity(0))
    return subprocess.Popen(
        command,
        cwd=place,
        env=environment(place) | {"OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {cpu}),
    )


def analyze(place: Path, *more: str) -> tuple[int, str]:
    process = start(place, (*WORDS, *OPTIONS, *more))
    said, _ = process.communicate(timeout=900)
    return process.returncode, said


def wait_for(process: subprocess.Popen[str], place: Path, pattern: str) -> None:
    deadline = time.monotonic() + 300
    while not any(place.glob(pattern)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"no {pattern}"
        time.sleep(0.01)


def kill_group(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kill_alone(process: subprocess.Popen[str]) -> None:
    """Kill the launcher; Snakemake and its jobs live on without it."""
    process.kill()
    process.wait()


def assert_equal(bench: Bench) -> None:
    """Every number is that of the steps run one by one, which shared nothing with this but the run and the cache."""
    here, there = bench.place / OUTPUT, bench.baseline / "disk" / "results"
    published = [path for path in files_below(here) if path.relative_to(here).parts[0] in ("samples", "work")]
    assert len(published) == 2 * len(CASES)
    for path in published:
        assert content(path) == content(there / path.relative_to(here)), path
    rows = (there / "summary.csv").read_text(encoding="utf-8").splitlines()[: 1 + len(CASES)]
    assert (here / "summary.csv").read_text(encoding="utf-8").splitlines() == rows


def kill_without_worker(process: subprocess.Popen[str]) -> None:
    """Kill the launcher and Snakemake; a worker lives on, and writes beside its successor."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
    for pid in (process.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    process.wait()


# What exists when the kill comes, and the longest that is then still waited.
MOMENTS = [
    ("again/.snakemake/locks/*", 2.0),
    ("again/inspect/*.json", 2.0),
    ("again/store/*/*.json", 4.0),
    ("again/work/*/*/*/*.json", 4.0),
]


@pytest.mark.parametrize("trial", range(ROUNDS))
def test_killed_analysis_continues_by_the_same_command(bench: Bench, trial: int) -> None:
    """Everything is killed at several moments; Snakemake's lock stays behind, and is no hindrance."""
    bench.restore()
    choose = choices("workflow", trial)
    for kill, (pattern, seconds) in zip((kill_group, kill_without_worker), MOMENTS[trial % 2 :: 2], strict=True):
        process = start(bench.place, (*WORDS, *OPTIONS))
        wait_for(process, bench.place, pattern)
        time.sleep(choose.uniform(0, seconds))
        kill(process)
        bench.check_whole(f"trial {trial}, killed after {pattern}")
        TALLY["whole analysis killed"] += 1
    status, said = analyze(bench.place)
    assert status == 0, said
    assert_equal(bench)


def test_killed_worker_fails_its_job_alone(bench: Bench) -> None:
    """A worker dies as by lack of memory: the command says so, and repeated it continues."""
    bench.restore()
    process = start(bench.place, (*WORDS, *OPTIONS))
    wait_for(process, bench.place, "again/store/*/*.json")
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
            if b"measure" in words and os.path.samefile(entry.with_name("cwd"), bench.place / OUTPUT):
                os.kill(int(entry.parent.name), signal.SIGKILL)
                TALLY["worker of an analysis killed"] += 1
        except OSError:
            continue
    said, _ = process.communicate(timeout=900)
    assert process.returncode != 0
    assert said.rstrip().splitlines()[-1].startswith("hvpflow: error: ")
    status, said = analyze(bench.place)
    assert status == 0, said
    assert_equal(bench)


def test_second_analysis_of_one_output_is_refused(bench: Bench) -> None:
    """While the first runs, and while its Snakemake runs on after the launcher was killed; nothing is changed."""
    bench.restore()
    process = start(bench.place, (*WORDS, *OPTIONS))
    wait_for(process, bench.place, "again/.snakemake/locks/*")
    for _ in range(2):
        status, said = analyze(bench.place, "--seed", "7")
        assert status == 1, said
        last = said.rstrip().splitlines()[-1]
        assert "another process works on" in last and socket.gethostname() in last, said
        assert str(process.pid) in last
        assert "seed: 7" not in (bench.place / OUTPUT / "config.yaml").read_text(encoding="utf-8")
        assert bench.server.run(bench.place, ("clean", "--output", OUTPUT), program="cli")["status"] == 1
        assert "another process works on" in bench.server.said()
        kill_alone(process)
        TALLY["launcher killed alone"] += 1
    deadline = time.monotonic() + 300
    while "another process works on" in said and time.monotonic() < deadline:
        status, said = analyze(bench.place)
        time.sleep(2)
    assert status == 0, said
    assert_equal(bench)
    leave_foreign_locks(bench.place / OUTPUT, bench)


def leave_foreign_locks(output: Path, bench: Bench) -> None:
    """A lock that nobody of this machine is known to have left is the user's to remove."""
    locks = output / ".snakemake" / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    (locks / "0.output.lock").write_text(f"{output / 'summary.csv'}\n", encoding="utf-8")
    for holder in ("", json.dumps({"host": "elsewhere", "pid": 4, "since": "2020-01-01 00:00:00"})):
        (output / ".hvpflow.lock").write_text(holder, encoding="utf-8")
        status, said = analyze(bench.place)
        assert status == 1
        last = said.rstrip().splitlines()[-1]
        assert "locked by a Snakemake" in last and "-- --unlock" in last
        assert ("elsewhere" in last) == bool(holder)
    status, said = analyze(bench.place, "--", "--unlock")
    assert status == 0, said
    assert analyze(bench.place)[0] == 0


def locked(path: Path) -> bool:
    """Whether a process works under ``path``: a directory made under a lock, or a file with a lock on it."""
    if not path.is_file():
        return path.exists()
    inode = f":{path.stat().st_ino}"
    return any(word.endswith(inode) for word in Path("/proc/locks").read_text(encoding="utf-8").split())


def test_two_steps_of_one_training_or_cache_are_refused(bench: Bench) -> None:
    """The second process is refused with a message while the first one works, stopped here in mid-work."""
    for name, sign in (("prepare", "disk/.cache.preparing"), ("train", "disk/run/.training/lock")):
        step = bench.find(name)
        bench.restore(before=step)
        command = [sys.executable, "-m", "hvpflow.pipeline.steps", *step.words]
        first = subprocess.Popen(command, cwd=bench.place, env=environment(bench.place), stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not locked(bench.place / sign) and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.0005)
        first.send_signal(signal.SIGSTOP)
        assert first.poll() is None, f"{name} ended too soon"
        status = bench.run(step)
        assert status == 1, bench.server.said()
        assert "another process" in bench.refused(step, name)
        first.send_signal(signal.SIGCONT)
        assert first.wait() == 0
        bench.check_whole(name)
