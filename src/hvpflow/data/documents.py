"""Documents out of local files: text, JSONL and Parquet, plain or compressed by gzip or Zstandard."""

from __future__ import annotations

import contextlib
import glob
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvpflow.errors import HvpflowError, nearest

_JSONL_SUFFIXES = (".jsonl", ".ndjson")
_PARQUET_SUFFIXES = (".parquet", ".pq")
_PARQUET_ROWS = 1024


def find_files(patterns: Sequence[str]) -> dict[str, Path]:
    """Files that the globs match, by name relative to the longest common directory, in the names' order.

    A file that is matched twice, or reached through two links, counts once: text never repeats.

    Raises:
        HvpflowError: a glob matches no file.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        matches = [Path(name) for name in glob.glob(os.path.expanduser(pattern), recursive=True)]
        files = [path for path in matches if path.is_file()]
        if not files:
            raise HvpflowError(
                f"corpus.files: no file matches {pattern!r} (looked from {Path.cwd()}); "
                "check the path, and that ** stands for directories"
            )
        for path in sorted(files):
            found.setdefault(path.resolve(), path)
    base = Path(os.path.commonpath([path.parent for path in found]))
    return dict(sorted((real.relative_to(base).as_posix(), path) for real, path in found.items()))


def listing_digest(files: Mapping[str, Path]) -> str:
    """SHA-256 over the names and sizes of files, without reading them: they may be a great deal of text."""
    digest = hashlib.sha256()
    for name, path in files.items():
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
    return digest.hexdigest()


def read_documents(path: Path, text_field: str) -> Iterator[str]:
    """The documents of one file: a line's ``text_field`` (JSONL), a row's (Parquet), or the whole of a text file.

    Raises:
        HvpflowError: the file cannot be read, is damaged, no UTF-8, or lacks the field.
    """
    name = path.name.lower()
    for suffix in (".gz", ".zst"):
        name = name.removesuffix(suffix)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_readable(path))
        handle = stack.enter_context(_open(path))
        if name.endswith(_JSONL_SUFFIXES):
            yield from _json_lines(handle, path, text_field)
        elif name.endswith(_PARQUET_SUFFIXES):
            yield from _parquet_rows(handle, path, text_field)
        else:
            yield decode(handle.read(), path)


def decode(content: bytes, path: Path) -> str:
    """UTF-8 text, without a byte order mark."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HvpflowError(
            f"{path} is no UTF-8 text ({error.reason} at byte {error.start}): convert it, or leave it out of "
            "corpus.files"
        ) from error


def well_formed(text: str) -> str:
    """``text`` with each lone surrogate, which JSON can spell and UTF-8 cannot, replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Name the file in the errors of reading and unpacking it."""
    import zstandard

    try:
        yield
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise HvpflowError(f"{path} is damaged or cut short: {error}") from error
    except OSError as error:
        raise HvpflowError(f"cannot read {path}: {error.strerror or error}") from error


def _open(path: Path) -> io.BufferedIOBase:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb")
    if path.suffix.lower() == ".zst":
        return io.BufferedReader(_ZstandardFrames(path), io.DEFAULT_BUFFER_SIZE * 16)
    return path.open("rb")


class _ZstandardFrames(io.RawIOBase):
    """A file of Zstandard frames, unpacked. The package's own reader takes a file cut short for a whole one."""

    def __init__(self, path: Path) -> None:
        self._source = path.open("rb")
        self._pending = memoryview(b"")
        self._packed = b""
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            self._packed = self._packed or self._source.read(io.DEFAULT_BUFFER_SIZE * 16)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the file ends inside a frame")
                return 0
            self._unpack()
        size = min(len(buffer), len(self._pending))
        buffer[:size] = self._pending[:size]
        self._pending = self._pending[size:]
        return size

    def close(self) -> None:
        self._source.close()
        super().close()

    def _unpack(self) -> None:
        import zstandard

        if self._frame is None:
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._pending = memoryview(self._frame.decompress(self._packed))
        self._packed = self._frame.unused_data
        if self._frame.eof:
            self._frame = None


def _json_lines(handle: io.BufferedIOBase, path: Path, text_field: str) -> Iterator[str]:
    for number, line in enumerate(handle, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise HvpflowError(f"{path}, line {number}: not valid JSON ({error})") from error
        yield _text_of(row, text_field, f"{path}, line {number}")


def _parquet_rows(handle: io.BufferedIOBase, path: Path, text_field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    # Parquet is read from its end: what cannot seek is unpacked into memory.
    source = path if path.suffix.lower() in _PARQUET_SUFFIXES else pyarrow.BufferReader(handle.read())
    try:
        with pyarrow.parquet.ParquetFile(source) as file:
            names = file.schema_arrow.names
            if text_field not in names:
                raise _no_field(text_field, names, str(path))
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    yield _text_of({text_field: text}, text_field, str(path))
    except pyarrow.ArrowException as error:
        raise HvpflowError(f"{path} is no readable Parquet file: {error}") from error


def _text_of(row: Any, text_field: str, where: str) -> str:
    if not isinstance(row, dict):
        raise HvpflowError(f"{where}: expected an object with the field {text_field!r}, found {type(row).__name__}")
    if text_field not in row:
        raise _no_field(text_field, list(row), where)
    if not isinstance(row[text_field], str):
        raise HvpflowError(f"{where}: field {text_field!r} holds {type(row[text_field]).__name__}, expected text")
    return well_formed(row[text_field])


def _no_field(text_field: str, names: Sequence[str], where: str) -> HvpflowError:
    return HvpflowError(
        f"{where}: no field {text_field!r}{nearest(text_field, names)}; found: {', '.join(names) or 'none'}; "
        "set corpus.text_field"
    )
