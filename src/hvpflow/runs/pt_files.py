"""PyTorch's ``.pt`` files (zip archives around a pickle), read without running anything they hold."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct

from hvpflow.errors import HvpflowError
from hvpflow.files import atomic_path

# Foreign training states keep numpy's generator state as an array; these four rebuild it and can do nothing else.
_ALLOWED: list[Any] = [_reconstruct, np.ndarray, np.dtype, np.dtypes.UInt32DType]


def load_pt(path: Path) -> dict[str, Any]:
    """Load a dictionary of tensors and plain data. Tensors may be mapped from the file: clone those you keep.

    Raises:
        HvpflowError: the file is missing, no torch.save archive, truncated or corrupt, inflates to more than its own
            size, holds objects of other types, or is no dictionary.
    """
    if not path.is_file():
        raise HvpflowError(f"no checkpoint file {path}")
    _check_archive(path)
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            if foreign:
                raise HvpflowError(
                    f"{path} holds objects beyond tensors and plain data ({', '.join(sorted(foreign)[:3])}); loading "
                    "them could run foreign code, so the file is refused: take a .safetensors export instead"
                )
            # Mapped, a storage that claims more bytes than the file has is cut short and refused by torch; read into
            # memory, it would make torch read beyond its buffer.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except HvpflowError:
        raise
    except Exception as error:  # A damaged pickle can fail in any way.
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HvpflowError(f"{path} cannot be loaded as tensors and plain data ({first}): {_DAMAGED}") from error
    if not isinstance(content, dict):
        raise HvpflowError(f"{path} holds a {type(content).__name__}, expected the dictionary of a training state")
    return content


_DAMAGED = "it is damaged or no training state; copy it again or take another checkpoint"


def _check_archive(path: Path) -> None:
    """Check sizes and checksums. torch.save stores without compression, so a compressed record is not its work."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            compressed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
            if compressed or sum(record.file_size for record in records) > path.stat().st_size:
                raise HvpflowError(
                    f"{path} holds compressed or overlapping records, which torch.save never writes: it is refused"
                )
            damaged = archive.testzip()
    except HvpflowError:
        raise
    except OSError as error:
        raise HvpflowError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # zipfile raises errors of many types on archives made to mislead it.
        raise HvpflowError(f"{path} is truncated or no torch.save archive ({error}): {_DAMAGED}") from error
    if damaged:
        raise HvpflowError(f"{path}: checksum mismatch in its record {damaged!r}: {_DAMAGED}")


class _Sink:
    """Remembers the system's error, which torch replaces by one that hides the cause."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def save_to(file: BinaryIO, content: dict[str, Any]) -> None:
    """torch.save to an open file; a failing write raises the system's OSError."""
    sink = _Sink(file)
    try:
        torch.save(content, sink)  # type: ignore[arg-type]
    except RuntimeError as error:
        if sink.error is not None:
            raise sink.error from error
        raise


def write_pt(path: Path, content: dict[str, Any]) -> None:
    """Save a dictionary of tensors and plain data atomically. Equal content gives equal bytes.

    Raises:
        HvpflowError: no room on the disk, or the directory cannot be written.
    """
    # Through a file object: given a path, torch.save would put the temporary file's random name into the archive.
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        save_to(file, content)
