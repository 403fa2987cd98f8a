"""Several GPUs in one machine, with stand-ins that only their locks know."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from workflow_cases import ROOT, Workplace, environment

from hvpflow.files import read_json

STAND_INS = ("gpu-a", "gpu-b", "gpu-c", "gpu-d")


def holders(directory: Path) -> dict[str, int]:
    """Process that wrote itself into each device's lock file."""
    texts = {path.stem: path.read_text(encoding="utf-8").strip() for path in directory.glob("*.lock")}
    return {name: int(text) for name, text in texts.items() if text}


def test_four_workers_at_once_have_a_device_each(workplace: Workplace) -> None:
    """Every worker is stopped as soon as it has its device: at the end all four hold one at the same time."""
    shutil.rmtree(workplace.directory / "results")
    workplace.change("analysis", device="auto")
    scratch = workplace.directory / "scratch"
    scratch.mkdir()
    variables = {"HVPFLOW_STAND_IN_GPUS": ",".join(STAND_INS), "TMPDIR": str(scratch)}
    command = [
        *(sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "-j4", "--resources", "gpu=4"),
        *("--directory", str(workplace.directory), "--configfile", str(workplace.config)),
    ]
    with (workplace.directory / "said.txt").open("w", encoding="utf-8") as said:
        process = subprocess.Popen(
            command,
            cwd=workplace.directory,
            env=environment(workplace.directory) | variables,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        locks, stopped = scratch / f"hvpflow-{os.getuid()}-gpus", {}
        deadline = time.monotonic() + 120
        while len(stopped) < len(STAND_INS) and process.poll() is None and time.monotonic() < deadline:
            for name, pid in holders(locks).items():
                if name not in stopped:
                    os.kill(pid, signal.SIGSTOP)
                    stopped[name] = pid
            time.sleep(0.005)
        for pid in stopped.values():
            os.kill(pid, signal.SIGCONT)
        status = process.wait(120)
    text = (workplace.directory / "said.txt").read_text(encoding="utf-8")
    assert status == 0, text
    assert sorted(stopped) == sorted(STAND_INS)
    assert len(set(stopped.values())) == len(STAND_INS)
    records = list((workplace.directory / "results" / "work").rglob("0.json"))
    assert [read_json(path)["policy"]["threads"] for path in records] == [1] * 4
