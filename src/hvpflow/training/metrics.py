"""What a training logs: ``metrics.jsonl``, and the contents of result.json and environment.json.

``metrics.jsonl`` holds one JSON object a line. A ``train`` row stands for the updates since the row before it: its loss
is their token-weighted mean, its gradient norm (before clipping) and learning rate are those of the last of them.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hvpflow
from hvpflow.errors import HvpflowError
from hvpflow.files import write_text


class MetricsLog:
    """``metrics.jsonl``, appended to row by row."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row and hand it to the operating system."""
        try:
            with self.path.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(row, allow_nan=False) + "\n")
        except OSError as error:
            raise HvpflowError(f"cannot write {self.path}: {error.strerror or error}") from error

    def rows(self) -> list[dict[str, Any]]:
        """All complete rows; a line that a crash cut short is left out."""
        rows = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    rows.append(row)
        return rows

    def rewind(self, step: int, completed_epochs: int) -> list[dict[str, Any]]:
        """Drop the rows later than a position, as a training that resumes there writes them again; returns the rest."""
        kept = [row for row in self.rows() if _before(row, step, completed_epochs)]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        return kept


@dataclass
class Interval:
    """Sums over the updates since the last ``train`` row."""

    loss_sum: float = 0.0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, *, loss: float, tokens: int, seconds: float) -> None:
        """Count one update of mean loss ``loss`` over ``tokens`` targets."""
        self.loss_sum += loss * tokens
        self.tokens += tokens
        self.seconds += seconds

    def loss(self) -> float:
        """Mean loss per token."""
        return self.loss_sum / self.tokens


def evaluation_metrics(loss: float, tokens: int, seconds: float, split: str, complete: bool) -> dict[str, Any]:
    """The figures of one validation; ``complete`` tells whether the cache holds the corpus' whole validation split."""
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "tokens": tokens,
        "seconds": seconds,
        "split": split,
        "validation_complete": complete,
    }


def environment(device: torch.device) -> dict[str, Any]:
    """Software and hardware that a training ran on."""
    cuda = device.type == "cuda"
    return {
        "hvpflow": hvpflow.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": platform.machine(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory the GPU has held so far; 0 on CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _before(row: Mapping[str, Any], step: int, completed_epochs: int) -> bool:
    if row.get("event") == "train":
        return row.get("step", math.inf) <= step
    return row.get("event") == "validation" and row.get("epoch", math.inf) <= completed_epochs
