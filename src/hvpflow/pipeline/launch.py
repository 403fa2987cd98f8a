"""An analysis as two runs of Snakemake: every checkpoint inspected first, then the measurements."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from hvpflow.errors import HvpflowError
from hvpflow.interruption import Interrupted
from hvpflow.pipeline.holding import held_output
from hvpflow.pipeline.integrity import remove_damaged
from hvpflow.pipeline.output import CONFIG_NAME, check_owner, claim_output, closing_words
from hvpflow.pipeline.plan import Plan, make_plan
from hvpflow.pipeline.reporting import ERROR_PREFIX, INTERRUPTED_PREFIX
from hvpflow.pipeline.settings import Config, workflow_root

LAUNCHED = "HVPFLOW_LAUNCHED"
"""Environment variable that tells the workflow to leave the closing words to its launcher."""
FAILED_LOGS_SHOWN = 5
LOG_LINES_SHOWN = 5


def run_analysis(config: Config, options: Sequence[str], *, cores: int | None, dry_run: bool) -> str:
    """Analyse by the workflow, in the output directory, so that two analyses share no lock.

    Args:
        config: with absolute paths.
        options: further Snakemake options.
        cores: what Snakemake may use; None where its profile submits to a cluster.
        dry_run: list the pending jobs, and write nothing.

    Returns:
        The closing words: which files to look at.

    Raises:
        HvpflowError: refused before computing, or a job failed (with the last lines of its log).
    """
    plan = make_plan(config)
    check_owner(plan)
    for note in plan.notes:
        print(f"note: {note}", file=sys.stderr)
    if dry_run:
        with tempfile.TemporaryDirectory() as directory:
            configuration = Path(directory) / CONFIG_NAME
            configuration.write_text(yaml.safe_dump(config.to_mapping(), sort_keys=False), encoding="utf-8")
            work = plan.output if plan.output.is_dir() else Path(directory)
            _snakemake(plan, configuration, work, ["--dry-run", *options], cores=cores)
        return ""
    with held_output(plan.output, unlock="--unlock" in options) as held:
        remove_damaged(plan.output, lambda line: print(line, file=sys.stderr, flush=True))
        claim_output(plan)
        configuration = plan.output / CONFIG_NAME
        for targets in (["inspected"], []):
            _snakemake(plan, configuration, plan.output, [*targets, *options], cores=cores, held=(held,))
    return closing_words(plan)


def _snakemake(
    plan: Plan,
    configuration: Path,
    directory: Path,
    options: Sequence[str],
    *,
    cores: int | None,
    held: Sequence[int] = (),
) -> None:
    """Run Snakemake once; it inherits the open files ``held``, so that the output is held as long as it works."""
    root = workflow_root()
    command = [
        *(sys.executable, "-m", "snakemake", "--snakefile", str(root / "Snakefile")),
        *("--directory", str(directory), "--configfile", str(configuration)),
        *("--workflow-profile", str(root / "profiles" / "default")),
        *(("--cores", str(cores)) if cores is not None else ()),
        *options,
    ]
    started = time.time()
    process = subprocess.Popen(command, env=os.environ | {"PYTHONUNBUFFERED": "1", LAUNCHED: "1"}, pass_fds=held)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        # The terminal sent the signal to Snakemake too; it ends its jobs, which save their progress.
        process.wait()
        raise
    if status != 0:
        raise failure_of(plan.output / "logs", since=started, status=status)


def failure_of(logs: Path, *, since: float, status: int) -> HvpflowError:
    """What to say of a failed run of the workflow: each failed job's message, from the logs written since it began."""
    interrupted, said = [], []
    for log in sorted(logs.rglob("*.log")):
        if log.stat().st_mtime < since - 1:
            continue
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = lines[-1] if lines else ""
        if last.startswith(INTERRUPTED_PREFIX):
            interrupted.append(last.removeprefix(INTERRUPTED_PREFIX))
        elif last.startswith(ERROR_PREFIX):
            said.append(last.removeprefix(ERROR_PREFIX))
    if said:
        return HvpflowError("; ".join(dict.fromkeys(said[:FAILED_LOGS_SHOWN])))
    if interrupted:
        return Interrupted(interrupted[0])
    return HvpflowError(f"Snakemake ended with status {status}; its messages are above, job logs under {logs}")
