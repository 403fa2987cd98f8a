"""From text to a token cache, published whole under its name or not at all, and never changed afterwards."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hvpflow.data.cache import (
    CACHE_VERSION,
    MANIFEST_NAME,
    TOKEN_BYTES,
    TOKEN_DTYPE,
    TokenCache,
    manifest_identity,
    read_manifest,
)
from hvpflow.data.corpus import Corpus, CorpusSettings, local_fingerprint, open_corpus, shuffled
from hvpflow.data.order import random_stream
from hvpflow.data.publication import publish, work_directory
from hvpflow.data.shards import SplitWriter
from hvpflow.data.tokenizer import MAX_VOCAB_SIZE, TRAIN_BPE, TextTokenizer, load_tokenizer, parallelism, train_bpe
from hvpflow.errors import HvpflowError
from hvpflow.files import fingerprint, write_bytes, write_json
from hvpflow.typed import to_mapping

__all__ = ["CorpusSettings", "PrepareRequest", "prepare_cache"]

MANIFEST_COPY_NAME = "manifest.copy.json"
"""A workflow engine removes a declared output before it repeats a rule: from this copy it is restored."""
TOKENIZER_TRAINING_BYTES = 32 * 2**20
"""Text that a tokenizer is trained on at most; more changes its merges little and takes long."""
_PREPARATION_VERSION = 1
_PROGRESS_SECONDS = 2.0
_TRAIN_SHUFFLE, _VALIDATION_SHUFFLE, _TOKENIZER_SHUFFLE = 0, 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareRequest:
    """All that the content of a token cache depends on, and the size of the batches in which it is encoded."""

    dataset: str
    """A Hugging Face dataset's name or directory; for other sources a label."""
    revision: str
    tokenizer: str
    """``train-bpe``, the path of a tokenizer.json, or a name on the Hugging Face hub."""
    tokenizer_revision: str
    vocab_size: int
    corpus: CorpusSettings
    shuffle_seed: int
    shuffle_buffer: int
    """Documents held in memory to be shuffled."""
    shard_tokens: int
    tokenize_batch_size: int
    """Documents encoded at a time; no effect on the result."""
    train_tokens: int
    validation_tokens: int

    def __post_init__(self) -> None:
        least = {
            "vocab_size": 2,
            "shuffle_seed": 0,
            "shuffle_buffer": 1,
            "shard_tokens": 1,
            "tokenize_batch_size": 1,
            "train_tokens": 2,
            "validation_tokens": 2,
        }
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise HvpflowError(f"{name} is {getattr(self, name)}, expected at least {smallest}")
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise HvpflowError(
                f"vocab_size is {self.vocab_size}; tokens are stored in 16 bits, at most {MAX_VOCAB_SIZE}"
            )

    def to_mapping(self) -> dict[str, Any]:
        """Plain data of all that the result depends on."""
        return {key: value for key, value in to_mapping(self).items() if key != "tokenize_batch_size"}

    def digest(self) -> str:
        """Content identity of the request."""
        return fingerprint({"version": _PREPARATION_VERSION, "request": self.to_mapping()})


def _silent(line: str) -> None:
    del line


def prepare_cache(
    request: PrepareRequest, directory: Path, *, num_workers: int, progress: Callable[[str], None] = _silent
) -> TokenCache:
    """Make the requested token cache in ``directory``, or return the one that lies there if it serves the request.

    A cache of the same text and tokenizer that holds at least as many tokens serves, so several recipes can share one.
    A finished cache of another request is moved aside (``NAME.replaced-1``, …). While the new one is made it lies in a
    hidden directory beside ``directory``, which takes the name in one step at the end.

    Args:
        request: what to make.
        directory: where; its parents are made.
        num_workers: threads that encode; no effect on the result.
        progress: takes lines for the person who waits.

    Raises:
        HvpflowError: too little text, a source or tokenizer that cannot be read, no room on the disk, a directory that
            holds something else, or another process at work on the same cache.
    """
    # The work happens beside the real directory, so that a link to another disk is followed.
    target = Path(os.path.realpath(directory))
    try:
        if _finished(request, target, progress):
            return TokenCache.open(directory)
        with work_directory(target) as work:
            # Another process may have finished it between the first look and the lock.
            if not _finished(request, target, progress):
                _check_room(request, work)
                with parallelism(num_workers):
                    _write_cache(request, work, progress)
                publish(work, target, progress)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HvpflowError(
                f"no room on the disk for the token cache {directory}: free some space, then repeat the command"
            ) from error
        raise HvpflowError(f"cannot write the token cache {directory}: {error.strerror or error}") from error
    return TokenCache.open(directory)


def _finished(request: PrepareRequest, target: Path, progress: Callable[[str], None]) -> bool:
    """Whether ``target`` holds the requested cache; not so if it is empty or holds the cache of another request.

    Raises:
        HvpflowError: it holds something else, which is not ours to move.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    manifest_path, copy = target / MANIFEST_NAME, target / MANIFEST_COPY_NAME
    if not manifest_path.exists() and copy.is_file():
        write_bytes(manifest_path, copy.read_bytes())
    if not manifest_path.is_file():
        raise HvpflowError(
            f"{target} exists and holds no token cache; nothing was touched: choose another data.cache_dir, "
            "or move what is there away"
        )
    manifest = read_manifest(target)
    preparation = manifest.get("preparation")
    if not isinstance(preparation, dict):
        if not _foreign_serves(manifest, request):
            raise HvpflowError(
                f"{target} holds a token cache that was not prepared by hvpflow and does not serve this recipe "
                "(another dataset, tokenizer or shuffle, or too few tokens); nothing was touched: choose another "
                "data.cache_dir"
            )
        progress(f"using the token cache {target} as it is")
        return True
    if preparation.get("digest") != request.digest() and not _serves(preparation, request):
        return False
    progress(f"the token cache {target} is prepared already")
    with contextlib.suppress(HvpflowError):
        now = local_fingerprint(request.corpus, request.dataset)
        if now is not None and now != preparation.get("source_fingerprint"):
            progress(
                f"note: the source text has changed since the token cache {target} was made; the cache stays as it is. "
                "To make it anew, move it away"
            )
    return True


def _serves(preparation: dict[str, Any], request: PrepareRequest) -> bool:
    """Whether our own cache of another request holds all that this one asks for, and more."""
    sizes = ("train_tokens", "validation_tokens")
    made, wanted = preparation.get("request"), request.to_mapping()
    if preparation.get("version") != _PREPARATION_VERSION or not isinstance(made, dict) or made.keys() != wanted.keys():
        return False
    same = all(made[key] == wanted[key] for key in wanted if key not in sizes)
    return same and all(made[key] >= wanted[key] for key in sizes)


def _foreign_serves(manifest: dict[str, Any], request: PrepareRequest) -> bool:
    """Whether another system's cache holds what this request asks for."""
    shuffle = {"shuffle_seed": request.shuffle_seed, "shuffle_buffer": request.shuffle_buffer}
    return (
        all(manifest[key] == getattr(request, key) for key in ("dataset", "tokenizer", "vocab_size"))
        and request.revision in ("main", manifest["dataset_revision"])
        and request.tokenizer_revision in ("main", manifest["tokenizer_revision"])
        and shuffle.items() <= manifest["preprocessing"].items()
        and manifest["splits"]["train"]["tokens"] >= request.train_tokens
        and manifest["splits"]["validation"]["tokens"] >= min(request.validation_tokens, 2)
    )


def _check_room(request: PrepareRequest, work: Path) -> None:
    needed = TOKEN_BYTES * (request.train_tokens + request.validation_tokens)
    free = shutil.disk_usage(work).free
    if needed > free:
        raise HvpflowError(
            f"no room on the disk for the token cache: {needed} bytes are needed, {free} are free in {work.parent}; "
            "free some space, or set data.cache_dir to a directory on another disk"
        )


def _write_cache(request: PrepareRequest, work: Path, progress: Callable[[str], None]) -> None:
    """Fill ``work`` with tokenizer, shards and manifest."""
    corpus = open_corpus(request.corpus, request.dataset, request.revision)
    progress(f"text: {request.dataset} at revision {corpus.revision}")
    tokenizer = _make_tokenizer(request, corpus, progress)
    tokenizer.save(work / "tokenizer")
    complete, splits = _write_splits(request, corpus, tokenizer, work, progress)
    manifest: dict[str, Any] = {
        "version": CACHE_VERSION,
        "dataset": request.dataset,
        "dataset_revision": corpus.revision,
        "tokenizer": request.tokenizer,
        "tokenizer_revision": tokenizer.revision,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": request.vocab_size,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": TOKEN_DTYPE,
        "preprocessing": {
            "shuffle_seed": request.shuffle_seed,
            "shuffle_buffer": request.shuffle_buffer,
            "append_eos": True,
            "add_special_tokens": False,
        },
        "validation_complete": complete,
        "splits": splits,
        "preparation": {
            "version": _PREPARATION_VERSION,
            "digest": request.digest(),
            "request": request.to_mapping(),
            "source_fingerprint": corpus.fingerprint,
        },
    }
    manifest["identity"] = manifest_identity(manifest)
    write_json(work / MANIFEST_NAME, manifest)
    write_json(work / MANIFEST_COPY_NAME, manifest)


def _make_tokenizer(request: PrepareRequest, corpus: Corpus, progress: Callable[[str], None]) -> TextTokenizer:
    if request.tokenizer != TRAIN_BPE:
        return load_tokenizer(request.tokenizer, request.tokenizer_revision, request.vocab_size)
    progress(f"training a byte-pair tokenizer with {request.vocab_size} tokens")
    stream = random_stream(request.shuffle_seed, _TOKENIZER_SHUFFLE)
    tokenizer = train_bpe(
        _first_bytes(shuffled(corpus.documents(), request.shuffle_buffer, stream), TOKENIZER_TRAINING_BYTES),
        request.vocab_size,
    )
    if request.tokenizer_revision not in ("main", tokenizer.revision):
        raise HvpflowError(
            f"data.tokenizer_revision is {request.tokenizer_revision!r}, but the tokenizer trained on this text is "
            f"{tokenizer.revision!r}: set it to 'main', or use the text that it was trained on"
        )
    return tokenizer


def _first_bytes(documents: Iterator[str], limit: int) -> Iterator[str]:
    taken = 0
    for document in documents:
        yield document
        taken += len(document.encode())
        if taken >= limit:
            return


def _write_splits(
    request: PrepareRequest, corpus: Corpus, tokenizer: TextTokenizer, work: Path, progress: Callable[[str], None]
) -> tuple[bool, dict[str, Any]]:
    """Write both splits; returns whether all text for validation was taken, and the manifest's entries.

    Validation takes the first documents of the shuffled stream (or of its own split) until it has enough tokens; what
    is left of its last document, and every later document of the same text, is used nowhere.
    """
    documents = _encoded(request, tokenizer, corpus.documents(), _TRAIN_SHUFFLE)
    own = corpus.validation_documents
    held_out = _encoded(request, tokenizer, own(), _VALIDATION_SHUFFLE) if own else documents
    validation = SplitWriter(work, "validation", shard_tokens=request.shard_tokens, limit=request.validation_tokens)
    train = SplitWriter(work, "train", shard_tokens=request.shard_tokens, limit=request.train_tokens)
    report = _Progress(progress)
    seen: set[bytes] = set()
    available, num_documents, complete = 0, 0, True
    with contextlib.closing(validation), contextlib.closing(train):
        for digest, tokens in held_out:
            validation.write(tokens)
            seen.add(digest)
            available, num_documents = available + len(tokens), num_documents + 1
            report("validation", num_documents, validation)
            if validation.full:
                complete = own is not None and next(held_out, None) is None
                break
        if own and validation.tokens < 2:
            raise HvpflowError(f"validation split {request.corpus.validation_split!r} holds no text: name another")
        if own:
            available, num_documents = 0, 0
        for digest, tokens in documents:
            available, num_documents = available + len(tokens), num_documents + 1
            if digest not in seen:
                train.write(tokens)
            report("train", num_documents, train)
            if train.full:
                break
        if not train.full or (not own and not validation.full):
            held = "" if own else f" and {request.validation_tokens} for validation"
            raise HvpflowError(
                f"too little text: {request.dataset} gives {available} tokens in {num_documents} documents, of which "
                f"{train.tokens} are left to train on; {request.train_tokens} are needed for training and an unseen "
                f"epoch{held}. Text is never repeated: lower training.tokens_per_parameters, data.shard_tokens or "
                "data.prepare_*_tokens, or add text"
            )
        splits = {"train": train.finish(), "validation": validation.finish()}
    progress(f"wrote {train.tokens:,} training and {validation.tokens:,} validation tokens")
    return complete, splits


def _encoded(
    request: PrepareRequest, tokenizer: TextTokenizer, documents: Iterator[str], stream: int
) -> Iterator[tuple[bytes, np.ndarray]]:
    """Digest of the text, and tokens with the end of text, of each document that is not empty, shuffled."""
    generator = random_stream(request.shuffle_seed, stream)
    texts = shuffled((text for text in documents if text), request.shuffle_buffer, generator)
    while batch := list(islice(texts, request.tokenize_batch_size)):
        for text, tokens in zip(batch, tokenizer.encode(batch)):
            yield hashlib.blake2b(text.encode(), digest_size=16).digest(), tokens


class _Progress:
    """Says how far a split is, every few seconds."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._last = time.monotonic()

    def __call__(self, split: str, num_documents: int, writer: SplitWriter) -> None:
        now = time.monotonic()
        if now - self._last >= _PROGRESS_SECONDS:
            self._last = now
            share = writer.tokens / writer.limit
            self._progress(
                f"{split}: {writer.tokens:,} of {writer.limit:,} tokens ({share:.0%}), {num_documents:,} documents read"
            )
