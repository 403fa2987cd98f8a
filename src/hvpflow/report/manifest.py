"""The manifest of an analysis: what was measured, how, and in which file each checkpoint's samples lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from hvpflow.errors import HvpflowError
from hvpflow.files import fingerprint

VERSION = 1
CASES = ("seen", "unseen")


def build_manifest(
    *,
    run: str | Path,
    options: Mapping[str, Any],
    settings_digest: str,
    inspect_records: Sequence[Mapping[str, Any]],
    samples: Mapping[str, Mapping[str, Any]],
    environment: Mapping[str, Any],
    micro_batch_size: int,
    hvp_batch_size: int,
    effective_batch_tokens: int,
) -> dict[str, Any]:
    """Return the manifest: tiny-llm's keys in their order, then ours. Only `environment` varies between repeats.

    Args:
        run: the run directory as it shall be recorded.
        options: the analysis' options as asked for.
        settings_digest: names the directory of the measurements; equal digests may be compared.
        inspect_records: one for every checkpoint, aliases included.
        samples: samples records by file name relative to the manifest; one serves all its aliases.
        environment: software and hardware of this publication.
        micro_batch_size, hvp_batch_size: sequences.
        effective_batch_tokens: targets of one optimiser step, all workers together.

    Raises:
        HvpflowError: samples measured with different settings, data or cases; a checkpoint without samples.
    """
    _check_together(samples)
    files = {(record["result_key"], record["case"]): name for name, record in sorted(samples.items())}
    cases = [case for case in CASES if any(case == found for _, found in files)]
    data = [next(record["data"] for record in samples.values() if record["case"] == case) for case in cases]
    policies = [samples[files[key]].get("policy") for key in sorted(files)]
    return {
        "version": VERSION,
        "identity": fingerprint(
            {"version": VERSION, "run": str(run), "options": options, "settings": settings_digest, "data": data}
        ),
        "run": str(run),
        "options": dict(options),
        "policy": policies[0] if policies else None,
        "environment": dict(environment),
        "checkpoints": [
            _checkpoint(record, PurePosixPath(Path(run).as_posix()), files, cases)
            for record in sorted(inspect_records, key=lambda record: (record["tokens"], record["checkpoint"]))
        ],
        "micro_batch_size": micro_batch_size,
        "hvp_batch_size": hvp_batch_size,
        "effective_batch_tokens": effective_batch_tokens,
        "data": data,
        "settings_digest": settings_digest,
    }


def _checkpoint(
    record: Mapping[str, Any], run: PurePosixPath, files: Mapping[tuple[str, str], str], cases: Sequence[str]
) -> dict[str, Any]:
    key = record["result_key"]
    for case in cases:
        if (key, case) not in files:
            raise HvpflowError(
                f"{record['checkpoint']} has no {case} samples of its weights ({key[:12]}…): repeat the command to "
                "have it measured"
            )
    workers = [
        {"worker": worker["worker"], "path": str(run / worker["path"]), "weights_hash": worker["weights_hash"]}
        for worker in record.get("workers") or ()
    ]
    return {
        "path": str(run / record["checkpoint"]),
        "name": record["checkpoint"],
        **{name: record[name] for name in ("weights_hash", "tokens", "step", "epoch")},
        **({"workers": workers} if workers else {}),
        "result_key": key,
        "format": record.get("format"),
        "num_parameters": record.get("num_parameters"),
        "samples": {case: files[key, case] for case in cases},
    }


def _check_together(samples: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse samples that cannot stand in one table."""
    seen: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for name, record in sorted(samples.items()):
        if record["case"] not in CASES:
            raise HvpflowError(f"{name} is of the data case {record['case']!r}, expected one of {', '.join(CASES)}")
        other, first = seen.setdefault(record["case"], (name, record))
        for key in ("settings", "data"):
            if record.get(key) != first.get(key):
                raise HvpflowError(
                    f"{other} and {name} were measured with different {key} and cannot stand in one table: delete the "
                    "one that is out of date and repeat the command"
                )
    settings = {name: record.get("settings") for name, record in seen.values()}
    if len({fingerprint(value) for value in settings.values()}) > 1:
        raise HvpflowError(f"{' and '.join(settings)} were measured with different settings: repeat the command")
