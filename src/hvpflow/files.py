"""Files that appear whole or not at all, and the digests that identify their content."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvpflow.errors import HvpflowError

_HASH_CHUNK_BYTES = 1 << 20


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of ``path`` to write to; on success it is flushed to disk and renamed onto ``path``.

    After any error the temporary file is removed and ``path`` is as it was.

    Raises:
        HvpflowError: the disk is full or the directory cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except OSError as error:
        raise _cannot_write(path, error) from error
    os.close(descriptor)
    temporary = Path(name)
    try:
        temporary.chmod(0o666 & ~_umask())
        yield temporary
        with temporary.open("rb+") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    """Write ``content`` to ``path`` atomically, as UTF-8 and without translating line ends."""
    write_bytes(path, content.encode())


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` atomically as JSON: indented by 2, a final newline, NaN and infinities refused."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        HvpflowError: the file is missing, unreadable or no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HvpflowError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise HvpflowError(f"{path} is not valid JSON ({error}); delete it to have it made again") from error


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint(content: Any) -> str:
    """SHA-256 of a JSON-able value's canonical text (sorted keys, default separators)."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _cannot_write(path: Path, error: OSError) -> HvpflowError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HvpflowError(f"no room on the disk for {path}: free some space, then repeat the command")
    return HvpflowError(f"cannot write {path}: {error.strerror or error}")
