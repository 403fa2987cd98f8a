"""Refused packed checkpoints: workers missing, altered, of another state, or not averaging to the root."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from runs_cases import (
    WORKERS,
    WRONG,
    Change,
    ordinary_state,
    packed_state,
    random_weights,
    refuse,
    rewrite_root,
    rewrite_worker,
    worker_weights,
    wrong_tensors,
)

from hvpflow.files import write_text
from hvpflow.runs.checkpoints import read_checkpoint, write_safetensors
from hvpflow.runs.pt_files import load_pt, write_pt
from hvpflow.runs.recipe import recipe_from_mapping
from hvpflow.runs.run import Run, open_run


def test_packed_states_need_a_packed_run(ordinary: Run, written_runs: dict[str, Path]) -> None:
    for name in ("epoch-002.pt", "final.pt"):
        shutil.copy(written_runs["packed"] / name, ordinary.directory / name)
        refuse(ordinary, name, "packed training state, which needs a decentralized section")


def test_ordinary_state_in_a_packed_run_lacks_workers(packed: Run) -> None:
    write_pt(packed.directory / "final.pt", ordinary_state(packed.recipe, 4).to_dict())
    refuse(packed, "final.pt", "lacks packed worker weights: use --no-consensus")
    assert read_checkpoint(packed, "final.pt", workers=False).workers is None


def test_worker_state_is_not_complete_alone(packed: Run) -> None:
    shutil.copy(packed.directory / "node-000" / "epoch-002.pt", packed.directory / "epoch-002.pt")
    refuse(packed, "epoch-002.pt", "a single worker's state, which is not complete alone")


def test_missing_worker_export(packed: Run) -> None:
    (packed.directory / "node-002" / "epoch-002.safetensors").unlink()
    refuse(packed, "epoch-002.safetensors", "missing worker checkpoint .*node-002.*--no-consensus")
    assert read_checkpoint(packed, "epoch-002.safetensors", workers=False).workers is None


def test_missing_worker_state(packed: Run) -> None:
    (packed.directory / "node-002" / "epoch-002.pt").unlink()
    for workers in (True, False):  # The root holds no weights: without the workers there is no average either.
        refuse(packed, "epoch-002.pt", "missing worker checkpoint .*node-002", workers=workers)


@pytest.mark.parametrize(("case", "message"), WRONG)
def test_wrong_tensors_in_a_worker_export(packed: Run, case: str, message: str) -> None:
    weights = worker_weights(packed.recipe)[1]
    wrong_tensors(case, weights)
    safetensors.torch.save_file(weights, packed.directory / "node-001" / "epoch-002.safetensors")
    text = refuse(packed, "epoch-002.safetensors", message)
    assert text.startswith("invalid worker parameters: ")
    assert "(worker 1)" in text


@pytest.mark.parametrize(("case", "message"), WRONG)
def test_wrong_tensors_in_a_worker_state(packed: Run, case: str, message: str) -> None:
    rewrite_worker(packed, 1, lambda content: wrong_tensors(case, content["model"]))
    assert "(worker 1)" in refuse(packed, "epoch-002.pt", message)


def test_root_must_be_the_average_of_the_workers(packed: Run) -> None:
    recipe = packed.recipe
    path = packed.directory / "epoch-002.safetensors"
    root = read_checkpoint(packed, path.name).weights
    name = "blocks.0.ffn.up_proj.weight"
    scale = root[name].abs().max()
    row, column = divmod(int(root[name].abs().argmax()), root[name].shape[1])
    for factor, accepted in ((1 + 0.9e-5, True), (1 + 2e-5, False)):
        weights = {key: value.clone() for key, value in root.items()}
        weights[name][row, column] *= factor
        write_safetensors(path, weights)
        if accepted:
            read_checkpoint(packed, path.name)
        else:
            refuse(packed, path.name, f"root weights differ from the worker average: .*'{name}'.*--no-consensus")
    assert scale > 1
    # The workers of another epoch, all of them sound.
    for worker, weights in enumerate(reversed([random_weights(recipe, seed) for seed in range(WORKERS)])):
        write_safetensors(packed.directory / f"node-{worker:03d}" / path.name, weights)
    refuse(packed, path.name, "root weights differ from the worker average")


def test_altered_worker_state_is_found_by_its_checksum(packed: Run) -> None:
    shutil.copy(packed.directory / "node-000" / "epoch-002.pt", packed.directory / "node-001" / "epoch-002.pt")
    refuse(packed, "epoch-002.pt", "worker checksum mismatch: .*node-001")


def moment(name: str, key: str, value: Any) -> Change:
    return lambda content: content["optimizer"]["state"][name].update({key: value})


def negative_moment(content: dict[str, Any]) -> None:
    content["optimizer"]["state"]["norm.weight"]["exp_avg_sq"][0] = -1.0


WORKER_CHANGES: list[tuple[str, Change, str]] = [
    ("kind", lambda c: c.update(kind="x"), "is no worker state"),
    ("version", lambda c: c.update(version=2), "is no worker state"),
    ("entry", lambda c: c.pop("optimizer"), "lacks the entry 'optimizer'"),
    ("worker", lambda c: c.update(worker=2), "worker is 2, not 1"),
    ("count", lambda c: c.update(num_workers=8), "num_workers is 8, not 4"),
    ("identity", lambda c: c.update(recipe_identity="cd" * 32), "recipe_identity"),
    ("identity-type", lambda c: c.update(recipe_identity=torch.zeros(3)), "recipe_identity is no text"),
    ("cursor", lambda c: c.update(cursor=8), "cursor is 8, not"),
    ("step", lambda c: c.update(step=1), "step is 1, not"),
    ("epoch", lambda c: c.update(completed_epochs=1), "completed_epochs is 1, not 2"),
    ("epoch-type", lambda c: c.update(completed_epochs="2"), "expected a whole number"),
    ("model", lambda c: c["model_config"].update(norm_eps=1.0), "model_config differs"),
    ("model-key", lambda c: c["model_config"].update(depth=1), "model_config.*'depth'|'depth'.*model_config"),
    ("no-state", lambda c: c["optimizer"].pop("state"), "the optimizer has no state"),
    ("no-moments", lambda c: c["optimizer"]["state"].pop("norm.weight"), "optimizer lacks the tensor 'norm.weight'"),
    ("moment-shape", moment("norm.weight", "exp_avg", torch.zeros(3)), "'exp_avg of norm.weight' has shape"),
    ("moment-nan", moment("norm.weight", "exp_avg", torch.full((8,), float("nan"))), "non-finite"),
    ("moment-type", moment("norm.weight", "exp_avg_sq", torch.zeros(8).half()), "has type torch.float16"),
    ("moment-none", moment("norm.weight", "exp_avg_sq", None), "'exp_avg_sq of norm.weight' is no dense tensor"),
    ("moment-negative", negative_moment, "exp_avg_sq of 'norm.weight' holds negative values"),
    ("counter", moment("norm.weight", "step", torch.tensor(1.0)), "step counter of 'norm.weight' is not"),
    ("one-group", lambda c: c["optimizer"]["param_groups"].pop(), "two parameter groups"),
    ("groups", lambda c: c["optimizer"]["param_groups"].reverse(), "two parameter groups"),
    ("group-order", lambda c: c["optimizer"]["param_groups"][0]["params"].reverse(), "two parameter groups"),
]


@pytest.mark.parametrize(("change", "message"), [c[1:] for c in WORKER_CHANGES], ids=[c[0] for c in WORKER_CHANGES])
def test_worker_states_with_wrong_entries(packed: Run, change: Change, message: str) -> None:
    rewrite_worker(packed, 1, change)
    assert "node-001" in refuse(packed, "epoch-002.pt", message)


def root_worker(number: int, key: str, value: Any) -> Change:
    return lambda content: content["workers"][number].update({key: value})


ROOT_CHANGES: list[tuple[str, Change, str]] = [
    ("kind", lambda c: c.update(kind="packed"), "kind is 'packed', expected 'packed_epoch'"),
    ("count", lambda c: c.update(num_workers=3), "num_workers is 3, but 4 are listed"),
    ("fewer", lambda c: c.update(num_workers=3, workers=c["workers"][:3]), "lists 3 workers, resolved.yaml has 4"),
    ("order", lambda c: c["workers"].reverse(), "entry 0 of its workers is not worker 0"),
    ("path", root_worker(1, "path", "../outside/epoch-002.pt"), "entry 1 .* is not worker 1 at node-001/epoch-002.pt"),
    ("absolute", root_worker(1, "path", "/etc/passwd"), "entry 1 of its workers"),
    ("hash", root_worker(3, "sha256", "0" * 64), "worker checksum mismatch: .*node-003"),
    ("hash-type", root_worker(3, "sha256", None), "worker checksum mismatch: .*node-003"),
    ("entry", lambda c: c["workers"].__setitem__(0, "node-000/epoch-002.pt"), "entry 0 of its workers"),
    ("workers-type", lambda c: c.update(workers={}), "workers is a dict, expected a list"),
    ("position", lambda c: c.update(cursor=c["cursor"] - 8, step=c["step"] - 1), "is not the end of epoch 2"),
]


@pytest.mark.parametrize(("change", "message"), [c[1:] for c in ROOT_CHANGES], ids=[c[0] for c in ROOT_CHANGES])
def test_packed_roots_with_wrong_entries(packed: Run, change: Change, message: str) -> None:
    content = load_pt(packed.directory / "epoch-002.pt")
    change(content)
    write_pt(packed.directory / "epoch-002.pt", content)
    refuse(packed, "epoch-002.pt", message)


def storage(part: str, key: str, change: Callable[[torch.Tensor], Any]) -> Change:
    return lambda content: content[part].update({key: change(content[part][key].clone())})


def filled(worker: int, element: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def fill(tensor: torch.Tensor) -> torch.Tensor:
        tensor[worker, element] = value
        return tensor

    return fill


ARENA_CHANGES: list[tuple[str, Change, str]] = [
    ("layout", lambda c: c["model"]["layout"][1].update(start=0), "the layout of parameter_storage"),
    ("layout-short", lambda c: c["model"]["layout"].pop(), "the layout of parameter_storage"),
    ("layout-odd", lambda c: c["model"]["layout"][0].update(shape=(torch.zeros(2), 8)), "the layout of"),
    ("arena-version", lambda c: c["model"].update(version=2), "the layout of parameter_storage"),
    ("rows", storage("model", "parameter_storage", lambda t: t[:3]), r"'parameter_storage' has shape \(3,"),
    ("columns", storage("model", "parameter_storage", lambda t: t[:, :-1]), "'parameter_storage' has shape"),
    ("type", storage("model", "parameter_storage", lambda t: t.double()), "'parameter_storage' has type"),
    ("nan", storage("model", "parameter_storage", filled(2, 5, float("nan"))), "non-finite"),
    ("padding", storage("model", "parameter_storage", filled(0, -1, 1.0)), "values between the parameters"),
    ("first", storage("optimizer", "first_moment_storage", filled(1, 0, float("inf"))), "'first_moment_storage' holds"),
    ("second", storage("optimizer", "second_moment_storage", filled(1, 0, -1.0)), "negative values"),
    ("no-second", lambda c: c["optimizer"].pop("second_moment_storage"), "'second_moment_storage' is no dense tensor"),
    ("workers", lambda c: c["optimizer"]["workers"].pop(), "does not list 4 workers"),
    ("steps", lambda c: c.update(step=c["step"] - 1), "step counters are not all"),
    ("groups", lambda c: c["optimizer"]["workers"][0].update(groups=[]), "two parameter groups"),
]


@pytest.mark.parametrize(("change", "message"), [c[1:] for c in ARENA_CHANGES], ids=[c[0] for c in ARENA_CHANGES])
def test_packed_states_with_wrong_entries(packed: Run, change: Change, message: str) -> None:
    rewrite_root(packed, packed_state(packed.recipe, 4), "final.pt", change)
    refuse(packed, "final.pt", message)


def test_altered_reference_files_are_refused(reference: Path, tmp_path: Path) -> None:
    directory = tmp_path / "packed"
    shutil.copytree(reference / "runs" / "packed-old", directory, copy_function=shutil.copyfile)
    run = open_run(directory)

    def damage(name: str, position: int) -> None:
        content = bytearray((directory / name).read_bytes())
        content[position] ^= 0xFF
        (directory / name).write_bytes(content)

    damage("node-003/epoch-001.pt", 100_000)
    refuse(run, "epoch-001.pt", "worker checksum mismatch: .*node-003")
    damage("final.pt", 100_000)
    refuse(run, "final.pt", "checksum mismatch in its record")
    damage("node-001/epoch-004.safetensors", -10_001)
    refuse(run, "epoch-004.safetensors", "root weights differ from the worker average|non-finite")
    (directory / "node-000" / "epoch-003.safetensors").unlink()
    refuse(run, "epoch-003.safetensors", "missing worker checkpoint")
    assert read_checkpoint(run, "epoch-002.pt").workers is not None


def test_packed_state_of_other_workers_is_refused(packed: Run) -> None:
    mapping = packed.recipe.to_mapping()
    mapping["decentralized"]["scheme"] = "atc"
    write_text(packed.directory / "resolved.yaml", recipe_from_mapping(mapping).to_yaml())
    other = Run(packed.directory, recipe_from_mapping(mapping))
    refuse(other, "final.pt", "recipe does not match: decentralized.scheme is 'awc' in .*, 'atc' in")
