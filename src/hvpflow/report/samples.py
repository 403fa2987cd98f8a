"""All shards of one (checkpoint, case) joined into its samples record, with statistics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hvpflow.errors import HvpflowError
from hvpflow.files import fingerprint
from hvpflow.report.statistics import statistics, warnings

SCHEMA_VERSION = 1

# Shards that each computed the mean gradient may differ in rounding (bfloat16 at worst), never in more.
MEAN_GRADIENT_TOLERANCE = 1e-2

# What shards of one (checkpoint, case) share; the rest of a record is the shard's own.
_SHARED = ("settings", "weights_hash", "result_key", "case", "data", "dimension", "num_shards")
_REQUIRED = (
    "schema_version",
    "identity",
    "checkpoint",
    "shard",
    *_SHARED,
    "mean_gradient",
    "noise",
    "random",
    "timing",
)

_NOISE_KEYS = (
    *("batch_index", "batch", "quadratic", "noise_norm_squared", "gradient_norm", "gradient_seconds", "hvp_seconds"),
    "gauss_newton",
)
_RANDOM_KEYS = ("index", "quadratic", "hvp_seconds", "gauss_newton")
_CONSENSUS_KEYS = (
    *("worker", "norm_squared", "norm", "quadratic", "normalized_alignment", "hvp_seconds", "total_seconds"),
    "gauss_newton",
)


def merge_shards(
    records: Sequence[Mapping[str, Any]], inspect_record: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the samples record of one (checkpoint, case): tiny-llm's keys in their order, then ours.

    Args:
        records: the measure records of all shards, in any order.
        inspect_record: what the checkpoint was found to hold; the records may have been measured under an alias.

    Raises:
        HvpflowError: a shard or sample is missing or there twice, the shards are of different weights, data or
            settings, a number is not finite, or the checkpoint holds other weights than were measured.
    """
    shards = _ordered(records)
    first = shards[0]
    label = f"{first['checkpoint']} ({first['case']})"
    for shard in shards[1:]:
        _check_same_identity(first, shard, label)
    if inspect_record is not None:
        _check_weights(first, inspect_record)
    mean_gradient, notes = _mean_gradient(shards, label)

    noise = _collect(shards, "noise", "batch_index", _NOISE_KEYS, label)
    random = _collect(shards, "random", "index", _RANDOM_KEYS, label)
    consensus = _collect(shards, "consensus", "worker", _CONSENSUS_KEYS, label)
    _check_complete(first, noise, random, consensus, inspect_record, label)

    merged: dict[str, Any] = {
        "identity": fingerprint({key: first[key] for key in _SHARED if key != "num_shards"}),
        "weights_hash": first["weights_hash"],
        "result_key": first["result_key"],
        "case": first["case"],
        "data": first["data"],
        "statistics": {},
        **({"consensus": consensus} if consensus else {}),
        "noise": noise,
        "random": random,
        "timing": _total_timing(shards),
        "schema_version": SCHEMA_VERSION,
        "checkpoint": first["checkpoint"],
        "dimension": first["dimension"],
        "mean_gradient": mean_gradient,
        "settings": first["settings"],
        "policy": first.get("policy"),
        "shards": [
            {key: shard.get(key) for key in ("shard", "identity", "policy", "other_policies", "engine_check", "timing")}
            for shard in shards
        ],
    }
    merged["statistics"] = statistics(merged)
    merged["warnings"] = [*warnings(merged["statistics"]), *notes, *_policy_notes(shards)]
    return merged


def _ordered(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records by shard number, after checking that each shard is there once."""
    if not records:
        raise HvpflowError("no measurements to join: expected at least one shard's record")
    for record in records:
        absent = [key for key in _REQUIRED if key not in record]
        if absent:
            raise HvpflowError(f"a measurement record lacks {', '.join(absent)}: delete it to have it measured again")
        if record["schema_version"] != SCHEMA_VERSION:
            raise HvpflowError(
                f"the measurement of {record['checkpoint']} ({record['case']}) has schema version "
                f"{record['schema_version']}, expected {SCHEMA_VERSION}: delete it to have it measured again"
            )
    label = f"{records[0]['checkpoint']} ({records[0]['case']})"
    numbers, expected = sorted(record["shard"] for record in records), range(records[0]["num_shards"])
    missing = [number for number in expected if number not in numbers]
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    foreign = [number for number in numbers if number not in expected]
    for numbers_at_fault, fault in ((missing, "missing"), (twice, "there twice"), (foreign, "not expected")):
        if numbers_at_fault:
            raise HvpflowError(
                f"shards of {label}: {_listed(numbers_at_fault)} {fault}; expected each of 0 to {len(expected) - 1} "
                "once: repeat the command to have them measured"
            )
    return sorted(records, key=lambda record: record["shard"])


def _check_same_identity(first: Mapping[str, Any], other: Mapping[str, Any], label: str) -> None:
    for key in _SHARED:
        difference = _difference(first[key], other[key], key)
        if difference:
            name, one, two = difference
            raise HvpflowError(
                f"shards {first['shard']} and {other['shard']} of {label} do not belong together: {name} is {one!r} in "
                f"one and {two!r} in the other; delete the one that is out of date and repeat the command"
            )


def _check_weights(record: Mapping[str, Any], inspect_record: Mapping[str, Any]) -> None:
    for key, what in (("weights_hash", "weights"), ("result_key", "workers")):
        if record[key] != inspect_record[key]:
            raise HvpflowError(
                f"{inspect_record['checkpoint']} holds other {what} ({inspect_record[key][:12]}…) than were measured "
                f"({record[key][:12]}…, from {record['checkpoint']}): repeat the command to have it measured"
            )


def _mean_gradient(shards: Sequence[Mapping[str, Any]], label: str) -> tuple[dict[str, Any], list[str]]:
    """The mean gradient's record, and a note where shards used ones that differ in rounding."""
    known = [shard["mean_gradient"] for shard in shards if shard["mean_gradient"] is not None]
    if not known:
        raise HvpflowError(
            f"no shard of {label} holds the mean gradient's norm: delete them to have them measured again"
        )
    norms = [_finite(entry["norm"], f"mean_gradient.norm of {label}") for entry in known]
    if max(norms) - min(norms) > MEAN_GRADIENT_TOLERANCE * max(norms):
        raise HvpflowError(
            f"the shards of {label} disagree on the mean gradient's norm ({min(norms)!r} to {max(norms)!r}, more than "
            "rounding explains): delete them to have them measured again"
        )
    if len({entry.get("sha256") for entry in known}) > 1:
        return dict(known[0]), ["the shards' mean gradients differ in rounding; the first shard's norm is given"]
    return dict(known[0]), []


def _collect(
    shards: Sequence[Mapping[str, Any]], kind: str, number: str, keys: tuple[str, ...], label: str
) -> list[dict[str, Any]]:
    """One kind's directions of all shards, by number, tiny-llm's keys first; each once and all numbers finite."""
    rows = sorted((row for shard in shards for row in shard.get(kind) or ()), key=lambda row: row[number])
    for before, row in itertools.pairwise(rows):
        if before[number] == row[number]:
            raise HvpflowError(
                f"{kind} direction {row[number]} of {label} is there twice: delete its shards to have it measured again"
            )
    for row in rows:
        for key, value in row.items():
            if isinstance(value, float):
                _finite(value, f"{key} of {kind} direction {row[number]} of {label}")
    return [{key: row.get(key) for key in keys} | {key: row[key] for key in row if key not in keys} for row in rows]


def _check_complete(
    record: Mapping[str, Any],
    noise: Sequence[Mapping[str, Any]],
    random: Sequence[Mapping[str, Any]],
    consensus: Sequence[Mapping[str, Any]],
    inspect_record: Mapping[str, Any] | None,
    label: str,
) -> None:
    """Refuse a record with fewer or other directions than its settings ask for."""
    settings, population = record["settings"], record["data"]["available_noise_batches"]
    wanted = population if settings["noise_samples"] == "all" else min(settings["noise_samples"], population)
    outside = [row["batch_index"] for row in noise if not 0 <= row["batch_index"] < population]
    if len(noise) != wanted or outside:
        raise HvpflowError(
            f"{label} has {len(noise)} noise directions, expected {wanted} of the epoch's {population}"
            + (f" (not among them: {_listed(outside)})" if outside else "")
            + ": repeat the command to have them measured"
        )
    counts = [("random", "index", random, settings["random_samples"])]
    workers = None if inspect_record is None else inspect_record.get("workers")
    if settings["consensus"] and workers:
        counts.append(("consensus", "worker", consensus, len(workers)))
    elif not settings["consensus"]:
        counts.append(("consensus", "worker", consensus, 0))
    else:
        counts.append(("consensus", "worker", consensus, len(consensus)))
    for kind, number, rows, count in counts:
        if [row[number] for row in rows] != list(range(count)):
            raise HvpflowError(
                f"{label} has the {kind} directions {_listed([row[number] for row in rows])}, expected {count} from 0 "
                "on: repeat the command to have them measured"
            )


def _total_timing(shards: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of all shards' work, whichever ran at the same time; a mean gradient that they shared counts once."""
    means = {
        (entry.get("sha256"), entry["seconds"]) for shard in shards if (entry := shard["mean_gradient"]) is not None
    }
    mean_seconds = math.fsum(seconds for _, seconds in means)
    rest = [
        shard["timing"]["total_seconds"] - (shard["timing"].get("mean_gradient_seconds") or 0.0) for shard in shards
    ]
    process = [shard["timing"].get("process_seconds", shard["timing"]["total_seconds"]) for shard in shards]
    return {
        "mean_gradient_seconds": mean_seconds,
        "total_seconds": math.fsum([mean_seconds, *rest]),
        "process_seconds": math.fsum(process),
    }


def _policy_notes(shards: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say where directions were measured under different numerical policies, for example on different devices."""
    policies = [policy for shard in shards for policy in (shard.get("policy"), *(shard.get("other_policies") or ()))]
    notes = []
    for policy in policies[1:]:
        difference = _difference(_comparable(policies[0]), _comparable(policy), "policy")
        if difference:
            name, one, two = difference
            notes.append(f"not all directions were measured alike: {name} is {one!r} for some and {two!r} for others")
    return list(dict.fromkeys(notes))


def _comparable(policy: Mapping[str, Any] | None) -> dict[str, Any]:
    """A policy without the size of its stacks, in which a small last shard differs from the rest."""
    return {key: value for key, value in (policy or {}).items() if key != "directions_per_pass"}


def _difference(one: Any, two: Any, name: str) -> tuple[str, Any, Any] | None:
    """The dotted name and both values of the first entry in which two JSON values differ."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        for key in [*one, *(key for key in two if key not in one)]:
            found = _difference(one.get(key), two.get(key), f"{name}.{key}")
            if found:
                return found
        return None
    return None if one == two else (name, one, two)


def _finite(value: float, what: str) -> float:
    if not math.isfinite(value):
        raise HvpflowError(f"{what} is {value}: delete the record to have it measured again")
    return value


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    return (shown or "none") + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
