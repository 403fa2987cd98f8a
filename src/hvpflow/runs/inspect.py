"""What an analysis knows of a checkpoint without opening it again: a record of its identity and position."""

from __future__ import annotations

from typing import Any

from hvpflow.runs.checkpoints import read_checkpoint, result_key, weights_hash
from hvpflow.runs.run import Run

INSPECT_SCHEMA_VERSION = 1


def inspect_checkpoint(run: Run, name: str, *, workers: bool = True) -> dict[str, Any]:
    """Check a checkpoint completely and describe it.

    The record depends on the checkpoint's content alone (no times, no absolute paths), so an unchanged checkpoint
    gives an identical record. ``workers`` is None for ordinary runs and where workers are not asked for; then
    ``result_key`` is the weights hash.

    Raises:
        HvpflowError: see ``read_checkpoint``.
    """
    checkpoint = read_checkpoint(run, name, workers=workers)
    average_hash = weights_hash(checkpoint.weights)
    records = None
    if checkpoint.workers is not None and checkpoint.worker_paths is not None:
        records = [
            {"worker": number, "path": path, "weights_hash": weights_hash(weights)}
            for number, (path, weights) in enumerate(zip(checkpoint.worker_paths, checkpoint.workers, strict=True))
        ]
    worker_hashes = None if records is None else [str(record["weights_hash"]) for record in records]
    return {
        "schema_version": INSPECT_SCHEMA_VERSION,
        "checkpoint": name,
        "format": checkpoint.format,
        "weights_hash": average_hash,
        "result_key": result_key(average_hash, worker_hashes),
        "tokens": checkpoint.tokens,
        "step": checkpoint.step,
        "epoch": checkpoint.epoch,
        "cursor": checkpoint.cursor,
        "num_parameters": run.recipe.num_parameters,
        "workers": records,
    }
