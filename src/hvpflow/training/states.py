"""The files that a training writes of its position, and finding the one to continue from.

``rolling.pt`` is private: a state like ``final.pt`` with what else the logs need to come out the same. Epoch states are
what the recipe retains; they end an interval of the log, so they continue it exactly too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from hvpflow.data.cache import TokenCache
from hvpflow.errors import HvpflowError
from hvpflow.runs.pt_files import load_pt, write_pt
from hvpflow.runs.recipe import Recipe
from hvpflow.runs.run import checkpoint_epoch
from hvpflow.runs.safetensors_files import WEIGHTS_HASH, write_safetensors
from hvpflow.runs.state_format import PACKED_EPOCH, TrainingState, write_training_state
from hvpflow.runs.weights import weights_hash
from hvpflow.training.learner import Learner, SingleLearner
from hvpflow.training.loop import Position
from hvpflow.training.metrics import Interval
from hvpflow.training.packed import PackedLearner
from hvpflow.training.packed_states import read_packed_epoch, worker_file, write_packed_epoch
from hvpflow.training.workspace import ROLLING_STATE, Workspace

_ROLLING_VERSION = 1
EXPORT_VERSION = 1
"""Format version in the metadata of our .safetensors files."""


def loader_record(recipe: Recipe, cache: TokenCache) -> dict[str, Any]:
    """What determines the order of sequences, as states and environment.json record it (without the cursor)."""
    sampling = recipe.sampling()
    unit = (
        {"buffer_blocks": sampling.range_blocks}
        if sampling.loader_version == 1
        else {"shuffle_group_size": sampling.shuffle_group_size}
    )
    return {
        "version": sampling.loader_version,
        "cache_identity": cache.identity,
        "split": "train",
        "length": sampling.context_length,
        "blocks": sampling.boundaries()[-1],
        **unit,
        "seed": sampling.seed,
    }


class Saver:
    """Writes the states and exports of an ordinary run."""

    def __init__(
        self, recipe: Recipe, workspace: Workspace, learner: Learner, loader: Mapping[str, Any], retained: list[str]
    ) -> None:
        self.recipe, self.workspace, self.learner, self.loader = recipe, workspace, learner, dict(loader)
        self.retained = frozenset(retained)

    def save_rolling(self, position: Position) -> None:
        """Write the state that an interrupted training continues from."""
        content = {
            "kind": "rolling",
            "version": _ROLLING_VERSION,
            "state": self.state(position).to_dict(),
            "interval": asdict(position.interval),
        }
        write_pt(self.workspace.path(ROLLING_STATE), content)

    def export_epoch(self, position: Position) -> bool:
        """Write the retained weights and state of the epoch just completed; whether there was a state to retain."""
        stem = f"epoch-{position.completed_epochs:03d}"
        if f"{stem}.safetensors" in self.retained:
            self._export_weights(stem, position)
        if f"{stem}.pt" not in self.retained:
            return False
        self._export_state(stem, position)
        return True

    def export_final(self, position: Position) -> None:
        """Write ``final.pt`` if it is retained."""
        if "final.pt" in self.retained:
            write_training_state(self.workspace.path("final.pt"), self.state(position))

    def state(self, position: Position) -> TrainingState:
        """A complete training state."""
        return TrainingState(version=self.learner.state_version, **self.learner.state(), **self.shared(position))

    def shared(self, position: Position) -> dict[str, Any]:
        """The entries that every kind of state has."""
        return {
            "recipe_identity": self.workspace.identity,
            "config": self.recipe.to_mapping(),
            "rng": random_states(),
            "cursor": position.cursor,
            "step": position.step,
            "completed_epochs": position.completed_epochs,
            "best_loss": position.best_loss,
            "best_epoch": position.best_epoch,
            "loader": {**self.loader, "cursor": position.cursor},
        }

    def export(self, name: str, weights: Mapping[str, torch.Tensor], position: Position) -> None:
        """Write one .safetensors file."""
        tokens = position.cursor * self.recipe.model.context_length
        metadata = {
            "format_version": EXPORT_VERSION,
            "epoch": position.completed_epochs,
            "step": position.step,
            "tokens": tokens,
            WEIGHTS_HASH: weights_hash(weights),
        }
        write_safetensors(self.workspace.path(name), weights, metadata)

    def _export_weights(self, stem: str, position: Position) -> None:
        weights = {name: value.detach().cpu() for name, value in self.learner.model().named_parameters()}
        self.export(f"{stem}.safetensors", weights, position)

    def _export_state(self, stem: str, position: Position) -> None:
        write_training_state(self.workspace.path(f"{stem}.pt"), self.state(position))


class PackedSaver(Saver):
    """Writes the states and exports of a packed run: each worker's beside the root's, the root's last."""

    learner: PackedLearner

    def _export_weights(self, stem: str, position: Position) -> None:
        for worker, weights in enumerate(self.learner.workers()):
            self.export(worker_file(worker, f"{stem}.safetensors"), weights, position)
        super()._export_weights(stem, position)

    def _export_state(self, stem: str, position: Position) -> None:
        write_packed_epoch(self.workspace.directory, stem, self.state(position), self.learner.shapes)


def make_learner(recipe: Recipe, device: torch.device) -> Learner:
    """A freshly initialised learner for the recipe's kind of run."""
    return SingleLearner(recipe, device) if recipe.decentralized is None else PackedLearner(recipe, device)


def make_saver(
    recipe: Recipe, workspace: Workspace, learner: Learner, loader: Mapping[str, Any], retained: list[str]
) -> Saver:
    """What writes the files of the recipe's kind of run."""
    kind = PackedSaver if isinstance(learner, PackedLearner) else Saver
    return kind(recipe, workspace, learner, loader, retained)


def resume(
    recipe: Recipe, workspace: Workspace, learner: Learner, retained: list[str], progress: Callable[[str], None]
) -> Position:
    """Load the newest usable state of the workspace into ``learner``; the start if there is none.

    Of a training whose retention was widened after it had passed an epoch, that is the newest state before the
    epoch: it is trained again from there.
    """
    names = [name.rsplit("/", 1)[-1] for name in workspace.missing(retained)]
    absent = [epoch for name in names if (epoch := checkpoint_epoch(name)) is not None]
    limit = min(absent) - 1 if absent else recipe.num_epochs
    found: tuple[Position, TrainingState] | None = None
    for name in _state_names(workspace, limit):
        try:
            position, state = _read(workspace, name, recipe)
        except HvpflowError as error:
            progress(f"not continuing from {name}: {error}")
            continue
        if position.completed_epochs <= limit and (found is None or position.step > found[0].step):
            found = position, state
    if found is None:
        return Position()
    position, state = found
    learner.load_state(state)
    done = f"{position.completed_epochs} of {recipe.num_epochs} epochs"
    progress(f"continuing after step {position.step} ({done} completed)")
    return position


def position_of(state: TrainingState) -> Position:
    """The position that a training state gives."""
    return Position(
        cursor=state.cursor,
        step=state.step,
        completed_epochs=state.completed_epochs,
        best_loss=state.best_loss,
        best_epoch=state.best_epoch,
    )


def _state_names(workspace: Workspace, limit: int) -> list[str]:
    """The rolling state and the newest epoch state that is not past epoch ``limit``, as far as they exist."""
    epochs = {checkpoint_epoch(path.name): path.name for path in workspace.directory.glob("epoch-*.pt")}
    usable = [epoch for epoch in epochs if epoch is not None and epoch <= limit]
    names = [epochs[epoch] for epoch in sorted(usable, reverse=True)]
    return [ROLLING_STATE, *names] if workspace.path(ROLLING_STATE).exists() else names


def _read(workspace: Workspace, name: str, recipe: Recipe) -> tuple[Position, TrainingState]:
    path = workspace.path(name)
    content = load_pt(path)
    rolling = name == ROLLING_STATE
    if rolling and (content.get("kind"), content.get("version")) != ("rolling", _ROLLING_VERSION):
        raise HvpflowError(f"{path} was written by another version of this program")
    state = TrainingState.from_dict(content["state"] if rolling else content, str(path))
    if state.recipe_identity != workspace.identity:
        raise HvpflowError(f"{path} belongs to another recipe")
    if state.version == PACKED_EPOCH:
        state = read_packed_epoch(state, workspace.directory, path.stem, recipe.model.parameter_shapes())
    position = position_of(state)
    if rolling:
        position.interval = Interval(**content["interval"])
    return position, state


def random_states() -> dict[str, Any]:
    """States of the global generators. Training draws from none of them; programs that share the format expect them.

    NumPy's words are plain integers: an array would need a type that PyTorch's safe loader refuses.
    """
    name, words, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), [int(word) for word in words], int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,
    }
