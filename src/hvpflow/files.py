"""Files that appear whole or not at all, and the digests that identify their content."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hvpflow.errors import HvpflowError

_HASH_CHUNK_BYTES = 1 << 20
_CHECKSUM = "checksum"
TEMPORARY = ".tmp"
"""End of the hidden names under which files are written."""


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of ``path`` to write to; on success it is flushed to disk and renamed onto ``path``.

    After any error the temporary file is removed and ``path`` is as it was.

    Raises:
        HvpflowError: the disk is full or the directory cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY)
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
    except (ValueError, RecursionError) as error:
        raise HvpflowError(f"{path} is not valid JSON ({error}); delete it to have it made again") from error


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON mapping atomically with its ``checksum`` as the last key; ``read_record`` checks it."""
    write_json(path, {**content, _CHECKSUM: fingerprint(content)})


def read_record(path: Path) -> dict[str, Any]:
    """Read what ``write_record`` wrote, without the checksum.

    Raises:
        HvpflowError: the file is missing, unreadable, or not as it was written.
    """
    content = read_json(path)
    if not isinstance(content, dict) or content.pop(_CHECKSUM, None) != fingerprint(content):
        raise HvpflowError(f"{path} is damaged: its checksum is wrong; delete it to have it made again")
    return content


def remove_leftovers(directory: Path, *, seconds: float = 0.0) -> None:
    """Remove what killed writers left of the temporary files directly in ``directory``, if older than ``seconds``."""
    with contextlib.suppress(OSError):
        for path in directory.glob(f".*{TEMPORARY}"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime >= seconds:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


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
