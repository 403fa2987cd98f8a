"""Packed trainings: batched pass and mixing against separate models, files, resumption, another program's run."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from training_cases import assert_same, assert_same_run, make_recipe, read_rows

from hvpflow.data.cache import TokenCache
from hvpflow.data.epochs import required_train_tokens
from hvpflow.errors import HvpflowError
from hvpflow.files import write_json
from hvpflow.interruption import Interrupted
from hvpflow.models.llama import Llama
from hvpflow.runs.arena import pack, storage_layout, unpack
from hvpflow.runs.checkpoints import read_checkpoint
from hvpflow.runs.pt_files import load_pt
from hvpflow.runs.recipe import Recipe, load_recipe, recipe_identity
from hvpflow.runs.run import open_run
from hvpflow.training import evaluate_checkpoint, train_run
from hvpflow.training.learner import initial_model
from hvpflow.training.mixing import consensus_weight, mix_, peers
from hvpflow.training.packed import PackedLearner
from hvpflow.training.stacked import stacked_losses

CPU = torch.device("cpu")
TOPOLOGIES = ["complete", "one_peer_ring", "one_peer_exponential"]


def packed_recipe(**changes: Any) -> Recipe:
    """The tiny recipe for four workers that read one sequence each."""
    settings = {
        "num_models": 4,
        "topology": "one_peer_exponential",
        "scheme": "awc",
        **changes.pop("decentralized", {}),
    }
    training = {"batch_tokens": 64, "micro_batch_size": 1} | changes.pop("training", {})
    return make_recipe(decentralized=settings, training=training, **changes)


def dense_mixing(topology: str, num_workers: int, step: int) -> torch.Tensor:
    """M_t written out from the definition of each topology."""
    matrix = torch.zeros(num_workers, num_workers, dtype=torch.float64)
    for worker in range(num_workers):
        if topology == "complete":
            matrix[worker] = 1 / num_workers
            continue
        if topology == "one_peer_ring":
            right = worker % 2 == step % 2
            peer = (worker + 1) % num_workers if right else (worker - 1) % num_workers
        else:
            peer = worker ^ (2 ** (step % int(np.log2(num_workers))))
        matrix[worker, worker] = matrix[worker, peer] = 0.5
    return matrix


@given(st.sampled_from(TOPOLOGIES), st.sampled_from([2, 4, 8]), st.integers(0, 50), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_mixing_is_the_dense_matrix(topology: str, num_workers: int, step: int, weight: float) -> None:
    matrix = dense_mixing(topology, num_workers, step)
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix.sum(1), torch.ones(num_workers, dtype=torch.float64))
    arena = torch.randn(num_workers, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    expected = weight * matrix @ arena + (1 - weight) * arena
    mix_(arena, peers(topology, num_workers, step), weight)
    torch.testing.assert_close(arena, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("num_workers", [2, 4, 8, 16])
def test_exponential_mixing_is_complete_after_log_updates(num_workers: int) -> None:
    arena = torch.randn(num_workers, 7)
    mean = arena.mean(0)
    for step in range(3, 3 + num_workers.bit_length() - 1):
        mix_(arena, peers("one_peer_exponential", num_workers, step))
    assert all(torch.equal(row, arena[0]) for row in arena)
    torch.testing.assert_close(arena[0], mean)


def test_undefined_topologies_are_refused() -> None:
    with pytest.raises(HvpflowError, match="power of two workers, not 6"):
        peers("one_peer_exponential", 6, 0)
    with pytest.raises(HvpflowError, match="even number of workers, not 3"):
        peers("one_peer_ring", 3, 0)
    for changes, message in (
        ({"decentralized": {"num_models": 6}, "training": {"batch_tokens": 96}}, "power of two"),
        (
            {"decentralized": {"num_models": 3, "topology": "one_peer_ring"}, "training": {"batch_tokens": 48}},
            "even number",
        ),
        ({"training": {"micro_batch_size": 2}}, r"batch_tokens 64 is not .*4 × .*2 × .*16 = 128"),
    ):
        with pytest.raises(HvpflowError, match=message):
            packed_recipe(**changes)


def test_adaptive_weight() -> None:
    recipe = packed_recipe(decentralized={"adaptive_consensus": {"p": 2.0, "start_frac": 0.5}})
    assert consensus_weight(recipe, 0.005, 49, 100) == 1.0
    assert consensus_weight(recipe, 0.005, 50, 100) == pytest.approx(0.25)
    assert consensus_weight(packed_recipe(), 0.005, 99, 100) == 1.0


def different_models(recipe: Recipe, num_workers: int, dtype: torch.dtype) -> list[Llama]:
    models = []
    for worker in range(num_workers):
        model = Llama(recipe.model)
        model.init_weights(torch.Generator().manual_seed(worker))
        models.append(model.to(dtype))
    return models


def test_stacked_losses_and_gradients_are_those_of_separate_models() -> None:
    recipe = make_recipe(model={"layers": 2})
    models = different_models(recipe, 3, torch.float64)
    random = torch.Generator().manual_seed(5)
    tokens = torch.randint(64, (3, 4, 16), generator=random)
    targets = torch.randint(64, (3, 4, 16), generator=random)
    targets[1, 2, 5:] = -100
    stacked = {
        name: torch.stack([dict(model.named_parameters())[name] for model in models]).detach().requires_grad_()
        for name in recipe.model.parameter_shapes()
    }
    losses = stacked_losses(stacked, recipe.model, tokens, targets)
    losses.sum().backward()
    for worker, model in enumerate(models):
        loss = model(tokens[worker], targets[worker])
        loss.backward()
        torch.testing.assert_close(losses[worker], loss, rtol=1e-12, atol=0)
        for name, parameter in model.named_parameters():
            found = stacked[name].grad
            assert found is not None
            torch.testing.assert_close(found[worker], parameter.grad, rtol=1e-9, atol=1e-12)


def separate_training(
    recipe: Recipe, batches: list[tuple[torch.Tensor, torch.Tensor]], rates: list[float]
) -> list[Llama]:
    """W models, each with torch's own AdamW and clipping, mixed by dense matrices."""
    assert recipe.decentralized is not None
    workers = recipe.num_workers
    models = [initial_model(recipe) for _ in range(workers)]
    optimizers = []
    for model in models:
        groups = [
            {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": recipe.optimizer.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        betas = (recipe.optimizer.beta1, recipe.optimizer.beta2)
        optimizers.append(torch.optim.AdamW(groups, betas=betas, eps=recipe.optimizer.eps, foreach=False))

    def mix(step: int, weight: float) -> None:
        assert recipe.decentralized is not None
        matrix = weight * dense_mixing(recipe.decentralized.topology, workers, step)
        matrix += (1 - weight) * torch.eye(workers, dtype=torch.float64)
        with torch.no_grad():
            for same in zip(*(model.parameters() for model in models)):
                values = torch.stack([p.double() for p in same])
                for parameter, value in zip(same, torch.tensordot(matrix, values, 1)):
                    parameter.copy_(value)

    for step, ((tokens, targets), rate) in enumerate(zip(batches, rates)):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers)):
            own_tokens, own_targets = tokens[worker::workers], targets[worker::workers]
            optimizer.zero_grad()
            (model(own_tokens, own_targets) / own_targets.numel()).backward()
            if recipe.optimizer.grad_clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.grad_clip)
            for group in optimizer.param_groups:
                group["lr"] = rate
        adaptive = recipe.decentralized.adaptive_consensus
        weight = 1.0 if adaptive is None else (rate / recipe.optimizer.lr) ** adaptive.p
        if recipe.decentralized.scheme == "awc":
            mix(step, weight)
        for optimizer in optimizers:
            optimizer.step()
        if recipe.decentralized.scheme == "atc":
            mix(step, weight)
    return models


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("scheme", ["awc", "atc"])
@pytest.mark.parametrize("adaptive", [None, {"p": 1.0, "start_frac": 0.0}])
def test_packed_training_is_that_of_separate_models(topology: str, scheme: str, adaptive: dict | None) -> None:
    recipe = packed_recipe(
        decentralized={"topology": topology, "scheme": scheme, "adaptive_consensus": adaptive},
        optimizer={"grad_clip": 0.3},
        training={"batch_tokens": 128, "micro_batch_size": 2},
    )
    random = torch.Generator().manual_seed(3)
    rows = [torch.randint(64, (8, 17), generator=random) for _ in range(6)]
    batches = [(row[:, :-1], row[:, 1:].contiguous()) for row in rows]
    rates = [0.002, 0.01, 0.008, 0.006, 0.004, 0.003]
    learner = PackedLearner(recipe, CPU)
    updates = [learner.update(*batch, rate, step + 1) for step, (batch, rate) in enumerate(zip(batches, rates))]
    assert all(norm > 0.3 for update in updates for norm in update.extra["local_grad_norms"]), "nothing was clipped"
    assert len({update.extra["local_grad_norms"][0] for update in updates}) == 6
    for worker, model in enumerate(separate_training(recipe, batches, rates)):
        for name, parameter in model.named_parameters():
            found = learner.workers()[worker][name]
            torch.testing.assert_close(found, parameter.detach(), rtol=1e-4, atol=2e-6)
    padding = torch.ones(learner.arena.shape[1], dtype=torch.bool)
    for entry in storage_layout(learner.shapes):
        padding[entry["start"] : entry["start"] + entry["numel"]] = False
    assert padding.any()
    assert not learner.arena.detach()[:, padding].any()


def test_complete_mixing_makes_consensus_errors_vanish() -> None:
    errors = {}
    for scheme in ("awc", "atc"):
        recipe = packed_recipe(decentralized={"topology": "complete", "scheme": scheme})
        learner = PackedLearner(recipe, CPU)
        for step in range(1, 4):
            rows = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(step))
            learner.update(rows[:, :-1], rows[:, 1:].contiguous(), 0.01, step)
        arena = learner.arena.detach()
        errors[scheme] = (arena - arena.mean(0)).norm(dim=1)
    assert not errors["atc"].any()
    assert (errors["awc"] > 1e-3).all(), "the last local step of each worker remains"


# Whole runs


@pytest.fixture(scope="module")
def finished(cache: TokenCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "finished"
    train_run(packed_recipe(), cache, directory)
    return directory


def test_published_files_are_those_of_a_packed_run(cache: TokenCache, finished: Path) -> None:
    published = [path for kind in ("*.safetensors", "*.pt") for path in finished.rglob(kind)]
    assert len([path for path in published if ".training" not in path.parts]) == 41
    run = open_run(finished)
    expected = [f"epoch-{epoch:03d}.{kind}" for epoch in (1, 2, 3, 4) for kind in ("pt", "safetensors")]
    assert run.checkpoints() == [*expected, "final.pt"]
    last = [read_checkpoint(run, name) for name in ("epoch-004.safetensors", "epoch-004.pt", "final.pt")]
    for checkpoint in last:
        assert (checkpoint.step, checkpoint.epoch, checkpoint.tokens) == (57, 4, 57 * 64)
        assert checkpoint.workers is not None
        assert_same(checkpoint.workers, last[0].workers)
        assert_same(checkpoint.weights, last[0].weights)
    workers = last[0].workers
    assert workers is not None
    assert not torch.equal(workers[0]["norm.weight"], workers[1]["norm.weight"])
    arena = pack(workers, run.recipe.model.parameter_shapes())
    assert_same(unpack(arena.mean(0, keepdim=True), run.recipe.model.parameter_shapes())[0], last[0].weights)
    row = read_rows(finished / "metrics.jsonl")[0]
    assert list(row)[-5:] == ["local_losses", "local_grad_norms", "tokens_per_model", "mixing_step", "mixing_gamma"]
    assert (row["step"], row["mixing_step"], row["tokens_per_model"], row["mixing_gamma"]) == (4, 3, 64, 1.0)
    assert row["grad_norm"] == max(row["local_grad_norms"])
    result = json.loads((finished / "result.json").read_text())
    assert (result["num_models"], result["total_parameters"], result["tokens_per_model"]) == (4, 4 * 3632, 57 * 16)
    assert evaluate_checkpoint(run, "final.pt", cache)["loss"] == result["final_validation"]["loss"]
    assert result["final_validation"]["loss"] < 3.5


def test_interruptions(cache: TokenCache, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At starts and ends of epochs, between them, before and after rows of the log."""
    update = PackedLearner.update
    steps = [1, 2, 4, 13, 14, 15, 28, 31, 32, 42, 43, 56, 57]

    def signalled(self: PackedLearner, tokens: torch.Tensor, targets: torch.Tensor, rate: float, step: int) -> Any:
        if step in steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, tokens, targets, rate, step)

    monkeypatch.setattr(PackedLearner, "update", signalled)
    for step in steps:
        with pytest.raises(Interrupted, match=f"after step {step} of 57"):
            train_run(packed_recipe(), cache, tmp_path / "run")
    train_run(packed_recipe(), cache, tmp_path / "run")
    assert_same_run(tmp_path / "run", finished)


@pytest.mark.parametrize("epoch", [1, 3])
def test_epoch_roots_continue(cache: TokenCache, finished: Path, tmp_path: Path, epoch: int) -> None:
    """From an epoch's root and worker files; a later root whose worker file was altered is passed over."""
    private = Path(shutil.copytree(finished / ".training", tmp_path / "run" / ".training"))
    (private / "final.pt").unlink()
    altered = private / "node-002" / f"epoch-{epoch + 1:03d}.pt"
    altered.write_bytes((private / "node-001" / altered.name).read_bytes())
    for later in range(epoch + 2, 5):
        (private / f"epoch-{later:03d}.pt").unlink()
    lines: list[str] = []
    train_run(packed_recipe(), cache, tmp_path / "run", progress=lines.append)
    assert any("worker checksum mismatch" in line for line in lines)
    assert any(f"continuing after step {[14, 28, 43][epoch - 1]} " in line for line in lines)
    assert_same_run(tmp_path / "run", finished)


def test_a_foreign_packed_training_continues_from_its_first_epoch(reference: Path, tmp_path: Path) -> None:
    """Another program's workers, moments and directed exponential mixing: its own later losses and weights come out."""
    theirs = reference / "runs" / "packed-old"
    cache = TokenCache.open(reference / "data" / "stdlib-512")
    recipe = load_recipe(theirs / "resolved.yaml")
    private = tmp_path / "run" / ".training"
    for place in (".", *(f"node-{worker:03d}" for worker in range(4))):
        (private / place).mkdir(parents=True, exist_ok=True)
        for suffix in ("pt", "safetensors"):
            shutil.copy(theirs / place / f"epoch-001.{suffix}", private / place)
    shutil.copy(theirs / "metrics.jsonl", private)
    write_json(private / "identity.json", {"layout": 1, "recipe_identity": recipe_identity(recipe, cache.identity)})
    train_run(recipe, cache, tmp_path / "run")

    found, expected = read_rows(tmp_path / "run" / "metrics.jsonl"), read_rows(theirs / "metrics.jsonl")
    assert len(found) == len(expected) == 18
    for ours, other in zip(found, expected):
        assert list(ours) == list(other)
        for key, value in other.items():
            close = {"loss": 2e-6, "perplexity": 1e-5, "grad_norm": 1e-5, "lr": 1e-15}
            close |= {"local_losses": 2e-6, "local_grad_norms": 1e-5}
            tolerance = close.get(key, 0.0)
            assert ours[key] == (pytest.approx(value, rel=tolerance, abs=0) if tolerance else value), (key, ours)
    left, right = load_pt(tmp_path / "run" / "final.pt"), load_pt(theirs / "final.pt")
    assert set(left) == set(right)
    difference = left["model"]["parameter_storage"] - right["model"]["parameter_storage"]
    assert difference.abs().max() < 5e-6
    difference = left["optimizer"]["first_moment_storage"] - right["optimizer"]["first_moment_storage"]
    assert difference.abs().max() < 2e-5
    for worker in range(4):
        theirs_at_2 = load_file(theirs / f"node-{worker:03d}" / "epoch-002.safetensors")
        ours_at_2 = load_file(tmp_path / "run" / f"node-{worker:03d}" / "epoch-002.safetensors")
        for name, value in theirs_at_2.items():
            assert (ours_at_2[name] - value).abs().max() < 2e-6


@pytest.mark.parametrize(
    ("name", "workers", "scheme", "settings_of_adamw"),
    [
        ("packed4-20m-awc", 4, "awc", (0.008, 0.95, 0.99)),
        ("packed4-20m-atc", 4, "atc", (0.0056, 0.9, 0.99)),
        ("packed8-20m-awc", 8, "awc", (0.0056, 0.95, 0.999)),
    ],
)
def test_shipped_recipes(name: str, workers: int, scheme: str, settings_of_adamw: tuple[float, ...]) -> None:
    recipe = load_recipe(Path(__file__).parents[2] / "config" / "recipes" / f"{name}.yaml")
    assert recipe.decentralized is not None
    assert (recipe.num_workers, recipe.decentralized.scheme) == (workers, scheme)
    assert (recipe.optimizer.lr, recipe.optimizer.beta1, recipe.optimizer.beta2) == settings_of_adamw
    assert (recipe.training.batch_tokens, recipe.num_parameters) == (131_072, 20_403_520)


def test_packed_demo_reads_the_cache_of_the_demo() -> None:
    recipes = Path(__file__).parents[2] / "config" / "recipes"
    single, packed = (load_recipe(recipes / f"{name}.yaml") for name in ("demo", "packed-demo"))
    assert packed.num_workers == 4
    assert packed.data == single.data
    needed = [required_train_tokens(recipe.sampling(), recipe.data.shard_tokens) for recipe in (single, packed)]
    assert needed[0] == needed[1]
