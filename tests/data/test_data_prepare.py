"""Preparing token caches: their content, their publication, and what is refused."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from hvpflow.data import prepare
from hvpflow.data.cache import TokenCache
from hvpflow.data.epochs import Sampling, analysis_epoch, required_train_tokens
from hvpflow.data.prepare import CorpusSettings, PrepareRequest, prepare_cache
from hvpflow.data.shards import SplitWriter
from hvpflow.errors import HvpflowError
from hvpflow.files import fingerprint

WORDS = ["curvature", "hessian", "gradient", "noise", "epoch", "shard", "token", "batch", "model", "loss"]


@pytest.fixture
def request_files(tmp_path: Path) -> Callable[..., PrepareRequest]:
    """A request for a cache of 200 small local documents, each with a number of its own."""
    corpus = tmp_path / "text"
    corpus.mkdir()
    with (corpus / "data.jsonl").open("w") as handle:
        for number in range(200):
            words = " ".join(WORDS[number * step % 10] for step in range(1, 12))
            handle.write(json.dumps({"text": f"<{number}> {words}"}) + "\n")

    def build(**changes: Any) -> PrepareRequest:
        settings: dict[str, Any] = {
            "dataset": "local/numbers",
            "revision": "main",
            "tokenizer": "train-bpe",
            "tokenizer_revision": "main",
            "vocab_size": 300,
            "corpus": CorpusSettings(source="files", files=(str(corpus / "*.jsonl"),)),
            "shuffle_seed": 5,
            "shuffle_buffer": 50,
            "shard_tokens": 700,
            "tokenize_batch_size": 16,
            "train_tokens": 3000,
            "validation_tokens": 500,
        }
        return PrepareRequest(**(settings | changes))

    return build


def stream(cache: TokenCache, name: str) -> np.ndarray:
    return np.concatenate([np.fromfile(path, dtype="<u2") for path in cache.split(name).files])


def documents_of(cache: TokenCache, name: str) -> list[str]:
    """The documents of a split, decoded; the last may be cut short."""
    tokens = stream(cache, name)
    tokenizer = Tokenizer.from_file(str(cache.directory / "tokenizer" / "tokenizer.json"))
    parts = np.split(tokens, np.flatnonzero(tokens == cache.eos_token_id) + 1)
    return [tokenizer.decode(part[part != cache.eos_token_id].tolist()) for part in parts if len(part)]


def numbers(texts: list[str]) -> list[str]:
    return [text.split()[0] for text in texts if ">" in text]


def test_a_cache_holds_what_was_asked_for(tmp_path: Path, request_files: Callable[..., PrepareRequest]) -> None:
    lines: list[str] = []
    request = request_files()
    cache = prepare_cache(request, tmp_path / "cache", num_workers=2, progress=lines.append)
    cache.verify()
    train, validation = cache.split("train"), cache.split("validation")
    assert (train.tokens, validation.tokens) == (3000, 500)
    assert train.shard_offsets.tolist() == [0, 700, 1400, 2100, 2800, 3000]
    assert train.shard_tokens == 700
    assert (cache.vocab_size, cache.eos_token_id) == (300, 0)
    manifest = cache.manifest
    assert manifest["dataset_revision"].startswith("sha256-")
    assert manifest["tokenizer_revision"] == f"sha256-{manifest['tokenizer_fingerprint'][:12]}"
    assert manifest["preprocessing"] == {
        "shuffle_seed": 5,
        "shuffle_buffer": 50,
        "append_eos": True,
        "add_special_tokens": False,
    }
    assert manifest["validation_complete"] is False
    assert manifest["preparation"]["digest"] == request.digest()
    assert any("train" in line for line in lines)
    read, held_out = numbers(documents_of(cache, "train")), numbers(documents_of(cache, "validation"))
    assert len(set(read)) == len(read) > 50
    assert held_out
    assert not set(read) & set(held_out)
    # Shuffled, and whole but for the last.
    assert read != sorted(read, key=lambda number: int(number[1:-1]))
    texts = {json.loads(line)["text"] for line in (tmp_path / "text" / "data.jsonl").read_text().splitlines()}
    assert set(documents_of(cache, "train")[:-1]) <= texts


def test_documents_equal_to_held_out_ones_are_not_trained_on(
    tmp_path: Path, request_files: Callable[..., PrepareRequest]
) -> None:
    path = tmp_path / "text" / "data.jsonl"
    path.write_text(path.read_text() * 3)
    cache = prepare_cache(request_files(), tmp_path / "cache", num_workers=1)
    assert not set(documents_of(cache, "train")[:-1]) & set(documents_of(cache, "validation")[:-1])


def test_the_result_does_not_depend_on_workers_or_batches(
    tmp_path: Path, request_files: Callable[..., PrepareRequest]
) -> None:
    program = (
        "import sys, json, pathlib; from hvpflow.data.prepare import *; from hvpflow.typed import build\n"
        "request = build(PrepareRequest, json.loads(sys.argv[1]))\n"
        "print(prepare_cache(request, pathlib.Path(sys.argv[2]), num_workers=int(sys.argv[3])).identity)"
    )
    identities = set()
    for workers, batch in ((1, 16), (3, 5)):
        mapping = json.dumps(dataclasses.asdict(request_files(tokenize_batch_size=batch)))
        command = [sys.executable, "-c", program, mapping, str(tmp_path / f"cache-{workers}"), str(workers)]
        identities.add(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert len(identities) == 1


def test_a_finished_request_returns_at_once(
    tmp_path: Path, request_files: Callable[..., PrepareRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare_cache(request_files(), tmp_path / "cache", num_workers=1)
    monkeypatch.setattr(prepare, "_write_cache", lambda *_: pytest.fail("prepared again"))
    assert prepare_cache(request_files(), tmp_path / "cache", num_workers=1).identity == first.identity
    (tmp_path / "cache" / "manifest.json").unlink()
    again = prepare_cache(request_files(tokenize_batch_size=3), tmp_path / "cache", num_workers=4)
    assert again.identity == first.identity
    assert again.manifest == first.manifest


def test_changed_text_is_noted_and_the_cache_stays(
    tmp_path: Path, request_files: Callable[..., PrepareRequest]
) -> None:
    first = prepare_cache(request_files(), tmp_path / "cache", num_workers=1)
    lines: list[str] = []
    prepare_cache(request_files(), tmp_path / "cache", num_workers=1, progress=lines.append)
    assert [line for line in lines if "prepared already" not in line] == []
    lines.clear()
    (tmp_path / "text" / "more.jsonl").write_text('{"text": "more"}\n')
    again = prepare_cache(request_files(), tmp_path / "cache", num_workers=1, progress=lines.append)
    assert again.identity == first.identity
    assert len(lines) == 2
    assert "source text has changed" in lines[1]
    # The text may also be gone.
    shutil.rmtree(tmp_path / "text")
    assert prepare_cache(request_files(), tmp_path / "cache", num_workers=1).identity == first.identity


def test_another_request_moves_the_old_cache_aside(
    tmp_path: Path, request_files: Callable[..., PrepareRequest]
) -> None:
    target = tmp_path / "cache"
    identities = [prepare_cache(request_files(), target, num_workers=1).identity]
    for seed in (6, 7):
        (target / "manifest.json").unlink()
        identities.append(prepare_cache(request_files(shuffle_seed=seed), target, num_workers=1).identity)
    assert len(set(identities)) == 3
    aside = [TokenCache.open(tmp_path / f"cache.replaced-{number}") for number in (1, 2)]
    assert [cache.identity for cache in aside] == identities[:2]
    assert TokenCache.open(target).identity == identities[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "cache.replaced-1", "cache.replaced-2", "text"]


def test_a_larger_cache_of_the_same_text_serves(tmp_path: Path, request_files: Callable[..., PrepareRequest]) -> None:
    """Recipes of different budgets share a cache; one that needs more than it holds does not get it."""
    asked = request_files()
    large = prepare_cache(asked, tmp_path / "cache", num_workers=1)
    smaller = dataclasses.replace(asked, train_tokens=asked.train_tokens // 2)
    assert prepare_cache(smaller, tmp_path / "cache", num_workers=1).identity == large.identity
    small = prepare_cache(smaller, tmp_path / "other", num_workers=1)
    assert small.identity != large.identity
    assert prepare_cache(asked, tmp_path / "other", num_workers=1).identity == large.identity
    assert TokenCache.open(tmp_path / "other.replaced-1").identity == small.identity


def test_another_systems_cache_that_serves_is_used_as_it_is(
    tmp_path: Path, request_files: Callable[..., PrepareRequest]
) -> None:
    asked = request_files()
    directory = prepare_cache(asked, tmp_path / "cache", num_workers=1).directory
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["preparation"], manifest["identity"]
    manifest["identity"] = fingerprint(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    (directory / "manifest.copy.json").unlink()
    assert prepare_cache(asked, directory, num_workers=1).identity == manifest["identity"]
    with pytest.raises(HvpflowError, match="does not serve"):
        prepare_cache(request_files(shuffle_seed=6), directory, num_workers=1)
    with pytest.raises(HvpflowError, match="does not serve"):
        prepare_cache(dataclasses.replace(asked, train_tokens=10 * asked.train_tokens), directory, num_workers=1)


def test_other_directories_are_not_touched(
    tmp_path: Path, request_files: Callable[..., PrepareRequest], write_cache: Callable[..., Path]
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "diary.txt").write_text("mine")
    with pytest.raises(HvpflowError, match="holds no token cache; nothing was touched"):
        prepare_cache(request_files(), notes, num_workers=1)
    assert (notes / "diary.txt").read_text() == "mine"
    foreign = write_cache()
    before = sorted(foreign.iterdir())
    with pytest.raises(HvpflowError, match=r"not prepared by hvpflow and does not serve .*; nothing was touched"):
        prepare_cache(request_files(), foreign, num_workers=1)
    assert sorted(foreign.iterdir()) == before


def test_an_empty_directory_and_a_link_are_filled(tmp_path: Path, request_files: Callable[..., PrepareRequest]) -> None:
    disk = tmp_path / "disk" / "empty"
    disk.mkdir(parents=True)
    (tmp_path / "link").symlink_to(disk)
    cache = prepare_cache(request_files(), tmp_path / "link", num_workers=1)
    assert cache.directory == tmp_path / "link"
    assert (disk / "manifest.json").is_file()
    assert (tmp_path / "link").is_symlink()


def test_a_killed_preparation_leaves_nothing_under_the_name(
    tmp_path: Path, request_files: Callable[..., PrepareRequest]
) -> None:
    program = (
        "import sys, os, json, pathlib, signal; from hvpflow.data import prepare, shards\n"
        "from hvpflow.typed import build\n"
        "shards.SplitWriter.finish = lambda self: os.kill(os.getpid(), signal.SIGKILL)\n"
        "request = build(prepare.PrepareRequest, json.loads(sys.argv[1]))\n"
        "prepare.prepare_cache(request, pathlib.Path(sys.argv[2]), num_workers=1)"
    )
    mapping = json.dumps(dataclasses.asdict(request_files()))
    target = tmp_path / "cache"
    killed = subprocess.run([sys.executable, "-c", program, mapping, str(target)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not target.exists()
    assert list((tmp_path / ".cache.preparing").glob("train-*.bin"))
    prepare_cache(request_files(), target, num_workers=1).verify()
    assert not (tmp_path / ".cache.preparing").exists()


def test_an_error_leaves_nothing(
    tmp_path: Path, request_files: Callable[..., PrepareRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: SplitWriter, tokens: np.ndarray) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SplitWriter, "write", full)
    with pytest.raises(HvpflowError, match="no room on the disk"):
        prepare_cache(request_files(), tmp_path / "cache", num_workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_too_full_a_disk_is_noticed_before_the_work(
    tmp_path: Path, request_files: Callable[..., PrepareRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=6999)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(prepare, "_write_cache", lambda *_: pytest.fail("started"))
    with pytest.raises(HvpflowError, match="7000 bytes are needed, 6999 are free"):
        prepare_cache(request_files(), tmp_path / "cache", num_workers=1)


def test_two_processes_do_not_prepare_one_cache(tmp_path: Path, request_files: Callable[..., PrepareRequest]) -> None:
    work = tmp_path / ".cache.preparing"
    work.mkdir()
    (work / "theirs.bin").write_bytes(b"x")
    holder = os.open(tmp_path / ".cache.preparing.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        with pytest.raises(HvpflowError, match="another process is preparing"):
            prepare_cache(request_files(), tmp_path / "cache", num_workers=1)
        assert (work / "theirs.bin").exists()
    finally:
        os.close(holder)
    prepare_cache(request_files(), tmp_path / "cache", num_workers=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "text"]


def test_text_never_repeats(tmp_path: Path, request_files: Callable[..., PrepareRequest]) -> None:
    with pytest.raises(HvpflowError, match=r"too little text.* in 200 documents.* 30000 are needed.*tokens_per_parame"):
        prepare_cache(request_files(train_tokens=30000), tmp_path / "cache", num_workers=1)
    with pytest.raises(HvpflowError, match="and 30000 for validation"):
        prepare_cache(request_files(validation_tokens=30000), tmp_path / "cache", num_workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_tokenizer_of_another_revision_is_refused(
    tmp_path: Path, request_files: Callable[..., PrepareRequest]
) -> None:
    with pytest.raises(HvpflowError, match=r"tokenizer_revision is 'old', but the tokenizer trained"):
        prepare_cache(request_files(tokenizer_revision="old"), tmp_path / "cache", num_workers=1)


def test_a_tokenizer_file_of_another_cache(tmp_path: Path, request_files: Callable[..., PrepareRequest]) -> None:
    first = prepare_cache(request_files(), tmp_path / "cache", num_workers=1)
    path = tmp_path / "cache" / "tokenizer" / "tokenizer.json"
    second = prepare_cache(request_files(tokenizer=str(path)), tmp_path / "other", num_workers=1)
    assert second.manifest["tokenizer_fingerprint"] == first.manifest["tokenizer_fingerprint"]
    np.testing.assert_array_equal(stream(first, "train"), stream(second, "train"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 65537}, "at most 65536"),
        ({"shard_tokens": 0}, "shard_tokens is 0"),
        ({"shuffle_buffer": 0}, "shuffle_buffer is 0"),
        ({"train_tokens": 1}, "train_tokens is 1"),
        ({"shuffle_seed": -1}, "shuffle_seed is -1"),
    ],
)
def test_impossible_requests(
    request_files: Callable[..., PrepareRequest], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(HvpflowError, match=message):
        request_files(**changes)


def test_every_setting_of_a_request_but_the_batch_size_is_in_its_digest(
    request_files: Callable[..., PrepareRequest],
) -> None:
    request = request_files()
    assert request_files(tokenize_batch_size=99).digest() == request.digest()
    for field in dataclasses.fields(PrepareRequest):
        value = getattr(request, field.name)
        other = value + 1 if isinstance(value, int) else f"{value}x" if isinstance(value, str) else CorpusSettings()
        if field.name != "tokenize_batch_size":
            assert request_files(**{field.name: other}).digest() != request.digest(), field.name


def test_the_standard_library_suffices_for_a_small_run(tmp_path: Path) -> None:
    sampling = Sampling(
        context_length=128,
        batch_tokens=512,
        microbatch_size=4,
        num_parameters=207296,
        tokens_per_parameters=4.8,
        epoch_tokens_per_parameters=0.04,
        seed=42,
        loader_version=2,
        shuffle_group_size=2,
    )
    request = PrepareRequest(
        dataset="python-stdlib",
        revision="main",
        tokenizer="train-bpe",
        tokenizer_revision="main",
        vocab_size=1024,
        corpus=CorpusSettings(),
        shuffle_seed=42,
        shuffle_buffer=10000,
        shard_tokens=50000,
        tokenize_batch_size=256,
        train_tokens=required_train_tokens(sampling, 50000),
        validation_tokens=50000,
    )
    cache = prepare_cache(request, tmp_path / "cache", num_workers=2)
    assert cache.manifest["dataset_revision"].startswith(f"{sys.implementation.name}-3.")
    assert analysis_epoch(sampling, cache, "unseen").num_tokens == sampling.boundaries()[0] * 128
    counts = np.bincount(stream(cache, "train"), minlength=1024)
    assert (counts > 0).sum() > 900
    # Real text: a token carries much less than the 10 bits of uniform noise.
    shares = counts[counts > 0] / counts.sum()
    assert 5 < -(shares * np.log2(shares)).sum() < 9.5
