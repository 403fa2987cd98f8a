"""The record of one shard: its fields, its identity, and the check that a file holds a sound one. Torch-free.

All quadratic forms are of the epoch's token-mean loss. D is the number of unique trainable parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from hvpflow.errors import HvpflowError
from hvpflow.files import fingerprint
from hvpflow.measure.settings import MEASUREMENT_VERSION, MeasureSettings
from hvpflow.runs.recipe import Recipe
from hvpflow.typed import to_mapping

SCHEMA_VERSION = 1


class MeanGradientRecord(TypedDict):
    """ḡ of the whole epoch; ``sha256`` names its exact bits, on which every noise direction depends."""

    norm: float
    loss: float
    sha256: str
    seconds: float


class NoiseRecord(TypedDict):
    """vᵢ = gᵢ − ḡ of one effective batch (one worker's rows of it)."""

    batch_index: int
    batch: dict[str, int]
    quadratic: float
    gauss_newton: float
    noise_norm_squared: float
    gradient_norm: float
    gradient_seconds: float
    hvp_seconds: float


class RandomRecord(TypedDict):
    """A Rademacher direction; its squared norm is D."""

    index: int
    quadratic: float
    gauss_newton: float
    hvp_seconds: float


class ConsensusRecord(TypedDict):
    """e_w = x_w − x̄ of one worker; the alignment is null where the norm is 0."""

    worker: int
    norm_squared: float
    norm: float
    quadratic: float
    gauss_newton: float
    normalized_alignment: float | None
    hvp_seconds: float
    total_seconds: float


class MeasureRecord(TypedDict):
    """What one ``measure`` job publishes."""

    schema_version: int
    identity: str
    settings: dict[str, Any]
    checkpoint: str
    weights_hash: str
    result_key: str
    case: str
    data: dict[str, Any]
    shard: int
    num_shards: int
    dimension: int
    mean_gradient: MeanGradientRecord | None
    """Null in a shard that has no noise direction."""
    noise: list[NoiseRecord]
    random: list[RandomRecord]
    consensus: list[ConsensusRecord] | None
    policy: dict[str, Any]
    other_policies: list[dict[str, Any]]
    engine_check: dict[str, Any]
    timing: dict[str, float]


def context_identity(
    settings: MeasureSettings, recipe: Recipe, *, weights_hash: str, data: Mapping[str, Any]
) -> dict[str, Any]:
    """All that decides a direction's numbers, except the direction: see :mod:`hvpflow.measure.store`.

    The model section is part of it because heads, rotary base and norm epsilon leave no trace in the weights.
    """
    micro_batch_size = recipe.training.micro_batch_size
    numerical = settings.numerical_identity()
    numerical["hvp_batch_size"] = settings.hvp_batch_size or micro_batch_size
    model = to_mapping(recipe.model)
    del model["init_std"]
    return {
        "measurement_version": MEASUREMENT_VERSION,
        "weights_hash": weights_hash,
        "model": model,
        "data": dict(data),
        "micro_batch_size": micro_batch_size,
        "numerical": numerical,
    }


def record_identity(
    settings: MeasureSettings,
    recipe: Recipe,
    *,
    weights_hash: str,
    result_key: str,
    data: Mapping[str, Any],
    shard: int,
    num_shards: int,
) -> str:
    """Digest of everything that a shard's record must agree on to be used."""
    context = context_identity(settings, recipe, weights_hash=weights_hash, data=data)
    selection = settings.selection_identity()
    return fingerprint([context, selection, result_key, shard, num_shards])


def mean_gradient_row(value: Mapping[str, Any] | None) -> MeanGradientRecord | None:
    """ḡ's part of the record, from its store entry."""
    if value is None:
        return None
    return {"norm": value["norm"], "loss": value["loss"], "sha256": value["sha256"], "seconds": value["seconds"]}


def noise_row(index: int, batch: dict[str, int], entry: Mapping[str, Any]) -> NoiseRecord:
    """A noise sample's row, from its store entry."""
    return {
        "batch_index": index,
        "batch": batch,
        "quadratic": entry["quadratic"],
        "gauss_newton": entry["gauss_newton"],
        "noise_norm_squared": entry["norm_squared"],
        "gradient_norm": entry["gradient_norm"],
        "gradient_seconds": entry["making_seconds"],
        "hvp_seconds": entry["hvp_seconds"],
    }


def random_row(index: int, entry: Mapping[str, Any]) -> RandomRecord:
    """A random direction's row, from its store entry."""
    return {
        "index": index,
        "quadratic": entry["quadratic"],
        "gauss_newton": entry["gauss_newton"],
        "hvp_seconds": entry["hvp_seconds"],
    }


def consensus_row(worker: int, entry: Mapping[str, Any]) -> ConsensusRecord:
    """A worker's row, from its store entry."""
    norm_squared = entry["norm_squared"]
    return {
        "worker": worker,
        "norm_squared": norm_squared,
        "norm": math.sqrt(norm_squared),
        "quadratic": entry["quadratic"],
        "gauss_newton": entry["gauss_newton"],
        "normalized_alignment": entry["quadratic"] / norm_squared if norm_squared else None,
        "hvp_seconds": entry["hvp_seconds"],
        "total_seconds": entry["making_seconds"] + entry["hvp_seconds"],
    }


def common_policy(policies: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The policy that most directions were measured under (the first among equals), and the others, each once."""
    distinct: list[dict[str, Any]] = []
    for policy in policies:
        if policy not in distinct:
            distinct.append(policy)
    common = max(distinct, key=policies.count)
    return common, [policy for policy in distinct if policy != common]


def check_record(record: Any, name: str = "the record") -> None:
    """Raise HvpflowError unless ``record`` has every field, the known schema version and finite numbers throughout."""
    if not isinstance(record, dict):
        raise HvpflowError(f"{name} is not a measure record; delete it and repeat the command")
    if record.get("schema_version") != SCHEMA_VERSION:
        raise HvpflowError(
            f"{name} has schema version {record.get('schema_version')!r}, expected {SCHEMA_VERSION}; delete it and "
            "repeat the command"
        )
    _check_fields(record, MeasureRecord, name)
    if record["mean_gradient"] is not None or record["noise"]:
        _check_fields(record["mean_gradient"], MeanGradientRecord, f"{name}, mean_gradient")
    kinds: tuple[tuple[str, type], ...] = (
        ("noise", NoiseRecord),
        ("random", RandomRecord),
        ("consensus", ConsensusRecord),
    )
    for kind, fields in kinds:
        for number, row in enumerate(record[kind] or []):
            _check_fields(row, fields, f"{name}, {kind}[{number}]")
    _check_finite(record, name)


def _check_fields(row: Any, fields: type, name: str) -> None:
    expected = list(fields.__annotations__)
    missing = [field for field in expected if not isinstance(row, dict) or field not in row]
    if missing:
        raise HvpflowError(f"{name} lacks {', '.join(missing)}; delete the file and repeat the command")


def _check_finite(value: Any, name: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise HvpflowError(f"{name} holds {value}, expected finite numbers; delete the file and repeat the command")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_finite(item, f"{name}.{key}")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for number, item in enumerate(value):
            _check_finite(item, f"{name}[{number}]")
