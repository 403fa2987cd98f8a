"""Where text comes from: documents of the Python standard library, of local files, or of a Hugging Face dataset.

A corpus yields its documents in an order that depends on their names alone, as often as asked, and is read lazily:
whoever has enough text stops.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hvpflow.data.documents import decode, find_files, listing_digest, read_documents, well_formed
from hvpflow.errors import HvpflowError, nearest

# Tests, and what is not of the library itself or differs between two installations of one version.
_SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_SKIPPED_NAMES = re.compile(r"_sysconfigdata_.*|_sysconfig_vars_.*|config-.*|sitecustomize\.py|usercustomize\.py")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSettings:
    """Which text a token cache is made of."""

    source: Literal["python-stdlib", "files", "huggingface"] = "python-stdlib"
    """``python-stdlib``: the sources of the running Python's library; ``files``; or ``huggingface``."""
    files: tuple[str, ...] = ()
    """Source ``files``: globs, relative to the current directory; ``**`` descends."""
    text_field: str = "text"
    """Field or column that holds a document: JSONL, Parquet and Hugging Face datasets."""
    subset: str | None = None
    """Source ``huggingface``: the dataset's configuration, such as a language."""
    split: str = "train"
    """Source ``huggingface``: split to train on."""
    validation_split: str | None = None
    """Source ``huggingface``: split to validate on; without it, documents of ``split`` are held out."""

    def __post_init__(self) -> None:
        if self.source == "files" and not self.files:
            raise HvpflowError("corpus.source is 'files', but corpus.files names none: give a list of globs")
        if self.validation_split is not None and self.validation_split == self.split:
            raise HvpflowError(
                f"corpus.validation_split is {self.validation_split!r}, as is corpus.split: name another "
                "split, or null to hold documents out"
            )


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents to train on, perhaps others to validate on, and what identifies them."""

    revision: str
    fingerprint: str
    documents: Callable[[], Iterator[str]]
    validation_documents: Callable[[], Iterator[str]] | None = None


def open_corpus(settings: CorpusSettings, dataset: str, revision: str) -> Corpus:
    """Find the text that ``settings`` name.

    Args:
        settings: the source and its options.
        dataset: a Hugging Face dataset's name or directory; for other sources a label.
        revision: the revision asked for; ``main`` takes what is found, and the corpus says what that was.

    Raises:
        HvpflowError: there is no such text, or it is of another revision.
    """
    if settings.source == "huggingface":
        return _huggingface(settings, dataset, revision)
    if settings.source == "files":
        files = find_files(settings.files)
        digest = listing_digest(files)

        def documents() -> Iterator[str]:
            for path in files.values():
                yield from read_documents(path, settings.text_field)

        return Corpus(revision=_local_revision(revision, digest), fingerprint=digest, documents=documents)
    return _standard_library(revision)


def local_fingerprint(settings: CorpusSettings, dataset: str) -> str | None:
    """The fingerprint of text on this machine as it is now; None for text that lies elsewhere."""
    if settings.source == "huggingface" and not Path(dataset).is_dir():
        return None
    if settings.source == "huggingface":
        return _directory_digest(Path(dataset))
    return open_corpus(settings, dataset, "main").fingerprint


def shuffled(documents: Iterator[str], buffer_size: int, generator: np.random.Generator) -> Iterator[str]:
    """Documents in a random order, through a buffer: each new one takes the place of one drawn from a full buffer.

    With a buffer of all documents every order is equally likely; a smaller one keeps less text in memory.
    """
    buffer: list[str] = []
    for document in documents:
        if len(buffer) < buffer_size:
            buffer.append(document)
            continue
        drawn = int(generator.integers(buffer_size))
        yield buffer[drawn]
        buffer[drawn] = document
    for index in generator.permutation(len(buffer)).tolist():
        yield buffer[index]


def _local_revision(asked: str, digest: str) -> str:
    return f"sha256-{digest[:12]}" if asked == "main" else asked


def _standard_library(revision: str) -> Corpus:
    directory = Path(sysconfig.get_path("stdlib"))
    found = f"{sys.implementation.name}-{platform.python_version()}"
    if revision not in ("main", found):
        raise HvpflowError(
            f"data.revision is {revision!r}, but the running interpreter's standard library is {found!r}: "
            "set data.revision to 'main', or use that interpreter"
        )
    texts = {name: text for name, path in _library_files(directory) if (text := _decodable(path))}
    if not texts:
        raise HvpflowError(
            f"this Python installation ships no sources of its standard library (looked for .py files in {directory}): "
            "use another interpreter, or set corpus.source to 'files' and corpus.files to texts of your own"
        )
    digest = hashlib.sha256()
    for name, text in texts.items():
        digest.update(f"{name}\0{len(text)}\0{text}".encode())
    return Corpus(revision=found, fingerprint=digest.hexdigest(), documents=lambda: iter(texts.values()))


def _library_files(directory: Path) -> list[tuple[str, Path]]:
    found = []
    for path in directory.rglob("*.py"):
        parts = path.relative_to(directory).parts
        if not _SKIPPED_DIRECTORIES.intersection(parts) and not any(_SKIPPED_NAMES.fullmatch(part) for part in parts):
            found.append(("/".join(parts), path))
    return sorted(found)


def _decodable(path: Path) -> str | None:
    try:
        return decode(path.read_bytes(), path)
    except (OSError, HvpflowError):
        return None


def _huggingface(settings: CorpusSettings, dataset: str, revision: str) -> Corpus:
    datasets = _import_datasets()
    local = Path(dataset).is_dir()
    if local:
        digest = _directory_digest(Path(dataset))
        found = _local_revision(revision, digest)
    else:
        found = revision if _COMMIT.fullmatch(revision) else _resolve(dataset, revision)
        digest = hashlib.sha256(f"{dataset}\0{settings.subset}\0{found}".encode()).hexdigest()

    def load(split: str) -> Any:
        try:
            if local and any((Path(dataset) / name).exists() for name in ("dataset_dict.json", "state.json")):
                saved = datasets.load_from_disk(dataset)
                return saved[split] if isinstance(saved, dict) else saved
            return datasets.load_dataset(
                dataset, settings.subset, split=split, streaming=True, revision=None if local else found
            )
        except Exception as error:
            # The library raises errors of many kinds, its own and those of the network beneath.
            raise _cannot_load(dataset, split, found, error) from error

    def documents(split: str) -> Iterator[str]:
        rows = iter(load(split))
        while True:
            try:
                row = next(rows, None)
            except Exception as error:
                raise _cannot_load(dataset, split, found, error) from error
            if row is None:
                return
            text = row.get(settings.text_field)
            if not isinstance(text, str):
                raise HvpflowError(
                    f"dataset {dataset!r} has no text in field {settings.text_field!r}"
                    f"{nearest(settings.text_field, row)}; its fields: {', '.join(row)}; set corpus.text_field"
                )
            yield well_formed(text)

    validation = settings.validation_split
    return Corpus(
        revision=found,
        fingerprint=digest,
        documents=lambda: documents(settings.split),
        validation_documents=None if validation is None else lambda: documents(validation),
    )


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise HvpflowError(
            "reading a Hugging Face dataset needs the package 'datasets': pip install 'hvpflow[huggingface]'"
        ) from error
    return datasets


def _resolve(dataset: str, revision: str) -> str:
    """The commit that a branch or tag of a dataset on the hub names now."""
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(dataset, revision=revision).sha)
    except Exception as error:
        raise _cannot_load(dataset, None, revision, error) from error


def _cannot_load(dataset: str, split: str | None, revision: str, error: Exception) -> HvpflowError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    part = f", split {split!r}" if split else ""
    return HvpflowError(
        f"cannot load the Hugging Face dataset {dataset!r}{part}, revision {revision!r}: {reason}; "
        "check data.dataset, data.revision, corpus.subset and corpus.split, and the network"
    )


def _directory_digest(directory: Path) -> str:
    return listing_digest(
        {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    )
