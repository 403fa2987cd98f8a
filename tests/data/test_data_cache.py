"""Opening, checking and reading a token cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvpflow.data.cache import PADDING, TokenCache
from hvpflow.errors import HvpflowError

Write = Callable[..., Path]


def test_blocks_are_the_stream_at_their_place_across_shards(write_cache: Write) -> None:
    split = TokenCache.open(write_cache(tokens=100, shard_tokens=7)).split("train")
    ids = np.array([3, 0, 9])
    expected = np.stack([np.arange(i * 10, i * 10 + 11) for i in [3, 0, 8]])
    blocks = split.read_blocks(np.array([3, 0, 8]), 10)
    assert blocks.dtype == np.int64
    np.testing.assert_array_equal(blocks, expected)
    # The tenth block has 9 targets: the stream ends one token early for it.
    assert split.num_blocks(10) == 9
    assert split.num_blocks(10, partial=True) == 10
    np.testing.assert_array_equal(split.read_blocks(ids[2:], 10)[0], [*range(90, 100), PADDING])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.integers(2, 90), shard=st.integers(1, 40), length=st.integers(1, 30))
def test_any_sizes_give_every_target_once(write_cache: Write, tokens: int, shard: int, length: int) -> None:
    split = TokenCache.open(write_cache(tokens=tokens, shard_tokens=shard)).split("train")
    full, every = split.num_blocks(length), split.num_blocks(length, partial=True)
    blocks = split.read_blocks(np.arange(every), length)
    targets = blocks[:, 1:].ravel()
    np.testing.assert_array_equal(targets[targets != PADDING], np.arange(1, tokens))
    assert (blocks[:full] != PADDING).all()
    assert every - full in (0, 1)
    with pytest.raises(ValueError, match="not among"):
        split.read_blocks(np.array([every]), length)


def test_reference_cache_opens_and_verifies(reference: Path) -> None:
    cache = TokenCache.open(reference / "data" / "stdlib-512")
    cache.verify()
    assert cache.identity == "7d77130330339f5b65afcfd6d63b405e3b1094d37a0d2334f3acc778d35df96b"
    assert (cache.vocab_size, cache.eos_token_id) == (512, 0)
    train = cache.split("train")
    assert (train.tokens, train.num_blocks(64), len(train.files)) == (200001, 3125, 20)
    flat = np.concatenate([np.fromfile(path, dtype="<u2") for path in train.files])
    np.testing.assert_array_equal(train.read_blocks(np.array([156]), 64)[0], flat[156 * 64 : 157 * 64 + 1])


def test_unknown_split_gets_the_nearest(write_cache: Write) -> None:
    with pytest.raises(HvpflowError, match="did you mean 'train'"):
        TokenCache.open(write_cache()).split("trian")


def test_missing_directory_and_missing_manifest(tmp_path: Path) -> None:
    with pytest.raises(HvpflowError, match=r"no token cache at .*hvpflow prepare"):
        TokenCache.open(tmp_path / "absent")
    with pytest.raises(HvpflowError, match=r"no manifest\.json"):
        TokenCache.open(tmp_path)


def test_edited_manifest_is_refused(write_cache: Write) -> None:
    directory = write_cache()
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace("numbers", "letters"))
    with pytest.raises(HvpflowError, match="invalid identity"):
        TokenCache.open(directory)
    path.write_text("{")
    with pytest.raises(HvpflowError, match="not valid JSON"):
        TokenCache.open(directory)


def test_other_version_and_type_of_tokens_are_refused(write_cache: Write) -> None:
    with pytest.raises(HvpflowError, match=r"invalid version.*found 2"):
        TokenCache.open(write_cache(version=2))
    with pytest.raises(HvpflowError, match="'<u4'"):
        TokenCache.open(write_cache(dtype="<u4"))
    with pytest.raises(HvpflowError, match="'vocab_size' is 'many', expected int"):
        TokenCache.open(write_cache(vocab_size="many"))
    with pytest.raises(HvpflowError, match="must list tokens and shards"):
        TokenCache.open(write_cache(splits={"train": {"tokens": 3}}))


def test_truncated_and_missing_shards_are_refused(write_cache: Write) -> None:
    directory = write_cache()
    shard = directory / "train-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(HvpflowError, match=r"truncated token shard .*train-00001\.bin: it has 58 bytes, 60"):
        TokenCache.open(directory)
    shard.unlink()
    with pytest.raises(HvpflowError, match=r"cannot read the token shard .*train-00001\.bin"):
        TokenCache.open(directory)


def test_altered_shard_is_found_by_verify(write_cache: Write) -> None:
    directory = write_cache()
    shard = directory / "validation-00000.bin"
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    cache = TokenCache.open(directory)
    with pytest.raises(HvpflowError, match=r"checksum mismatch .*validation-00000\.bin"):
        cache.verify()


def test_count_mismatch_is_refused(write_cache: Write, change_manifest: Callable[..., None]) -> None:
    directory = write_cache()

    def edit(manifest: dict[str, Any]) -> None:
        manifest["splits"]["train"]["tokens"] = 101

    change_manifest(directory, edit)
    with pytest.raises(HvpflowError, match="does not match its shards: declared 101, the shards hold 100"):
        TokenCache.open(directory)


@pytest.mark.parametrize("name", ["../outside.bin", "/outside.bin", "..", "", "sub/shard.bin", "ABSOLUTE"])
def test_shard_names_cannot_leave_the_directory(
    write_cache: Write, change_manifest: Callable[..., None], tmp_path: Path, name: str
) -> None:
    directory = write_cache()
    outside = tmp_path / "outside.bin"
    outside.write_bytes((directory / "train-00000.bin").read_bytes())
    (directory / "sub").mkdir()
    (directory / "sub" / "shard.bin").write_bytes(outside.read_bytes())

    def edit(manifest: dict[str, Any]) -> None:
        manifest["splits"]["train"]["shards"][0]["file"] = str(outside) if name == "ABSOLUTE" else name

    change_manifest(directory, edit)
    with pytest.raises(HvpflowError, match="invalid shard name"):
        TokenCache.open(directory)


def test_shard_size_comes_from_the_preparation_record(write_cache: Write) -> None:
    recorded = {"request": {"shard_tokens": 1000}}
    assert TokenCache.open(write_cache(preparation=recorded)).split("train").shard_tokens == 1000
    assert TokenCache.open(write_cache()).split("train").shard_tokens == 30
    assert "preparation" not in json.loads((write_cache() / "manifest.json").read_text())
