"""Odd names of directories work from end to end or are refused in one line, and nothing in them is ever run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from faults_cases import MEASURED, TALLY, Bench
from workflow_cases import environment

NAMES = {
    "blanks": " a  b ",
    "unicode": "läufe 運行 🙂",
    "leading dashes": "--output",
    "shell words": "a; touch executed #$(touch executed)`touch executed`",
    "quotes": 'it\'s "so" | & > x',
    "wildcards": "[a] * ? ~ !x",
    "backslash": "a\\b",
    "percent and dollar": "%s $HOME %(x)d $(HOME)",
}
"""``{`` and ``}`` are refused, see ``test_braces_are_refused``."""


def analyze(place: Path, run: str, cache: str, output: str, *more: str) -> subprocess.CompletedProcess[str]:
    words = [f"--run={run}", f"--cache-dir={cache}", f"--output={output}", "--checkpoints", MEASURED[0], *more]
    words += ["--noise-samples", "1", "--random-samples", "1", "--data-case", "seen", "--device", "cpu", "--no-plots"]
    return subprocess.run(
        [sys.executable, "-m", "hvpflow.cli", "analyze", *words, "--no-compile-hvp"],
        **{"cwd": place, "env": environment(place) | {"OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True},
    )  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("name", [pytest.param(value, id=key) for key, value in NAMES.items()])
def test_steps(bench: Bench, tmp_path: Path, name: str) -> None:
    """Prepare, train, inspect, measure, … with everything in directories of that name."""
    place = tmp_path / name
    place.mkdir()
    mapping = yaml.safe_load((bench.baseline / "config.yaml").read_text(encoding="utf-8"))
    mapping["output"] = f"{name}/results"
    mapping["data"]["cache_dir"] = f"{name}/cache"
    mapping["runtime"]["output_dir"] = f"{name}/run"
    mapping["corpus"]["files"] = ["text/*.txt"]
    mapping["analysis"] |= {"checkpoints": [MEASURED[0]], "data_case": "seen"}
    (place / "config.yaml").write_text(yaml.safe_dump(mapping), encoding="utf-8")
    shutil.copytree(bench.baseline / "text", place / "text")
    for step in bench.steps:
        others = any(part in word for word in step.words for part in ("epoch-004", "final", "unseen"))
        if step.name == "figures" or others:
            continue
        answer = bench.server.run(place, step.words)
        assert answer["status"] == 0, f"{step.words}\n{bench.server.said()}"
    assert (place / name / "results" / "summary.csv").is_file()
    assert not list(tmp_path.rglob("executed"))
    TALLY["odd names"] += 1


def test_workflow(bench: Bench) -> None:
    """Run, cache and output each with all of it, through Snakemake and its shell."""
    bench.restore()
    everything = "".join(NAMES.values()).replace("/", "")
    place = bench.place / everything
    place.mkdir()
    (bench.place / "disk" / "run").rename(place / f"run {everything}")
    (bench.place / "disk" / "cache").rename(place / f"cache {everything}")
    done = analyze(place, f"run {everything}", f"cache {everything}", f"-- {everything}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (place / f"-- {everything}" / "summary.csv").is_file()
    assert not list(bench.place.rglob("executed"))
    again = analyze(place, f"run {everything}", f"cache {everything}", f"-- {everything}")
    assert again.returncode == 0 and "Nothing to be done" in again.stdout + again.stderr


@pytest.mark.parametrize("name", ["a{b}", "{config}", "a\nb"])
def test_braces_are_refused(bench: Bench, name: str) -> None:
    bench.restore()
    (bench.place / "disk" / "run").rename(bench.place / "disk" / name)
    words = ("analyze", "--run", f"disk/{name}", "--checkpoints", "all", "--output", "out")
    assert bench.server.run(bench.place, words, program="cli")["status"] == 1
    assert "brace or a line break" in bench.server.said()
    assert not (bench.place / "out").exists()


@pytest.mark.parametrize("name", ["final.pt; touch executed", "$(touch executed).pt", "epoch-001.safetensors\n"])
def test_checkpoint_names_are_not_run(bench: Bench, name: str) -> None:
    """Files in the run directory that are no checkpoints' names are not seen at all."""
    bench.restore()
    run = bench.place / "disk" / "run"
    (run / name).write_bytes((run / "final.pt").read_bytes())
    words = ("analyze", "--run", "disk/run", "--checkpoints", name, "--output", "out")
    assert bench.server.run(bench.place, words, program="cli")["status"] == 1
    assert "has no checkpoint" in bench.refused(bench.steps[0], name)
    assert not list(bench.place.rglob("executed"))
