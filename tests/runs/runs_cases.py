"""Small runs of every kind, written into a temporary directory with the package's own writers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hvpflow.errors import HvpflowError
from hvpflow.files import sha256_file, write_text
from hvpflow.runs.arena import average, pack
from hvpflow.runs.checkpoints import read_checkpoint, weights_hash, write_safetensors
from hvpflow.runs.packed_format import WorkerState, arena_model, arena_optimizer
from hvpflow.runs.pt_files import write_pt
from hvpflow.runs.recipe import Recipe, recipe_from_mapping
from hvpflow.runs.run import RECIPE_NAME, Run, open_run
from hvpflow.runs.state_format import PACKED, PACKED_EPOCH, TrainingState, write_training_state

WORKERS = 4
Weights = dict[str, Tensor]
Change = Callable[[dict[str, Any]], object]


def small_mapping(*, packed: bool = False) -> dict[str, Any]:
    """A recipe of 600-odd parameters: four epochs of about 9 batches."""
    mapping: dict[str, Any] = {
        "model": {"vocab_size": 16, "layers": 1, "width": 8, "heads": 2, "ffn_width": 12, "context_length": 4},
        "data": {"cache_dir": "data/small", "dataset": "text", "tokenizer": "letters", "shard_tokens": 100},
        "training": {
            "tokens_per_parameters": 2.0,
            "epoch_tokens_per_parameters": 0.5,
            "batch_tokens": 32,
            "micro_batch_size": 2,
            "checkpoint_policy": "interval",
        },
        "runtime": {"device": "cpu", "amp": False},
    }
    if packed:
        mapping["decentralized"] = {"num_models": WORKERS}
    return mapping


def random_weights(recipe: Recipe, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in recipe.model.parameter_shapes().items()}


def worker_weights(recipe: Recipe) -> list[Weights]:
    base = random_weights(recipe, 0)
    return [
        {name: base[name] + 0.1 * noise for name, noise in random_weights(recipe, worker + 1).items()}
        for worker in range(WORKERS)
    ]


def make_run(directory: Path, *, packed: bool = False) -> Run:
    """A run with ``epoch-002.safetensors``, ``epoch-002.pt`` and ``final.pt``."""
    recipe = recipe_from_mapping(small_mapping(packed=packed))
    write_text(directory / RECIPE_NAME, recipe.to_yaml())
    run = open_run(directory)
    if packed:
        _fill_packed(run)
    else:
        weights = random_weights(recipe, 0)
        write_safetensors(directory / "epoch-002.safetensors", weights, {"epoch": 2, "hash": weights_hash(weights)})
        write_training_state(directory / "epoch-002.pt", ordinary_state(recipe, 2))
        write_training_state(directory / "final.pt", ordinary_state(recipe, 4))
    return run


def shared_entries(recipe: Recipe, epoch: int) -> dict[str, Any]:
    cursor = recipe.sampling().boundaries()[epoch - 1]
    return {
        "config": recipe.to_mapping(),
        "recipe_identity": "ab" * 32,
        "rng": {"python": None, "numpy": None, "torch": torch.get_rng_state(), "cuda": None},
        "cursor": cursor,
        "step": cursor // recipe.sampling().batch_blocks,
        "completed_epochs": epoch,
        "best_loss": 2.5,
        "best_epoch": 1,
        "loader": {"version": 2, "cursor": cursor},
    }


def ordinary_state(recipe: Recipe, epoch: int) -> TrainingState:
    return TrainingState(
        **shared_entries(recipe, epoch), model=random_weights(recipe, 0), optimizer={"state": {}, "param_groups": []}
    )


def packed_state(recipe: Recipe, epoch: int) -> TrainingState:
    shapes, shared = recipe.model.parameter_shapes(), shared_entries(recipe, epoch)
    storage = pack(worker_weights(recipe), shapes)
    steps = [torch.tensor(float(shared["step"]))] * len(shapes)
    optimizer = arena_optimizer(
        storage * 0.1, storage**2, [{"steps": steps, "groups": [{"lr": 1.0}, {"lr": 1.0}]}] * WORKERS, shapes
    )
    return TrainingState(**shared, version=PACKED, model=arena_model(storage, shapes), optimizer=optimizer)


def worker_state(recipe: Recipe, epoch: int, worker: int) -> WorkerState:
    shared, weights = shared_entries(recipe, epoch), worker_weights(recipe)[worker]
    step = torch.tensor(float(shared["step"]))
    moments = {name: {"step": step, "exp_avg": value * 0.1, "exp_avg_sq": value**2} for name, value in weights.items()}
    groups = [{"params": [n for n in weights if (weights[n].ndim >= 2) is matrices]} for matrices in (True, False)]
    return WorkerState(
        worker=worker,
        num_workers=WORKERS,
        model_config=recipe.to_mapping()["model"],
        **{key: shared[key] for key in ("recipe_identity", "cursor", "step", "completed_epochs")},
        model=weights,
        optimizer={"state": moments, "param_groups": groups},
    )


def epoch_root(run: Run, epoch: int) -> TrainingState:
    """The root state of the worker files on disk."""
    paths = [f"node-{worker:03d}/epoch-{epoch:03d}.pt" for worker in range(WORKERS)]
    workers: list[Mapping[str, Any]] = [
        {"worker": worker, "path": path, "sha256": sha256_file(run.directory / path)}
        for worker, path in enumerate(paths)
    ]
    return TrainingState(**shared_entries(run.recipe, epoch), version=PACKED_EPOCH, workers=workers)


def _fill_packed(run: Run) -> None:
    recipe, workers = run.recipe, worker_weights(run.recipe)
    write_safetensors(run.directory / "epoch-002.safetensors", average(workers))
    for worker, weights in enumerate(workers):
        node = run.directory / f"node-{worker:03d}"
        write_safetensors(node / "epoch-002.safetensors", weights)
        write_pt(node / "epoch-002.pt", worker_state(recipe, 2, worker).to_dict())
    write_training_state(run.directory / "epoch-002.pt", epoch_root(run, 2))
    write_training_state(run.directory / "final.pt", packed_state(recipe, 4))


def rewrite_worker(run: Run, worker: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a worker's file of epoch 2 and make the root's checksum agree with it."""
    content = worker_state(run.recipe, 2, worker).to_dict()
    change(content)
    write_pt(run.directory / f"node-{worker:03d}" / "epoch-002.pt", content)
    write_training_state(run.directory / "epoch-002.pt", epoch_root(run, 2))


def rewrite_root(run: Run, state: TrainingState, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Write ``state`` under ``name`` with its dictionary changed."""
    content = state.to_dict()
    change(content)
    write_pt(run.directory / name, content)


def refuse(run: Run, name: str, message: str, *, workers: bool = True) -> str:
    with pytest.raises(HvpflowError, match=message) as caught:
        read_checkpoint(run, name, workers=workers)
    return str(caught.value)


def wrong_tensors(case: str, weights: dict[str, torch.Tensor]) -> None:
    q, norm = "blocks.0.attention.q_proj.weight", "norm.weight"
    match case:
        case "missing":
            del weights[q]
        case "extra":
            weights["blocks.1.ffn_norm.weight"] = torch.zeros(8)
        case "misshaped":
            weights[q] = torch.zeros(8, 9)
        case "transposed":
            weights["blocks.0.ffn.down_proj.weight"] = weights["blocks.0.ffn.down_proj.weight"].T.contiguous()
        case "double":
            weights[norm] = weights[norm].double()
        case "half":
            weights[norm] = weights[norm].half()
        case "nan":
            weights[q][3, 4] = float("nan")
        case "infinite":
            weights[norm][-1] = float("-inf")


WRONG = [
    ("missing", "lacks the tensor 'blocks.0.attention.q_proj.weight'"),
    ("extra", "holds the tensor 'blocks.1.ffn_norm.weight'"),
    ("misshaped", r"'blocks.0.attention.q_proj.weight' has shape \(8, 9\), expected \(8, 8\)"),
    ("transposed", r"'blocks.0.ffn.down_proj.weight' has shape \(12, 8\), expected \(8, 12\)"),
    ("double", "'norm.weight' has type .*64, expected .*32"),
    ("half", "'norm.weight' has type .*16, expected .*32"),
    ("nan", r"'blocks.0.attention.q_proj.weight' holds 1 non-finite value"),
    ("infinite", "'norm.weight' holds 1 non-finite value"),
]
