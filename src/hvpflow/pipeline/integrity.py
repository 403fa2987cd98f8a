"""Damage in an output directory: records that are not as they were written go, and the workflow makes them again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hvpflow.errors import HvpflowError
from hvpflow.files import read_record, remove_leftovers, sha256_file

RECORDS = ("inspect/*.json", "work/*/*/*/*.json", "samples/*.json", "manifest.json")
LEFTOVER_SECONDS = 24 * 3600.0
"""Age at which a temporary file is nobody's any more; jobs of a cluster may outlive the process that sent them."""


def remove_damaged(output: Path, say: Callable[[str], None]) -> None:
    """Remove damaged records of every kind, and a summary that is not the one its manifest describes.

    All are made from what lies beneath them: samples from measurements, measurements from the store.
    """
    for pattern in RECORDS:
        for path in sorted(output.glob(pattern)):
            if damage := _damage(path):
                path.unlink(missing_ok=True)
                say(f"{path} is damaged ({damage}); it is made again")
    for directory in (output, *output.glob("store/*")):
        remove_leftovers(directory, seconds=LEFTOVER_SECONDS)


def _damage(path: Path) -> str:
    """What is wrong with a record; "" if nothing is."""
    try:
        record = read_record(path)
    except HvpflowError as error:
        return "" if isinstance(error.__cause__, OSError) else "its content is not what was written"
    summary = path.parent / "summary.csv"
    if path.name == "manifest.json" and summary.is_file() and sha256_file(summary) != record.get("summary_sha256"):
        return "summary.csv is not the one that it describes"
    return ""
