"""Recipes: both generations, presets, refusals, identity, retention, and what importing them loads."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from runs_cases import small_mapping

from hvpflow.errors import HvpflowError
from hvpflow.runs.recipe import (
    check_cache_matches,
    load_recipe,
    recipe_from_mapping,
    recipe_identity,
    retained_files,
)

RECIPES = Path(__file__).resolve().parents[2] / "config" / "recipes"
REFERENCE_RUNS = ("ordinary-new", "ordinary-old", "packed-old")


def changed(key: str, value: Any, *, packed: bool = False) -> dict[str, Any]:
    """The small recipe with one dotted key set."""
    mapping = small_mapping(packed=packed)
    *sections, last = key.split(".")
    target = mapping
    for section in sections:
        target = target.setdefault(section, {})
    target[last] = value
    return mapping


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_state_every_key(path: Path) -> None:
    mapping = yaml.safe_load(path.read_text())
    mapping.pop("corpus", None)  # where text comes from is no part of a run
    recipe = load_recipe(path)
    # Equal to the last key: a new setting must be added to the presets, where users look for it.
    assert json.dumps(mapping) == json.dumps(recipe.to_mapping())
    assert recipe.generation == "new"


def test_demo_preset_is_the_documented_training() -> None:
    recipe = load_recipe(RECIPES / "demo.yaml")
    assert recipe.num_epochs == 120
    assert retained_files(recipe) == [*(f"epoch-{e:03d}.safetensors" for e in (1, 4, 8, 16, 32, 64)), "final.pt"]
    boundaries = recipe.sampling().boundaries()
    assert boundaries[-1] * 128 == pytest.approx(4.8 * recipe.num_parameters, abs=256)


@pytest.mark.parametrize("name", REFERENCE_RUNS)
def test_reference_recipes_round_trip(reference: Path, name: str) -> None:
    path = reference / "runs" / name / "resolved.yaml"
    recipe = load_recipe(path)
    assert json.dumps(recipe.to_mapping()) == json.dumps(yaml.safe_load(path.read_text()))
    assert recipe.generation == ("new" if name.endswith("new") else "old")
    assert not recipe.warnings


@pytest.mark.parametrize("name", REFERENCE_RUNS)
def test_recipe_identity_equals_the_recorded_one(reference: Path, name: str) -> None:
    run = reference / "runs" / name
    cache = json.loads((reference / "data" / "stdlib-512" / "manifest.json").read_text())
    recorded = json.loads((run / "result.json").read_text())["recipe_identity"]
    assert recipe_identity(load_recipe(run / "resolved.yaml"), cache["identity"]) == recorded


def test_identity_ignores_retention_and_machine_only() -> None:
    base = recipe_identity(recipe_from_mapping(small_mapping()), "c")
    same = [
        ("data.cache_dir", "elsewhere"),
        ("data.prefetch", False),
        ("training.checkpoint_policy", "none"),
        ("training.save_epoch_training_state", False),
        ("runtime.device", "cuda:1"),
        ("runtime.cpu_threads", 3),
        ("runtime.output_dir", "x"),
    ]
    other = [
        ("optimizer.lr", 0.5),
        ("runtime.seed", 1),
        ("evaluation.seed", 1),
        ("data.shuffle_group_size", 3),
        ("model.init_std", 0.1),
        ("lr_schedule.warmup_steps", 1),
    ]
    for key, value in same:
        assert recipe_identity(recipe_from_mapping(changed(key, value)), "c") == base, key
    identities = {recipe_identity(recipe_from_mapping(changed(key, value)), "c") for key, value in other}
    assert len(identities | {base, recipe_identity(recipe_from_mapping(small_mapping()), "d")}) == len(other) + 2


def test_defaults_depend_on_the_generation() -> None:
    new, old = recipe_from_mapping({}), recipe_from_mapping({"data": {"buffer_size_mib": 1}})
    assert (new.generation, new.data.shuffle_group_size, new.data.buffer_size_mib) == ("new", 2, None)
    assert (old.generation, old.data.shuffle_group_size, old.data.buffer_size_mib) == ("old", None, 1.0)
    assert (new.data.shuffle_buffer, old.data.shuffle_buffer) == (100000, 10000)
    assert (new.sampling().loader_version, old.sampling().loader_version) == (2, 1)
    assert new.lr_schedule is not None
    assert old.lr_schedule is None
    assert old.optimizer.warmup_fraction is not None
    assert "lr_schedule" not in old.to_mapping()
    assert {"prepare_workers", "shuffle_group_size"}.isdisjoint(old.to_mapping()["data"])
    assert "buffer_size_mib" not in new.to_mapping()["data"]


def test_experimental_optimizer_keys_are_ignored_and_recorded() -> None:
    mapping = small_mapping() | {"optimizer": {"name": "accum_adamw", "accumulation_steps": 4, "accum_iter": 4}}
    recipe = recipe_from_mapping(mapping)
    assert len(recipe.warnings) == 3
    assert "optimizer.accum_iter" in recipe.warnings[2]
    assert "name" not in recipe.to_mapping()["optimizer"]


REFUSED = [
    ("modle.width", 8, "unknown section 'modle'.*'model'"),
    ("model.widht", 8, "unknown key 'widht' in model.*'width'"),
    ("optimizer.accumulation", 8, "unknown key 'accumulation' in optimizer"),
    ("training.tokens_per_parameter", 20, "write training.tokens_per_parameters"),
    ("training.epoch_tokens_per_parameter", 1, "write training.epoch_tokens_per_parameters"),
    ("training.max_tokens", 100, "write training.tokens_per_parameters"),
    ("training.epoch_tokens", 100, "write training.epoch_tokens_per_parameters"),
    ("training.checkpoint_every", 2, "write training.checkpoint_policy: interval"),
    ("training.checkpoint_policy", "all", "checkpoint_policy: interval"),
    ("training.checkpoint_policy", "explict", "'explicit'"),
    ("training.checkpoint_epochs", [2, 3], "policy interval takes one number"),
    ("training.checkpoint_epochs", [0], "distinct epochs from 1"),
    ("training.batch_tokens", 30, "multiple of model.context_length"),
    ("training.micro_batch_size", 9, "8 sequences"),
    ("training.tokens_per_parameters", 1.7, "whole"),
    ("training.tokens_per_parameters", float("nan"), "finite"),
    ("training.batch_tokens", 4000, "shorter than a batch"),
    ("model.width", 9, "expected an even whole number"),
    ("model", [1], "model must be a mapping"),
    ("model.width", "wide", "model.width is 'wide', expected a whole number"),
    ("optimizer.lr", -1.0, "optimizer.lr is -1.0, expected a positive"),
    ("optimizer.beta2", 1.0, "optimizer.beta2"),
    ("optimizer.grad_clip", -0.5, "optimizer.grad_clip"),
    ("runtime.seed", 2**32, "expected a seed from 0"),
    ("runtime.seed", True, "expected a whole number"),
    ("runtime.device", "gpu", "expected cpu, cuda"),
    ("runtime.cpu_threads", 0, "runtime.cpu_threads is 0"),
    ("lr_schedule.name", "cosin", "'cosine'"),
    ("lr_schedule.decay_fraction", 0.1, "unknown key 'decay_fraction'"),
    ("lr_schedule.min_lr_ratio", 1.5, "share from 0 to 1"),
    ("data.shuffle_group_size", None, "data.shuffle_group_size is null"),
    ("data.shuffle_group_size", 0, "data.shuffle_group_size is 0"),
    ("data.buffer_size_mib", 1e-9, "buffer_size_mib"),
    ("evaluation.subset_blocks", 0, "evaluation.subset_blocks"),
    ("decentralized.num_models", 1, "decentralized: null"),
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED, ids=[f"{key}={value}" for key, value, _ in REFUSED])
def test_refusals(key: str, value: Any, message: str) -> None:
    with pytest.raises(HvpflowError, match=message):
        recipe_from_mapping(changed(key, value))


def test_keys_of_two_generations_are_refused() -> None:
    mapping = changed("optimizer.warmup_fraction", 0.1) | {"lr_schedule": {"name": "wsd"}}
    with pytest.raises(
        HvpflowError, match=r"optimizer.warmup_fraction and lr_schedule belong to different generations"
    ):
        recipe_from_mapping(mapping)


def test_explicit_epochs_must_exist() -> None:
    mapping = changed("training.checkpoint_epochs", [1, 5])
    mapping["training"]["checkpoint_policy"] = "explicit"
    with pytest.raises(HvpflowError, match=r"holds \[5\], but the run has 4 epochs"):
        recipe_from_mapping(mapping)
    mapping["training"]["checkpoint_epochs"] = []
    with pytest.raises(HvpflowError, match="explicit needs the epochs"):
        recipe_from_mapping(mapping)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("training.batch_tokens", 64, "num_models 4 × training.micro_batch_size 2 × model.context_length 4 = 32"),
        ("decentralized.num_models", 6, "power of two"),
        ("decentralized.num_models", 3, "power of two"),
        ("decentralized.topology", "ring", "one_peer_ring"),
        ("decentralized.scheme", "act", "expected one of awc, atc"),
        ("decentralized.adaptive_consensus", {"power": 1}, "unknown key 'power'"),
        ("decentralized.adaptive_consensus", {"p": 1, "start_frac": 2}, "start_frac is 2.0"),
    ],
)
def test_packed_refusals(key: str, value: Any, message: str) -> None:
    mapping = changed(key, value, packed=True)
    if key == "decentralized.num_models":
        mapping["training"]["batch_tokens"] = 8 * value
    with pytest.raises(HvpflowError, match=message):
        recipe_from_mapping(mapping)


def test_ring_needs_an_even_number_only_in_the_new_generation() -> None:
    mapping = changed("decentralized", {"num_models": 3, "topology": "one_peer_ring"}, packed=True)
    mapping["training"]["batch_tokens"] = 24
    with pytest.raises(HvpflowError, match="even number"):
        recipe_from_mapping(mapping)
    mapping["data"]["buffer_size_mib"] = 1.0
    assert recipe_from_mapping(mapping).num_workers == 3


def test_epoch_count_uses_the_decimal_text() -> None:
    # In binary floating point 1.2 / 0.4 is 2.9999999999999996.
    mapping = changed("training.tokens_per_parameters", 1.2)
    mapping["training"]["epoch_tokens_per_parameters"] = 0.4
    assert recipe_from_mapping(mapping).num_epochs == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "not valid YAML"),
        ("model: {width: 8}\nmodel: {width: 16}", "'model' appears twice"),
        ("model: &m {width: 8}\ndata: *m", "aliases"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("just text", "must (be|hold) a mapping"),
        ("[" * 5000, "not valid YAML"),
    ],
)
def test_unreadable_yaml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(HvpflowError, match=message) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HvpflowError, match="cannot read"):
        load_recipe(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(HvpflowError, match="not valid YAML"):
        load_recipe(tmp_path / "binary.yaml")


def test_yaml_round_trip(tmp_path: Path) -> None:
    recipe = recipe_from_mapping(changed("data.dataset", "Bücher", packed=True))
    (tmp_path / "r.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(tmp_path / "r.yaml") == recipe


@pytest.mark.parametrize(
    ("policy", "epochs", "states", "expected"),
    [
        ("none", [1], True, []),
        ("final", [1], True, ["final.pt"]),
        ("interval", [3], False, ["epoch-003.safetensors", "final.pt"]),
        (
            "explicit",
            [4, 1],
            True,
            ["epoch-001.safetensors", "epoch-001.pt", "epoch-004.safetensors", "epoch-004.pt", "final.pt"],
        ),
    ],
)
def test_retained_files(policy: str, epochs: list[int], states: bool, expected: list[str]) -> None:
    mapping = small_mapping()
    mapping["training"] |= {
        "checkpoint_policy": policy,
        "checkpoint_epochs": epochs,
        "save_epoch_training_state": states,
    }
    assert retained_files(recipe_from_mapping(mapping)) == expected


def test_retained_files_are_those_of_the_reference(reference: Path) -> None:
    for name in REFERENCE_RUNS:
        directory = reference / "runs" / name
        found = {
            str(path.relative_to(directory)) for path in directory.rglob("*") if path.suffix in (".pt", ".safetensors")
        }
        assert set(retained_files(load_recipe(directory / "resolved.yaml"))) == found


def cache_like(recipe: Any) -> Any:
    data = recipe.data
    manifest = {
        "dataset": data.dataset,
        "dataset_revision": "r7",
        "tokenizer": data.tokenizer,
        "tokenizer_revision": "t7",
        "preprocessing": {"shuffle_seed": data.shuffle_seed, "shuffle_buffer": data.shuffle_buffer},
    }
    return SimpleNamespace(directory=Path("cache"), vocab_size=recipe.model.vocab_size, manifest=manifest)


def test_cache_of_other_data_is_refused() -> None:
    recipe = recipe_from_mapping(small_mapping())
    check_cache_matches(recipe, cache_like(recipe))
    check_cache_matches(recipe_from_mapping(changed("data.revision", "r7")), cache_like(recipe))
    for key, value in [
        ("model.vocab_size", 17),
        ("data.dataset", "other"),
        ("data.tokenizer", "other"),
        ("data.revision", "r8"),
        ("data.tokenizer_revision", "t8"),
        ("data.shuffle_seed", 1),
        ("data.shuffle_buffer", 1),
    ]:
        with pytest.raises(HvpflowError, match=f"does not match the recipe: {key} is"):
            check_cache_matches(recipe_from_mapping(changed(key, value)), cache_like(recipe))


def test_recipes_are_not_changed_by_reading() -> None:
    mapping = small_mapping() | {"optimizer": {"name": "x"}}
    before = copy.deepcopy(mapping)
    recipe_from_mapping(mapping)
    assert mapping == before


def test_planning_modules_import_neither_torch_nor_pandas() -> None:
    code = (
        "import sys, hvpflow.runs.recipe, hvpflow.runs.run, hvpflow.models.config, hvpflow.data.epochs\n"
        "print([name for name in ('torch', 'pandas') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
