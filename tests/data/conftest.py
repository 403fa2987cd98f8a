"""Small token caches, written without the code under test."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def write_cache(tmp_path: Path) -> Callable[..., Path]:
    """``write_cache(tokens, shard_tokens, **changes to the manifest)`` returns the directory of a cache."""

    def write(tokens: int = 100, shard_tokens: int = 30, **changes: Any) -> Path:
        directory = tmp_path / "cache"
        directory.mkdir(parents=True, exist_ok=True)
        splits = {}
        for name, count in (("train", tokens), ("validation", 25)):
            stream = np.arange(count, dtype="<u2")
            shards = []
            for number, start in enumerate(range(0, count, shard_tokens)):
                content = stream[start : start + shard_tokens].tobytes()
                file = f"{name}-{number:05d}.bin"
                (directory / file).write_bytes(content)
                shards.append(
                    {"file": file, "tokens": len(content) // 2, "sha256": hashlib.sha256(content).hexdigest()}
                )
            splits[name] = {"tokens": count, "shards": shards}
        manifest: dict[str, Any] = {
            "version": 1,
            "dataset": "numbers",
            "dataset_revision": "r1",
            "tokenizer": "none",
            "tokenizer_revision": "r1",
            "vocab_size": 65536,
            "eos_token_id": 0,
            "dtype": "<u2",
            "preprocessing": {"shuffle_seed": 0, "shuffle_buffer": 1},
            "splits": splits,
        }
        write_manifest(directory, manifest | changes)
        return directory

    return write


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    manifest = {key: value for key, value in manifest.items() if key != "identity"}
    manifest["identity"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def change_manifest() -> Callable[[Path, Callable[[dict[str, Any]], None]], None]:
    """Change a manifest and give it a valid identity again, as a careful forger would."""

    def change(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
        manifest = json.loads((directory / "manifest.json").read_text())
        edit(manifest)
        write_manifest(directory, manifest)

    return change
