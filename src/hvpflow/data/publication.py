"""A directory that appears under its name whole or not at all: made beside it, under a lock, and renamed at the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from hvpflow.errors import HvpflowError


@contextlib.contextmanager
def work_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory beside ``target``, locked against other processes, and remove it unless it was renamed.

    Raises:
        HvpflowError: another process is at work on the same target.
    """
    work = target.with_name(f".{target.name}.preparing")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(work.with_name(f"{work.name}.lock"), target):
        # What lies there was left by a process that was killed: its lock went with it.
        if work.exists():
            shutil.rmtree(work)
        work.mkdir()
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def publish(work: Path, target: Path, progress: Callable[[str], None]) -> None:
    """Give the finished directory its name; what bears it is moved aside first (``NAME.replaced-1``, …)."""
    _flush(work)
    if target.exists() and any(target.iterdir()):
        number = 1
        while (aside := target.with_name(f"{target.name}.replaced-{number}")).exists():
            number += 1
        target.rename(aside)
        progress(f"moved the earlier token cache, made for other settings, to {aside}")
    work.rename(target)
    _flush(target.parent)


@contextlib.contextmanager
def _lock(path: Path, target: Path) -> Iterator[None]:
    """Hold a lock file; it is a file of its own because network file systems lock no directories."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise HvpflowError(
                f"another process is preparing {target}: wait for it, then repeat the command"
            ) from error
        except OSError:
            pass  # A file system without locks: the rename alone keeps two processes from mixing their results.
        # An earlier holder may have removed the file between its opening and its locking here.
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            break
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
