"""The files of a packed run's epochs: one for each worker beside the root's, bound together by checksums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hvpflow.errors import HvpflowError
from hvpflow.files import sha256_file
from hvpflow.runs.arena import Shapes, pack, unpack
from hvpflow.runs.packed_format import WorkerState, arena_model, arena_optimizer
from hvpflow.runs.pt_files import load_pt, write_pt
from hvpflow.runs.state_format import PACKED, PACKED_EPOCH, TrainingState, write_training_state


def split_workers(state: TrainingState, shapes: Shapes) -> list[WorkerState]:
    """The workers' own states of a packed one, their tensors independent of its arenas."""
    assert state.version == PACKED
    assert state.model is not None
    assert state.optimizer is not None
    # Cloned one by one, because a view would carry its whole arena into the file.
    weights, first, second = (
        [{name: value.clone() for name, value in views.items()} for views in unpack(arena, shapes)]
        for arena in (
            state.model["parameter_storage"],
            state.optimizer["first_moment_storage"],
            state.optimizer["second_moment_storage"],
        )
    )
    members = [[name for name in shapes if (len(shapes[name]) >= 2) is matrices] for matrices in (True, False)]
    workers = []
    for worker, own in enumerate(state.optimizer["workers"]):
        moments = {
            name: {
                "step": own["steps"][index].clone(),
                "exp_avg": first[worker][name],
                "exp_avg_sq": second[worker][name],
            }
            for index, name in enumerate(shapes)
        }
        groups = [{"params": names, **group} for names, group in zip(members, own["groups"])]
        workers.append(
            WorkerState(
                worker=worker,
                num_workers=len(weights),
                model_config=state.config["model"],
                recipe_identity=state.recipe_identity,
                cursor=state.cursor,
                step=state.step,
                completed_epochs=state.completed_epochs,
                model=weights[worker],
                optimizer={"state": moments, "param_groups": groups},
            )
        )
    return workers


def join_workers(root: TrainingState, workers: list[WorkerState], shapes: Shapes) -> TrainingState:
    """The packed state of a root and its workers: the inverse of ``split_workers``."""
    first, second = (
        pack([{name: worker.optimizer["state"][name][key] for name in shapes} for worker in workers], shapes)
        for key in ("exp_avg", "exp_avg_sq")
    )
    own = [
        {
            "steps": [torch.as_tensor(worker.optimizer["state"][name]["step"]).clone() for name in shapes],
            "groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in worker.optimizer["param_groups"]
            ],
        }
        for worker in workers
    ]
    model = arena_model(pack([worker.model for worker in workers], shapes), shapes)
    optimizer = arena_optimizer(first, second, own, shapes)
    return replace(root, version=PACKED, workers=None, model=model, optimizer=optimizer)


def write_packed_epoch(directory: Path, stem: str, state: TrainingState, shapes: Shapes) -> None:
    """Write the worker files of a packed state, then the root that names them: it stands for all being there."""
    listed: list[Mapping[str, Any]] = []
    for worker in split_workers(state, shapes):
        name = worker_file(worker.worker, f"{stem}.pt")
        write_pt(directory / name, worker.to_dict())
        listed.append({"worker": worker.worker, "path": name, "sha256": sha256_file(directory / name)})
    root = replace(state, version=PACKED_EPOCH, workers=listed, model=None, optimizer=None)
    write_training_state(directory / f"{stem}.pt", root)


def read_packed_epoch(root: TrainingState, directory: Path, stem: str, shapes: Shapes) -> TrainingState:
    """The packed state of a root read from ``directory``.

    Raises:
        HvpflowError: a worker file is missing, altered, of another position, or not of these shapes.
    """
    workers = []
    for number, entry in enumerate(root.workers or []):
        name = worker_file(number, f"{stem}.pt")
        path = directory / name
        if not isinstance(entry, Mapping) or (entry.get("worker"), entry.get("path")) != (number, name):
            raise HvpflowError(f"{directory / stem}.pt: entry {number} of its workers is not {name}")
        if not path.is_file():
            raise HvpflowError(f"missing worker state {path}")
        if sha256_file(path) != entry.get("sha256"):
            raise HvpflowError(f"worker checksum mismatch: {path} is not the file that its root was written with")
        worker = WorkerState.from_dict(load_pt(path), str(path))
        found = (worker.worker, worker.recipe_identity, worker.cursor, worker.step, worker.completed_epochs)
        if found != (number, root.recipe_identity, root.cursor, root.step, root.completed_epochs):
            raise HvpflowError(f"{path} is not worker {number} of its root's state")
        worker.check(shapes, str(path))
        workers.append(worker)
    return join_workers(root, workers, shapes)


def worker_file(worker: int, name: str) -> str:
    """Path, relative to the run, of a worker's file."""
    return f"node-{worker:03d}/{name}"
