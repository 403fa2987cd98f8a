"""The table of an analysis: a row for every checkpoint, aliases included, and data case."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvpflow.errors import HvpflowError
from hvpflow.files import read_record, write_text
from hvpflow.report.manifest import CASES, VERSION
from hvpflow.report.statistics import TINY_LLM_STATISTICS

# tiny-llm's columns in its order; ours follow.
TINY_LLM_COLUMNS = ("checkpoint", "tokens", "epoch", "step", "case", "weights_hash", "result_key", *TINY_LLM_STATISTICS)


def summary_rows(manifest: Mapping[str, Any], samples: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the manifest's order, seen before unseen.

    Args:
        manifest: as `build_manifest` returns it.
        samples: samples records by the file names that the manifest gives.

    Raises:
        HvpflowError: a samples file is absent, or of other weights or another case than the manifest says.
    """
    rows = []
    for entry in manifest["checkpoints"]:
        for case in (case for case in CASES if case in entry["samples"]):
            name = entry["samples"][case]
            record = samples.get(name)
            if record is None:
                raise HvpflowError(f"{name}, the {case} samples of {entry['name']}, is absent: repeat the analysis")
            if record["result_key"] != entry["result_key"] or record["case"] != case:
                raise HvpflowError(
                    f"{name} holds the {record['case']} samples of {record['result_key'][:12]}…, expected the {case} "
                    f"ones of {entry['name']} ({entry['result_key'][:12]}…): delete it and repeat the analysis"
                )
            row = {
                "checkpoint": entry["name"],
                "tokens": entry["tokens"],
                "epoch": entry["epoch"],
                "step": entry["step"],
            }
            row |= {"case": case, "weights_hash": entry["weights_hash"], "result_key": entry["result_key"]}
            rows.append(row | record["statistics"])
    return rows


def read_rows(manifest_path: Path) -> list[dict[str, Any]]:
    """Read the summary's rows from a manifest and the samples files that it names.

    Raises:
        HvpflowError: a file is missing or damaged, or a samples file is not the one that the manifest describes.
    """
    manifest = read_record(manifest_path)
    if manifest.get("version") != VERSION or "checkpoints" not in manifest:
        raise HvpflowError(f"{manifest_path} is no analysis manifest of version {VERSION}: analyse the run again")
    directory, samples = manifest_path.parent.resolve(), {}
    for name in sorted({name for entry in manifest["checkpoints"] for name in entry["samples"].values()}):
        path = (directory / name).resolve()
        if not path.is_relative_to(directory):
            raise HvpflowError(f"{manifest_path} names samples outside its directory: {name}")
        samples[name] = read_record(path)
    return summary_rows(manifest, samples)


def columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The union of the rows' keys: tiny-llm's in their order, then ours in order of appearance."""
    present = dict.fromkeys(key for row in rows for key in row)
    return [
        *(name for name in TINY_LLM_COLUMNS if name in present),
        *(name for name in present if name not in TINY_LLM_COLUMNS),
    ]


def write_summary(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the table as CSV (RFC 4180: comma, CRLF, header), floats as Python's repr, null as an empty field."""
    buffer = io.StringIO(newline="")
    # Python's csv module writes a float by repr and None as nothing.
    writer = csv.DictWriter(buffer, columns(rows), restval="", lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, buffer.getvalue())
