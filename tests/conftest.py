"""Fixtures that every room's tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Models this small gain nothing from a second thread, and tests run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def reference() -> Path:
    """Runs, a token cache and results made by the peer system; absent from a plain clone."""
    root = Path(__file__).resolve().parents[1]
    directory = Path(os.environ.get("HVPFLOW_REFERENCE", root.parent / "shared" / "reference"))
    if not (directory / "results").is_dir():
        pytest.skip(f"no reference results at {directory}; set HVPFLOW_REFERENCE to their directory")
    return directory
