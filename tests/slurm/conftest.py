"""A Slurm of two nodes for the session, and the workflow submitted to it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cases import Submission
from slurm_lab import Lab, unavailable
from workflow_cases import ROOT, Workplace, tiny_mapping, write_text_files

PROFILE = (
    *("--profile", "slurm", "--slurm-init-seconds-before-status-checks", "3", "--latency-wait", "5"),
    *("--set-threads", "measure=1", "train=1"),
)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    if not os.environ.get("HVPFLOW_SLURM_TESTS"):
        pytest.skip("brings up a Slurm on this machine: set HVPFLOW_SLURM_TESTS=1 to let it")
    if reason := unavailable():
        pytest.skip(f"no Slurm lab here: {reason}")
    with Lab() as running:
        yield running


@pytest.fixture(scope="session")
def undisturbed(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The analysis by one local process with one thread, which no Slurm had a part in. Never change it."""
    place = Workplace(tmp_path_factory.mktemp("undisturbed"))
    write_text_files(place.directory / "text")
    mapping = tiny_mapping()
    # A GPU where there is one: the jobs then ask Slurm for one, and find none.
    mapping["analysis"] |= {
        "device": "auto",
        "cpu_threads": 1,
        "checkpoints": ["epoch-001.safetensors", "final.pt"],
    }
    place.write_config(mapping)
    place.snakemake()
    return place.directory


@pytest.fixture
def trained(undisturbed: Path, tmp_path: Path) -> Workplace:
    """A working directory with the trained run, of which nothing was measured yet."""
    directory = tmp_path / "trained"
    ignore = shutil.ignore_patterns("results", ".snakemake", ".cache-home")
    shutil.copytree(undisturbed, directory, copy_function=shutil.copy2, ignore=ignore)
    place = Workplace(directory)
    mapping = {"run": "run", "output": "results", "analysis": place.read_config()["analysis"]}
    mapping["analysis"]["cache_dir"] = "cache"
    place.write_config(mapping)
    return place


@pytest.fixture
def submit() -> Iterator[Callable[..., Submission]]:
    """Start a submitting process for a working directory: Snakemake from the repository's root, or a command given."""
    begun: list[Submission] = []

    def start(place: Workplace, *options: str, command: list[str] | None = None) -> Submission:
        from_root = [
            *(sys.executable, "-m", "snakemake", *PROFILE),
            *("--directory", str(place.directory), "--configfile", str(place.config), *options),
        ]
        output = place.directory / f"said-{len(begun)}.txt"
        submission = Submission(command or from_root, place.directory if command else ROOT, output)
        begun.append(submission)
        return submission

    yield start
    for submission in begun:
        if submission.process.poll() is None:
            os.killpg(submission.process.pid, signal.SIGKILL)
            submission.process.wait()
