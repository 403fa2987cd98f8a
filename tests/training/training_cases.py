"""A token cache of synthetic text and recipes small enough to train in a fraction of a second."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvpflow.data.cache import TokenCache, manifest_identity
from hvpflow.runs.pt_files import load_pt
from hvpflow.runs.recipe import Recipe, recipe_from_mapping

VOCABULARY = 64
SHARD_TOKENS = 500


def make_cache(directory: Path) -> TokenCache:
    """12000 training and 1003 validation tokens of a noisy cycle, which a model can learn to predict."""
    random = np.random.default_rng(7)
    directory.mkdir(parents=True)
    splits = {}
    for name, count in (("train", 12_000), ("validation", 1_003)):
        steps = random.choice([1, 2, 5], size=count, p=[0.7, 0.2, 0.1])
        tokens = (np.cumsum(steps) % VOCABULARY).astype("<u2")
        shards = []
        for index in range(-(-count // SHARD_TOKENS)):
            content = tokens[index * SHARD_TOKENS : (index + 1) * SHARD_TOKENS].tobytes()
            file = f"{name}-{index:05d}.bin"
            (directory / file).write_bytes(content)
            shards.append({"file": file, "tokens": len(content) // 2, "sha256": hashlib.sha256(content).hexdigest()})
        splits[name] = {"tokens": count, "shards": shards}
    manifest: dict[str, Any] = {
        "version": 1,
        "dataset": "cycle",
        "dataset_revision": "v1",
        "tokenizer": "numbers",
        "tokenizer_revision": "v2",
        "tokenizer_fingerprint": "0" * 64,
        "vocab_size": VOCABULARY,
        "eos_token_id": 0,
        "dtype": "<u2",
        "preprocessing": {"shuffle_seed": 42, "shuffle_buffer": 10, "append_eos": True, "add_special_tokens": False},
        "validation_complete": True,
        "splits": splits,
    }
    manifest["identity"] = manifest_identity(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return TokenCache.open(directory)


def make_recipe(**changes: dict[str, Any] | None) -> Recipe:
    """3632 parameters, 4 epochs of 11 or 12 updates on 5 sequences in microbatches of 2; ``changes`` by section."""
    mapping: dict[str, Any] = {
        "model": {
            "vocab_size": VOCABULARY,
            "layers": 1,
            "width": 16,
            "heads": 2,
            "ffn_width": 32,
            "context_length": 16,
        },
        "data": {
            "cache_dir": "cache",
            "dataset": "cycle",
            "tokenizer": "numbers",
            "shuffle_buffer": 10,
            "shard_tokens": SHARD_TOKENS,
        },
        "optimizer": {"lr": 0.01},
        "lr_schedule": {"name": "cosine", "warmup_steps": 5, "min_lr_ratio": 0.1},
        "training": {
            "tokens_per_parameters": 1.0,
            "epoch_tokens_per_parameters": 0.25,
            "batch_tokens": 80,
            "micro_batch_size": 2,
            "checkpoint_policy": "interval",
            "checkpoint_epochs": [1],
            "log_every": 4,
        },
        "evaluation": {"subset_blocks": 16, "batch_size": 8},
        "runtime": {"device": "cpu", "amp": False, "fused_optimizer": False, "cpu_threads": 1},
    }
    for section, values in changes.items():
        mapping[section] = values if values is None or section not in mapping else mapping[section] | values
    return recipe_from_mapping(mapping)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl without what depends on the clock."""
    timed = ("seconds", "tokens_per_second", "training_seconds", "elapsed_tokens_per_second")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in timed} for row in rows]


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Equal to the bit, through mappings, sequences and tensors."""
    assert type(left) is type(right) or isinstance(left, (int, float)), where
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, where
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key in left:
            assert_same(left[key], right[key], f"{where}/{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for index, (one, other) in enumerate(zip(left, right)):
            assert_same(one, other, f"{where}/{index}")
    else:
        assert left == right, where


def assert_same_run(found: Path, expected: Path) -> None:
    """Weights, optimiser state, position and metrics, all but what depends on the clock or on global generators."""
    assert read_rows(found / "metrics.jsonl") == read_rows(expected / "metrics.jsonl")
    paths = [path for kind in ("*.safetensors", "*.pt") for path in sorted(expected.rglob(kind))]
    names = [str(path.relative_to(expected)) for path in paths if ".training" not in path.parts]
    assert len(names) >= 4
    for name in names:
        if name.endswith("safetensors"):
            assert (found / name).read_bytes() == (expected / name).read_bytes(), name
        else:
            left, right = load_pt(found / name), load_pt(expected / name)
            assert_same({**left, "rng": None}, {**right, "rng": None}, name)
    assert (found / "best.json").read_bytes() == (expected / "best.json").read_bytes()
    left, right = (json.loads((run / "result.json").read_text()) for run in (found, expected))
    for name in ("status", "tokens", "step", "epochs", "best_subset_loss", "best_epoch", "recipe_identity"):
        assert left[name] == right[name], name
    assert left["final_validation"]["loss"] == right["final_validation"]["loss"]
