"""Processes of the tests on Slurm: who submits, and the workers inside the jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from workflow_cases import environment

PATIENCE = 300.0
"""Seconds to wait for anything at most."""


def _heed_interrupts() -> None:
    """A shell's background job, and all it starts, ignores SIGINT; who started the tests should not matter."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Submission:
    """A submitting process in the background, in a session of its own as a terminal would give it."""

    def __init__(self, command: list[str], directory: Path, output: Path) -> None:
        self.output = output
        with output.open("w", encoding="utf-8") as handle:
            self.process = subprocess.Popen(
                command,
                cwd=directory,
                env=environment(output.parent),
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_heed_interrupts,
            )

    def end(self) -> int:
        """Wait for its end and return its exit status."""
        return self.process.wait(PATIENCE)

    def said(self) -> str:
        return self.output.read_text(encoding="utf-8")

    def interrupt(self) -> None:
        """Ctrl-C: the signal goes to all of the session."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait_for(self, ready: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"waited in vain for {what}:\n{self.said()}")
            time.sleep(0.02)


class Worker:
    """The Python process inside a Slurm job that does a step's work."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        self.job = next(word for word in variables if word.startswith(b"SLURM_JOB_ID=")).split(b"=")[1].decode()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def find_worker(*words: str) -> Worker | None:
    """The running step with these words on its command line, inside a Slurm job."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if command[1:3] == ["-m", "hvpflow.pipeline.steps"] and set(words) <= set(command):
                return Worker(int(entry.name))
        except (OSError, StopIteration):
            continue  # gone meanwhile, or not in a job
    return None
