"""Whole trainings on a tiny recipe: against a plain loop, published files, retention, refusals."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from training_cases import assert_same, make_recipe, read_rows

from hvpflow.data.cache import TokenCache
from hvpflow.data.epochs import training_stream
from hvpflow.errors import HvpflowError
from hvpflow.models.llama import Llama
from hvpflow.runs.recipe import Recipe, load_recipe
from hvpflow.runs.run import open_run
from hvpflow.runs.weights import weights_hash
from hvpflow.training import evaluate_checkpoint, train, train_run
from hvpflow.training.learner import initial_model


def copied(run: Path, target: Path) -> Path:
    return Path(shutil.copytree(run, target / "run"))


def plain_training(recipe: Recipe, cache: TokenCache, num_steps: int) -> tuple[list[float], list[float], Llama]:
    """The losses, gradient norms and model of a training written out in plain PyTorch, one pass a batch."""
    model = initial_model(recipe)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    tokens = np.concatenate([np.fromfile(file, dtype="<u2") for file in cache.split("train").files]).astype(np.int64)
    stream = training_stream(recipe.sampling(), cache.split("train"))
    losses, norms = [], []
    for step in range(1, num_steps + 1):
        rows = np.stack([tokens[16 * block : 16 * block + 17] for block in stream[5 * step - 5 : 5 * step]])
        inputs, targets = torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for group in optimizer.param_groups:
            cosine = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 5) / (45 - 5)))
            group["lr"] = 0.01 * (step / 5 if step < 5 else cosine)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model


def test_training_is_the_plain_loop(cache: TokenCache, finished: Path) -> None:
    losses, norms, model = plain_training(make_recipe(), cache, 45)
    rows = [row for row in read_rows(finished / "metrics.jsonl") if row["event"] == "train"]
    assert [row["step"] for row in rows] == [4, 8, 11, 12, 16, 20, 23, 24, 28, 32, 34, 36, 40, 44, 45]
    start = 0
    for row in rows:
        assert row["loss"] == pytest.approx(np.mean(losses[start : row["step"]]), rel=1e-5)
        assert row["grad_norm"] == pytest.approx(norms[row["step"] - 1], rel=1e-4)
        start = row["step"]
    assert losses[-1] < losses[0] - 1.5, "nothing was learnt, so the comparison would mean little"
    trained = load_file(finished / "epoch-004.safetensors")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("size", [1, 4, 5])
def test_microbatches_do_not_change_the_losses(cache: TokenCache, finished: Path, tmp_path: Path, size: int) -> None:
    train_run(make_recipe(training={"micro_batch_size": size}), cache, tmp_path / "run")
    expected, found = read_rows(finished / "metrics.jsonl"), read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-5)


def test_published_files(cache: TokenCache, finished: Path) -> None:
    names = {path.name for path in finished.iterdir()} - {".training"}
    records = {
        "resolved.yaml",
        "metrics.jsonl",
        "result.json",
        "best.json",
        "environment.json",
        "status.json",
        "run.log",
    }
    checkpoints = {f"epoch-{epoch:03d}.{kind}" for epoch in (1, 2, 3, 4) for kind in ("safetensors", "pt")}
    assert names == records | checkpoints | {"final.pt"}
    assert open_run(finished).checkpoints() == sorted(checkpoints | {"final.pt"})

    resolved = load_recipe(finished / "resolved.yaml")
    assert (resolved.data.revision, resolved.data.tokenizer_revision) == ("v1", "v2")
    assert yaml.safe_load((finished / "resolved.yaml").read_text()) == resolved.to_mapping()

    weights = load_file(finished / "epoch-002.safetensors")
    assert list(weights) == sorted(make_recipe().model.parameter_shapes())
    with safe_open(finished / "epoch-002.safetensors", "pt") as file:
        metadata = {"format_version": "1", "epoch": "2", "step": "23", "tokens": "1840"}
        assert file.metadata() == metadata | {"weights_hash": weights_hash(weights)}

    state = torch.load(finished / "epoch-002.pt", weights_only=True)
    assert list(state["model"]) == list(make_recipe().model.parameter_shapes())
    assert (state["version"], state["cursor"], state["step"], state["completed_epochs"]) == (2, 115, 23, 2)
    assert [len(group["params"]) for group in state["optimizer"]["param_groups"]] == [8, 3]
    assert state["loader"]["cache_identity"] == cache.identity
    assert_same(dict(state["model"]), {name: weights[name] for name in state["model"]})

    result = json.loads((finished / "result.json").read_text())
    assert (result["status"], result["step"], result["epochs"], result["tokens"]) == ("complete", 45, 4, 3600)
    assert result["final_validation"]["tokens"] == 1002
    assert result["recipe_identity"] == state["recipe_identity"]
    best = json.loads((finished / "best.json").read_text())
    assert best == {"epoch": 4, "loss": result["best_subset_loss"], "weights": "epoch-004.safetensors"}
    assert json.loads((finished / "status.json").read_text())["status"] == "complete"
    assert "validation loss" in (finished / "run.log").read_text()


def test_auto_settings_are_resolved(cache: TokenCache, tmp_path: Path) -> None:
    runtime = {"device": "auto", "cpu_threads": "auto"}
    train_run(make_recipe(runtime=runtime, training={"checkpoint_policy": "final"}), cache, tmp_path / "run")
    resolved = load_recipe(tmp_path / "run" / "resolved.yaml").runtime
    assert resolved.device in ("cpu", "cuda:0")
    assert resolved.cpu_threads == torch.get_num_threads()


def test_narrower_retention_keeps_what_is_published(cache: TokenCache, finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    train_run(make_recipe(training={"checkpoint_policy": "final"}), cache, run)
    assert open_run(run).checkpoints() == open_run(finished).checkpoints()
    assert load_recipe(run / "resolved.yaml").training.checkpoint_policy == "final"


def test_weights_are_links_to_the_private_files(finished: Path) -> None:
    for name in ("epoch-001.safetensors", "epoch-003.pt", "final.pt"):
        assert (finished / name).samefile(finished / ".training" / name)
    assert not (finished / ".training" / "rolling.pt").exists()


@pytest.mark.parametrize(
    ("policy", "epochs", "states", "expected"),
    [
        ("none", [1], True, []),
        ("final", [1], True, []),
        ("interval", [2], False, ["epoch-002.safetensors", "epoch-004.safetensors"]),
        ("explicit", [1, 3], True, ["epoch-001.pt", "epoch-001.safetensors", "epoch-003.pt", "epoch-003.safetensors"]),
    ],
)
def test_policies(
    cache: TokenCache, finished: Path, tmp_path: Path, policy: str, epochs: list, states: bool, expected: list
) -> None:
    training = {"checkpoint_policy": policy, "checkpoint_epochs": epochs, "save_epoch_training_state": states}
    train_run(make_recipe(training=training), cache, tmp_path / "run")
    assert open_run(tmp_path / "run").checkpoints() == expected + (["final.pt"] if policy != "none" else [])
    assert read_rows(tmp_path / "run" / "metrics.jsonl") == read_rows(finished / "metrics.jsonl")
    best = json.loads((tmp_path / "run" / "best.json").read_text())
    assert best["weights"] == ("epoch-004.safetensors" if "epoch-004.safetensors" in expected else None)


def test_again_links_without_training(
    cache: TokenCache, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(finished, tmp_path)
    for path in run.iterdir():
        if path.is_file():
            path.unlink()

    def refuse(*arguments: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(train, "_train", refuse)
    train_run(make_recipe(), cache, run)
    assert open_run(run).checkpoints() == open_run(finished).checkpoints()
    assert (run / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_links_fall_back_to_copies(
    cache: TokenCache, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(finished, tmp_path)
    (run / "final.pt").unlink()

    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr("os.link", refuse)
    train_run(make_recipe(), cache, run)
    assert not (run / "final.pt").samefile(run / ".training" / "final.pt")
    assert (run / "final.pt").read_bytes() == (finished / "final.pt").read_bytes()


def test_another_recipe_moves_the_old_run_aside(cache: TokenCache, finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    lines: list[str] = []
    other = make_recipe(optimizer={"lr": 0.02}, training={"checkpoint_policy": "final"})
    train_run(other, cache, run, progress=lines.append)
    assert any("run.replaced-1" in line for line in lines)
    aside = tmp_path / "run.replaced-1"
    assert (aside / "epoch-001.safetensors").read_bytes() == (finished / "epoch-001.safetensors").read_bytes()
    assert open_run(run).checkpoints() == ["final.pt"]
    train_run(make_recipe(), cache, run)
    assert open_run(tmp_path / "run.replaced-2").checkpoints() == ["final.pt"]


def test_a_run_trained_elsewhere_is_moved_aside(cache: TokenCache, finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    shutil.rmtree(run / ".training")
    train_run(make_recipe(), cache, run)
    assert (tmp_path / "run.replaced-1" / "final.pt").is_file()
    assert_same(load_file(run / "epoch-004.safetensors"), load_file(finished / "epoch-004.safetensors"))


def test_foreign_files_beside_a_run_stay(cache: TokenCache, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    train_run(make_recipe(training={"checkpoint_policy": "final"}), cache, tmp_path / "run")
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_evaluation_repeats_the_final_validation(cache: TokenCache, finished: Path) -> None:
    run = open_run(finished)
    logged = json.loads((finished / "result.json").read_text())["final_validation"]
    for name in ("final.pt", "epoch-004.safetensors"):
        found = evaluate_checkpoint(run, name, cache)
        assert (found["loss"], found["tokens"]) == (logged["loss"], 1002)
        assert found["perplexity"] == pytest.approx(math.exp(logged["loss"]))
    assert evaluate_checkpoint(run, "epoch-001.pt", cache)["loss"] > logged["loss"] + 0.1


@pytest.mark.parametrize("clip", [None, 0.0])
def test_no_clipping(cache: TokenCache, tmp_path: Path, clip: float | None) -> None:
    """A limit far above every norm and none at all are the same training."""
    training = {"checkpoint_policy": "final"}
    train_run(make_recipe(optimizer={"grad_clip": clip}, training=training), cache, tmp_path / "none")
    train_run(make_recipe(optimizer={"grad_clip": 1e6}, training=training), cache, tmp_path / "high")
    assert read_rows(tmp_path / "none" / "metrics.jsonl") == read_rows(tmp_path / "high" / "metrics.jsonl")


def test_divergence_stops_and_keeps_what_was_saved(cache: TokenCache, tmp_path: Path) -> None:
    recipe = make_recipe(
        optimizer={"lr": 1e36, "grad_clip": None, "weight_decay": 0.0},
        lr_schedule={"name": "cosine", "warmup_steps": 0, "min_lr_ratio": 1.0},
    )
    with pytest.raises(HvpflowError, match=r"step \d+ \(epoch 1, learning rate 1e\+36\); lower optimizer.lr"):
        train_run(recipe, cache, tmp_path / "run")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["status"] == "failed"
    assert "lower optimizer.lr" in status["message"]
    assert not list((tmp_path / "run").glob("*.pt"))
    assert "lower optimizer.lr" in (tmp_path / "run" / ".training" / "run.log").read_text()


def test_refusals_come_before_anything_is_touched(cache: TokenCache, tmp_path: Path) -> None:
    with pytest.raises(HvpflowError, match="does not match"):
        train_run(make_recipe(data={"dataset": "other"}), cache, tmp_path / "run")
    with pytest.raises(HvpflowError, match="too small"):
        train_run(make_recipe(training={"tokens_per_parameters": 4.0}), cache, tmp_path / "run")
    if not torch.cuda.is_available():
        with pytest.raises(HvpflowError, match=r"device cuda:1 was asked for, but .* CUDA"):
            train_run(make_recipe(runtime={"device": "cuda:1"}), cache, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_trainings_of_one_run_are_refused(cache: TokenCache, finished: Path, tmp_path: Path) -> None:
    import fcntl

    run = copied(finished, tmp_path)
    with (run / ".training" / "lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        for recipe in (make_recipe(), make_recipe(optimizer={"lr": 0.02})):
            with pytest.raises(HvpflowError, match="another process is training"):
                train_run(recipe, cache, run)
    assert not (tmp_path / "run.replaced-1").exists()
