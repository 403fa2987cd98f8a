"""The built wheel carries the workflow: it analyses from any directory, without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_analysis_from_a_built_wheel(workplace, tmp_path):
    wheels = tmp_path / "wheels"
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)]
    subprocess.run(build, check=True, timeout=600)
    (wheel,) = wheels.glob("hvpflow-*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    words = [*("analyze", "--run", str(workplace.directory / "run"), "--checkpoints", "final.pt", "--output", "out")]
    words += ["--noise-samples", "1", "--random-samples", "1", "--data-case", "seen", "--device", "cpu", "--no-plots"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = "import hvpflow, sys; from hvpflow.cli import main; print(hvpflow.__file__); sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--cache-dir", str(workplace.directory / "cache")],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site)), "the wheel's package was used"
    assert (elsewhere / "out" / "summary.csv").is_file()
