"""What did not finish: each job by name, with the last lines of its logs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvpflow.pipeline.plan import Plan

LINES_SHOWN = 5
SCHEDULER_MARKS = ("slurmstepd: error:", "srun: error:")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job of the workflow, by the files that tell how it went."""

    rule: str
    detail: str = ""
    """Wildcards, for people."""
    outputs: tuple[Path, ...]
    log: Path

    @property
    def name(self) -> str:
        return f"{self.rule} {self.detail}".rstrip()


def jobs_of(plan: Plan) -> Iterator[Job]:
    """Every job of the plan, upstream first."""
    logs = plan.output / "logs"
    if plan.config.owned:
        manifest = plan.cache_directory / "manifest.json"
        yield Job(rule="token_cache", outputs=(manifest,), log=logs / "token_cache.log")
        yield Job(rule="train", outputs=tuple(plan.trained_paths), log=logs / "train.log")
    for name in plan.checkpoints:
        yield Job(rule="inspect", detail=name, outputs=(plan.inspect_path(name),), log=logs / "inspect" / f"{name}.log")
    for name, case, shard in plan.measurements:
        yield Job(
            rule="measure",
            detail=f"{name} {case} {shard}",
            outputs=(plan.measure_path(name, case, shard),),
            log=logs / "measure" / f"{name}.{case}.{shard}.log",
        )
    for alias in plan.aliases:
        for case in plan.cases:
            yield Job(
                rule="samples",
                detail=f"{alias.measured} {case}",
                outputs=(plan.samples_path(alias.measured, case),),
                log=logs / "samples" / f"{alias.measured}.{case}.log",
            )
    yield Job(
        rule="summary", outputs=(plan.output / "manifest.json", plan.output / "summary.csv"), log=logs / "summary.log"
    )
    yield Job(rule="figures", outputs=tuple(plan.figure_paths), log=logs / "figures.log")


def failure_report(plan: Plan, *, since: float, scheduler_logs: Path) -> list[str]:
    """Lines that name each job which was tried and left no result, with the end of its log.

    Args:
        plan: whose jobs were tried.
        since: time (seconds since 1970) at which the tries began; older logs are of earlier calls.
        scheduler_logs: directory in which Slurm's own output of failed jobs lies, one directory a job.
    """
    lines, count = [], 0
    for job in jobs_of(plan):
        if all(path.exists() for path in job.outputs):
            continue
        of_scheduler = _newest(scheduler_logs / f"rule_{job.rule}" / job.detail.replace(" ", "_"), since)
        of_worker = job.log if _written_since(job.log, since) else None
        if of_scheduler is None and of_worker is None:
            continue
        count += 1
        lines.append(f"  {job.name}: {of_worker or of_scheduler}")
        if of_worker is not None:
            lines.extend(f"    | {line}" for line in _lines(of_worker)[-LINES_SHOWN:])
        if of_scheduler is not None:
            said = _lines(of_scheduler)
            marked = [line for line in said if line.startswith(SCHEDULER_MARKS)]
            chosen = marked or (said if of_worker is None else [])
            lines.extend(f"    | {line}" for line in chosen[-LINES_SHOWN:])
    if not count:
        return []
    title = "1 job did not finish:" if count == 1 else f"{count} jobs did not finish:"
    return ["", title, *lines, "Repeating the command continues where they stopped."]


def _newest(directory: Path, since: float) -> Path | None:
    logs = [path for path in directory.glob("*.log") if _written_since(path, since)]
    return max(logs, key=lambda path: path.stat().st_mtime, default=None)


def _written_since(path: Path, since: float) -> bool:
    return path.is_file() and path.stat().st_mtime >= since


def _lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines() if line.strip()]
