"""One job: measure a shard of one checkpoint's directions on one data case, and return its record."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hvpflow.data.cache import TokenCache
from hvpflow.data.epochs import Case, analysis_epoch, check_random_streams, choose_noise_samples
from hvpflow.errors import HvpflowError
from hvpflow.interruption import stop_on_signal
from hvpflow.measure.batches import EpochReader
from hvpflow.measure.device import configure
from hvpflow.measure.finished import FinishedWork
from hvpflow.measure.lease import lease_device
from hvpflow.measure.random import check_rademacher_stream
from hvpflow.measure.records import (
    SCHEMA_VERSION,
    MeasureRecord,
    common_policy,
    consensus_row,
    context_identity,
    mean_gradient_row,
    noise_row,
    random_row,
    record_identity,
)
from hvpflow.measure.session import Session
from hvpflow.measure.settings import MeasureSettings
from hvpflow.measure.stacks import Direction, case_directions, cut_shard, cut_stacks
from hvpflow.measure.store import Store
from hvpflow.measure.worker import Worker
from hvpflow.runs.checkpoints import Checkpoint, read_checkpoint, result_key, weights_hash
from hvpflow.runs.run import Run
from hvpflow.typed import to_mapping

SAVE_SECONDS = 30.0
"""Most seconds between two savings of a running pass's partial sums (plus one batch)."""


def measure_shard(
    run: Run,
    checkpoint_name: str,
    cache: TokenCache,
    case: Case,
    settings: MeasureSettings,
    *,
    inspect_record: Mapping[str, Any] | None,
    shard: int,
    num_shards: int,
    device: str | torch.device | None,
    store: Store,
    progress: Callable[[str], None],
    save_seconds: float = SAVE_SECONDS,
) -> MeasureRecord:
    """Measure shard ``shard`` (from 0) of a (checkpoint, case), reusing whatever the store holds.

    Threads are the process's own, as its caller set them.

    Args:
        inspect_record: what ``inspect`` found in the checkpoint; None skips the comparison.
        device: as ``choose_device`` takes; where several GPUs would do, one that no other worker has.
        progress: takes lines for the log.
        save_seconds: time between two savings of partial sums.

    Raises:
        HvpflowError: anything refused; the text names checkpoint, case and direction.
        Interrupted: SIGTERM or SIGINT came; what was computed is saved, and the same call continues.
    """
    started = time.monotonic()
    check_random_streams()
    check_rademacher_stream()
    store.report = progress
    label = f"{checkpoint_name} ({case})"
    epoch = analysis_epoch(run.recipe.sampling(), cache, case)
    state = _read_state(run, checkpoint_name, settings, inspect_record, label)
    context = context_identity(settings, run.recipe, weights_hash=state.weights_hash, data=epoch.identity)
    finished = FinishedWork(
        context=store.context(context), epoch=epoch, seed=settings.seed, worker_hashes=state.worker_hashes
    )
    noise_indices = choose_noise_samples(epoch.num_noise_samples, settings.noise_samples, settings.seed).tolist()
    everything = case_directions(noise_indices, settings.random_samples, len(state.worker_hashes or ()))
    mine = cut_shard(everything, shard, num_shards)
    with lease_device(device, progress) as leased, stop_on_signal() as stop:
        session = Session(
            recipe=run.recipe,
            checkpoint=state.checkpoint,
            settings=settings,
            reader=EpochReader(epoch=epoch, split=cache.split("train"), device=leased),
            policy=configure(leased, settings),
            label=label,
            cache=cache,
        )
        worker = Worker(session=session, finished=finished, stop=stop, report=progress, save_seconds=save_seconds)
        mean = worker.mean_gradient(mine)
        # Where everything is finished, their number is not worth building the model for.
        stacks = cut_stacks(mine, session.directions_per_pass) if finished.pending(mine) else []
        session.policy.update(
            micro_batch_size=session.micro_batch_size,
            hvp_batch_size=session.hvp_batch_size,
            directions_per_pass=len(stacks[0]) if stacks else 0,
        )
        engine_check = worker.engine_check(mine)
        worker.run_stacks(stacks)
        entries = {direction: finished.get(direction) for direction in mine}
        worker.clean_up(noise_indices, everything)
    if lost := [str(direction) for direction, entry in entries.items() if entry is None]:
        raise HvpflowError(f"{label}: the store lost {', '.join(lost)} while it was in use; repeat the command")
    rows = _rows({direction: entry for direction, entry in entries.items() if entry is not None}, session)
    return {
        "schema_version": SCHEMA_VERSION,
        "identity": record_identity(
            settings,
            run.recipe,
            weights_hash=state.weights_hash,
            result_key=state.result_key,
            data=epoch.identity,
            shard=shard,
            num_shards=num_shards,
        ),
        "settings": to_mapping(settings),
        "checkpoint": checkpoint_name,
        "weights_hash": state.weights_hash,
        "result_key": state.result_key,
        "case": case,
        "data": epoch.identity,
        "shard": shard,
        "num_shards": num_shards,
        "dimension": run.recipe.num_parameters,
        "mean_gradient": mean_gradient_row(mean),
        "noise": rows["noise"],
        "random": rows["random"],
        "consensus": rows["consensus"] if state.worker_hashes is not None else None,
        "policy": rows["policy"],
        "other_policies": rows["other_policies"],
        "engine_check": engine_check,
        "timing": _timing(mean, entries.values(), started),
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """The checkpoint, and what identifies it."""

    checkpoint: Checkpoint
    weights_hash: str
    worker_hashes: list[str] | None
    """Of the workers whose consensus errors are measured; None where none are."""
    result_key: str


def _read_state(
    run: Run, name: str, settings: MeasureSettings, inspect_record: Mapping[str, Any] | None, label: str
) -> _State:
    consensus = run.recipe.decentralized is not None and settings.consensus
    checkpoint = read_checkpoint(run, name, workers=consensus)
    average_hash, worker_hashes = weights_hash(checkpoint.weights), None
    if consensus and checkpoint.workers is not None:
        worker_hashes = [weights_hash(worker) for worker in checkpoint.workers]
    key = result_key(average_hash, worker_hashes)
    for field, found in (("weights_hash", average_hash), ("result_key", key)):
        inspected = None if inspect_record is None else str(inspect_record.get(field))
        if inspected not in (None, found):
            raise HvpflowError(
                f"{label}: the checkpoint changed after it was inspected ({field} is {found[:12]}…, inspected "
                f"{str(inspected)[:12]}…); repeat the command to have it inspected again"
            )
    return _State(checkpoint=checkpoint, weights_hash=average_hash, worker_hashes=worker_hashes, result_key=key)


def _rows(entries: Mapping[Direction, dict[str, Any]], session: Session) -> dict[str, Any]:
    """The record's rows by kind, and the policies that they were measured under."""
    batch_of = session.reader.epoch.sample_batch
    policy, other_policies = common_policy([entry["policy"] for entry in entries.values()] or [session.policy])
    by_kind = {
        kind: [(direction.index, entry) for direction, entry in entries.items() if direction.kind == kind]
        for kind in ("noise", "random", "consensus")
    }
    return {
        "noise": [noise_row(index, batch_of(index), entry) for index, entry in by_kind["noise"]],
        "random": [random_row(index, entry) for index, entry in by_kind["random"]],
        "consensus": [consensus_row(index, entry) for index, entry in by_kind["consensus"]],
        "policy": policy,
        "other_policies": other_policies,
    }


def _timing(
    mean: Mapping[str, Any] | None, entries: Iterable[Mapping[str, Any] | None], started: float
) -> dict[str, float]:
    """Seconds of the work that the record holds, whoever did it and when; and those of this call."""
    mean_seconds = mean["seconds"] if mean is not None else 0.0
    work = [entry["making_seconds"] + entry["hvp_seconds"] for entry in entries if entry is not None]
    return {
        "mean_gradient_seconds": mean_seconds,
        "total_seconds": math.fsum([mean_seconds, *work]),
        "process_seconds": time.monotonic() - started,
    }
