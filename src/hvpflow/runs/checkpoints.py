"""Read a checkpoint of any format, ordinary or packed, and refuse whatever is not exactly that checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from hvpflow.errors import HvpflowError, nearest
from hvpflow.files import sha256_file
from hvpflow.models.config import LlamaConfig
from hvpflow.runs.arena import average
from hvpflow.runs.packed_format import WorkerState, check_arena_model, check_arena_optimizer
from hvpflow.runs.pt_files import load_pt
from hvpflow.runs.recipe import Recipe, recipe_from_mapping
from hvpflow.runs.run import RECIPE_NAME, Run, checkpoint_epoch
from hvpflow.runs.safetensors_files import read_safetensors, write_safetensors
from hvpflow.runs.state_format import ORDINARY, PACKED, TrainingState, read_training_state, same
from hvpflow.runs.weights import check_average, check_weights, result_key, weights_hash
from hvpflow.typed import build, to_mapping

__all__ = ["Checkpoint", "read_checkpoint", "result_key", "weights_hash", "write_safetensors"]

Format = Literal["safetensors", "training-state", "packed-training-state", "packed-epoch"]

_NO_CONSENSUS = "use --no-consensus to analyse the averaged model alone"
_ORDER = {"data": ("shuffle_group_size", "buffer_size_mib"), "runtime": ("seed",)}
"""What the order of sequences depends on, of sections whose other settings are the machine's; a state of another order
has not seen this run's first epoch."""
_RETENTION = ("checkpoint_policy", "checkpoint_epochs", "save_epoch_training_state")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint's weights and its position in the training."""

    name: str
    format: Format
    weights: dict[str, Tensor]
    """name -> float32 tensor in parameter order; of a packed run the workers' average."""
    workers: list[dict[str, Tensor]] | None
    """Each worker's weights; None for an ordinary run, or where they were not asked for."""
    worker_paths: list[str] | None
    """The file that holds each worker's weights, relative to the run."""
    cursor: int
    """Sequences consumed."""
    tokens: int
    """Training tokens consumed."""
    step: int
    """Updates made."""
    epoch: int
    """Completed epochs."""


def read_checkpoint(run: Run, name: str, *, workers: bool = True) -> Checkpoint:
    """Read and check a root checkpoint.

    Args:
        run: the run.
        name: file name directly in the run directory.
        workers: of a packed run, read the workers' weights too and check the root against their average.

    Raises:
        HvpflowError: the file is missing, damaged, of another model or recipe, holds non-finite values, or (packed)
            workers are missing, of another state, or do not average to the root.
    """
    if "/" in name or Path(name).suffix not in (".safetensors", ".pt"):
        raise HvpflowError(
            f"expected a root checkpoint (NAME.safetensors or NAME.pt directly in {run.directory}), got {name}"
        )
    path = run.directory / name
    if not path.is_file():
        raise HvpflowError(f"{run.directory} has no checkpoint {name!r}{nearest(name, run.checkpoints())}")
    workers = workers and run.recipe.decentralized is not None
    return _read_export(run, name, workers) if path.suffix == ".safetensors" else _read_state(run, name, workers)


def _read_export(run: Run, name: str, with_workers: bool) -> Checkpoint:
    recipe, path = run.recipe, run.directory / name
    epoch = checkpoint_epoch(name)
    if epoch is None or epoch > recipe.num_epochs:
        raise HvpflowError(
            f"{path}: weights must be named epoch-NNN.safetensors with NNN from 001 to {recipe.num_epochs:03d} (the "
            f"epochs of {RECIPE_NAME}): the name gives their position in the training"
        )
    shapes = recipe.model.parameter_shapes()
    weights = read_safetensors(path, shapes)
    workers = paths = None
    if with_workers:
        paths = [f"node-{worker:03d}/{name}" for worker in range(recipe.num_workers)]
        workers = []
        for worker, relative in enumerate(paths):
            worker_path = run.directory / relative
            if not worker_path.is_file():
                raise HvpflowError(f"missing worker checkpoint {worker_path}: supply it, or {_NO_CONSENSUS}")
            where = f"invalid worker parameters: {worker_path} (worker {worker})"
            workers.append(read_safetensors(worker_path, shapes, where))
        check_average(weights, workers, str(path))
    sampling = recipe.sampling()
    cursor = sampling.boundaries()[epoch - 1]
    return Checkpoint(
        name=name,
        format="safetensors",
        weights=weights,
        workers=workers,
        worker_paths=paths,
        cursor=cursor,
        tokens=cursor * recipe.model.context_length,
        # Every epoch is a whole number of batches.
        step=cursor // sampling.batch_blocks,
        epoch=epoch,
    )


def _read_state(run: Run, name: str, with_workers: bool) -> Checkpoint:
    recipe, path = run.recipe, run.directory / name
    state = read_training_state(path)
    if state.version != ORDINARY and recipe.decentralized is None:
        raise HvpflowError(
            f"{path} is a packed training state, which needs a decentralized section; {RECIPE_NAME} has none"
        )
    _check_recipe(recipe, state.config, path)
    _check_position(recipe, state, path)
    shapes = recipe.model.parameter_shapes()
    workers = paths = None
    if state.version == ORDINARY:
        if with_workers:
            raise HvpflowError(f"{path} lacks packed worker weights: {_NO_CONSENSUS}")
        kind: Format = "training-state"
        weights = check_weights(state.model or {}, shapes, str(path))
    else:
        if state.version == PACKED:
            kind, paths = "packed-training-state", [name] * recipe.num_workers
            workers = check_arena_model(state.model or {}, shapes, recipe.num_workers, str(path))
            check_arena_optimizer(state.optimizer or {}, shapes, recipe.num_workers, state.step, str(path))
        else:
            kind = "packed-epoch"
            paths, workers = _read_worker_files(run, state, path)
        weights = average(workers)
    return Checkpoint(
        name=name,
        format=kind,
        weights=weights,
        workers=workers if with_workers else None,
        worker_paths=paths if with_workers else None,
        cursor=state.cursor,
        tokens=state.cursor * recipe.model.context_length,
        step=state.step,
        epoch=state.completed_epochs,
    )


def _check_recipe(recipe: Recipe, saved: Mapping[str, Any], path: Path) -> None:
    """Compare what determines the state's meaning; retention, place of the data, optimizer and machine may differ."""
    try:
        other = recipe_from_mapping(saved)
    except (HvpflowError, TypeError, ValueError, RuntimeError, RecursionError) as error:
        # A mapping out of a pickle can hold what no YAML can, such as tensors, which do not compare like plain values.
        raise HvpflowError(f"{path}: its recipe is not valid: {error}") from error
    for section in ("model", "training", "decentralized", "data", "runtime"):
        ours, theirs = (to_mapping(getattr(settings, section)) or {} for settings in (recipe, other))
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            if section in _ORDER and key not in _ORDER[section]:
                continue
            if ours.get(key) != theirs.get(key) and not (section == "training" and key in _RETENTION):
                raise HvpflowError(
                    f"recipe does not match: {section}.{key} is {theirs.get(key)!r} in {path}, {ours.get(key)!r} in "
                    f"{RECIPE_NAME}: the file belongs to another run"
                )


def _check_position(recipe: Recipe, state: TrainingState, path: Path) -> None:
    sampling = recipe.sampling()
    boundaries = sampling.boundaries()
    epoch = state.completed_epochs
    if state.cursor > boundaries[-1] or epoch > len(boundaries):
        raise HvpflowError(
            f"{path}: position (sequence {state.cursor}, epoch {epoch}) lies behind the end of the recipe's training "
            f"(sequence {boundaries[-1]}, epoch {len(boundaries)})"
        )
    named = checkpoint_epoch(path.name)
    if named is not None and named != epoch:
        raise HvpflowError(f"{path} holds the state after epoch {epoch}, not {named} as its name says")
    if named is None and state.version in (ORDINARY, PACKED):
        return
    if epoch == 0 or (state.cursor, state.step) != (
        boundaries[epoch - 1],
        boundaries[epoch - 1] // sampling.batch_blocks,
    ):
        raise HvpflowError(
            f"{path}: position (sequence {state.cursor}, step {state.step}) is not the end of epoch {epoch}, where the "
            "recipe's training ends an epoch"
        )


def _read_worker_files(run: Run, root: TrainingState, path: Path) -> tuple[list[str], list[dict[str, Tensor]]]:
    recipe = run.recipe
    shapes = recipe.model.parameter_shapes()
    listed = root.workers or []
    if len(listed) != recipe.num_workers:
        raise HvpflowError(f"{path} lists {len(listed)} workers, {RECIPE_NAME} has {recipe.num_workers}")
    paths, workers = [], []
    for number, entry in enumerate(listed):
        # The expected path is made, not taken from the file, so no file outside the run is ever opened.
        relative = f"node-{number:03d}/epoch-{root.completed_epochs:03d}.pt"
        found = (entry.get("worker"), entry.get("path")) if isinstance(entry, Mapping) else (None, None)
        if not same(found[0], number) or not same(found[1], relative):
            raise HvpflowError(f"{path}: entry {number} of its workers is not worker {number} at {relative}")
        worker_path = run.directory / relative
        if not worker_path.is_file():
            raise HvpflowError(
                f"missing worker checkpoint {worker_path}: supply it (the root .pt holds no weights of its own), or "
                "analyse the .safetensors export"
            )
        if not same(entry.get("sha256"), sha256_file(worker_path)):
            raise HvpflowError(
                f"worker checksum mismatch: {worker_path} is not the file that {path} was written with; copy both again"
            )
        workers.append(_read_worker(worker_path, number, root, recipe, shapes))
        paths.append(relative)
    return paths, workers


def _read_worker(
    path: Path, number: int, root: TrainingState, recipe: Recipe, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    state = WorkerState.from_dict(load_pt(path), str(path))
    expected = {
        "worker": number,
        "num_workers": recipe.num_workers,
        "recipe_identity": root.recipe_identity,
        "cursor": root.cursor,
        "step": root.step,
        "completed_epochs": root.completed_epochs,
    }
    for name, value in expected.items():
        found = getattr(state, name)
        if found != value:
            raise HvpflowError(f"{path} is not worker {number} of its root's state: {name} is {found!r}, not {value!r}")
    if build(LlamaConfig, state.model_config, f"{path}: model_config") != recipe.model:
        raise HvpflowError(f"{path}: model_config differs from the model section of {RECIPE_NAME}")
    return state.check(shapes, f"invalid worker parameters: {path} (worker {number})")
