"""A disk that fills up in the middle of any step: one clear message, nothing partial, and room is all that it takes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults_cases import ROUNDS, TALLY, Bench, Step, choices

KIB = 1024
PAGE = 4 * KIB


class SmallDisk:
    """A file system in memory whose size is set at will."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def resize(self, size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size // KIB}k", str(self.place)], check=True)

    def used(self) -> int:
        state = os.statvfs(self.place)
        return (state.f_blocks - state.f_bfree) * state.f_frsize


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[SmallDisk]:
    """Mount a small disk at ``place``, which keeps its content."""
    aside = place.with_name("aside")
    place.rename(aside)
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={64 * KIB}k", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        place.rmdir()
        aside.rename(place)
        pytest.skip(f"mounting a small disk needs root: {mounted.stderr.strip()}")
    try:
        shutil.copytree(aside, place, dirs_exist_ok=True, copy_function=shutil.copy2)
        shutil.rmtree(aside)
        yield SmallDisk(place)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def needed(bench: Bench, step: Step) -> int:
    """Bytes that the step adds, in whole pages."""
    with_it, without = (bench.steps.index(step) + 1, bench.steps.index(step))
    sizes = []
    for count in (with_it, without):
        bench.restore(before=bench.steps[count])
        files = [path for path in (bench.place / "disk").rglob("*") if path.is_file()]
        sizes.append(sum(-(-path.stat().st_size // PAGE) * PAGE for path in files))
    return sizes[0] - sizes[1]


@pytest.mark.parametrize("name", ["prepare", "train", "inspect", "measure", "samples", "summary"])
def test_disk_fills_up(bench: Bench, name: str) -> None:
    step = bench.find(name)
    room = max(needed(bench, step), 4 * PAGE)
    for attempt in range({"train": 4, "measure": 3}.get(name, 2) * ROUNDS):
        left = choices("disk", name, attempt).randrange(0, room // PAGE) * PAGE
        bench.restore(before=step)
        with small_disk(bench.place / "disk") as disk:
            context = f"{step.words} with {left // KIB} KiB left, attempt {attempt}"
            disk.resize(max(disk.used() + left, PAGE))  # 0 would mean without limit
            status = bench.run(step)
            bench.check_whole(context)
            if status != 0:
                last = bench.refused(step, context)
                assert "no room on the disk" in last or "No space left" in last, f"{context}: {last}"
                TALLY[f"{name} with a full disk"] += 1
            disk.resize(64 * KIB * KIB)
            bench.finish(step, context)
            bench.check_whole(context)


def test_log_on_a_full_disk_does_not_hide_the_reason(bench: Bench) -> None:
    step = bench.find("inspect")
    bench.restore(before=step)
    with small_disk(bench.place / "disk") as disk:
        disk.resize(disk.used())
        status = bench.server.run(bench.place, (*step.words, "--log", "disk/results/logs/new/inspect.log"))["status"]
        assert status == 1
        assert "no room on the disk" in bench.refused(step, "log")
