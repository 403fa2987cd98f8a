"""How far an analysis is, and what its output directory holds that the published results do not need."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from hvpflow.files import read_record
from hvpflow.pipeline.holding import held_output
from hvpflow.pipeline.plan import Plan

UNITS = ("B", "kB", "MB", "GB", "TB")


def status_lines(plan: Plan) -> list[str]:
    """Done and pending work, the time left at the rate so far, and the disk used."""
    measurements = plan.measurements
    done = [path for path in (plan.measure_path(*job) for job in measurements) if path.is_file()]
    inspected = sum(plan.inspect_path(name).is_file() for name in plan.checkpoints)
    samples = [plan.samples_path(alias.measured, case) for alias in plan.aliases for case in plan.cases]
    published = [plan.output / "manifest.json", plan.output / "summary.csv", *plan.figure_paths]
    seconds = [read_record(path)["timing"]["total_seconds"] for path in done]
    pending = len(measurements) - len(done)
    if not pending:
        left = "none"
    elif seconds:
        mean = sum(seconds) / len(seconds)
        left = f"about {duration(pending * mean)} of one worker, at {duration(mean)} a job"
    else:
        left = "unknown until the first job has finished"
    return [
        f"run            {plan.run_directory}",
        f"checkpoints    {len(plan.checkpoints)} chosen, {inspected} inspected, {len(plan.aliases)} distinct",
        f"measurements   {len(done)} done, {pending} pending",
        f"samples        {sum(path.is_file() for path in samples)} of {len(samples)} published",
        f"figures        {sum(path.is_file() for path in published)} of {len(published)} files published",
        f"time left      {left}",
        f"disk used      {size(disk_bytes(plan.output))}, {size(disk_bytes(plan.output / 'store'))} of it in the store",
    ]


def clean(plan: Plan, *, dry_run: bool) -> list[str]:
    """Remove the store of finished directions and the measurements of other settings; say what went.

    The published files, their measurements and the inspect records stay. A later analysis with other settings or more
    directions then measures from the beginning.

    Raises:
        HvpflowError: an analysis is at work there.
    """
    lines = []
    with contextlib.nullcontext() if dry_run else held_output(plan.output):
        for path in _superfluous(plan):
            lines.append(f"{'would remove' if dry_run else 'removed'} {path} ({size(disk_bytes(path))})")
            if not dry_run:
                shutil.rmtree(path)
    return lines or ["nothing to remove"]


def _superfluous(plan: Plan) -> Iterator[Path]:
    if (plan.output / "store").is_dir():
        yield plan.output / "store"
    work = plan.output / "work"
    for path in sorted(work.iterdir()) if work.is_dir() else []:
        if path.name != plan.digest and path.is_dir():
            yield path


def disk_bytes(path: Path) -> int:
    """Bytes of all files below ``path``; 0 where there is nothing."""
    return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file() and not entry.is_symlink())


def size(count: float) -> str:
    """A number of bytes for people."""
    for unit in UNITS:
        if count < 1000 or unit == UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
