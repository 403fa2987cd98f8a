"""The gradient norms that a training logged, for drawing beside the measured ones."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from typing import Any

from hvpflow.errors import HvpflowError

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class TrainingNorms:
    """Gradient norm before clipping by training tokens, ascending; the mean over workers in a packed run."""

    tokens: list[float]
    values: list[float]
    num_workers: int = 1


def read_training_norms(run_directory: Path) -> TrainingNorms:
    """Read the `train` rows of a run's metrics.jsonl (tiny-llm's has the same form).

    A packed run logs each worker's norm and their maximum; the mean is taken, as the measured norms are means over
    workers. Of rows for the same position, as a resumed training leaves them, the last counts. A last line that was cut
    short is left out.

    Raises:
        HvpflowError: the file is missing or unreadable, a line is no JSON, or no row holds a gradient norm.
    """
    path = run_directory / METRICS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise HvpflowError(f"cannot read the logged training norms from {path}: {reason}") from error
    norms: dict[float, float] = {}
    workers = 1
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise HvpflowError(f"line {number} of {path} is not valid JSON: {error}") from error
        if not isinstance(row, dict) or row.get("event") != "train":
            continue
        local = row.get("local_grad_norms")
        values = [row.get("grad_norm")] if local is None else local
        if _is_finite(row.get("tokens")) and isinstance(values, list) and values and all(map(_is_finite, values)):
            norms[row["tokens"]] = fsum(values) / len(values)
            workers = max(workers, len(values))
    if not norms:
        raise HvpflowError(f"{path} logs no gradient norms; draw the figures without training norms")
    tokens = sorted(norms)
    return TrainingNorms(tokens, [norms[position] for position in tokens], workers)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
