"""One workflow at a time on an output directory, and Snakemake's lock of one that was killed. Imports no torch.

Snakemake locks its working directory by files that say nothing of their owner and outlive it. So whoever works on an
output also holds a lock of the operating system on ``OUTPUT/.hvpflow.lock``, which ends with its holders, however they
end, and writes there who it is. Results never depend on either lock: files appear whole, and two workers that measure
the same direction write the same numbers.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvpflow.errors import HvpflowError

LOCK_NAME = ".hvpflow.lock"
SNAKEMAKE_LOCKS = Path(".snakemake") / "locks"


@contextlib.contextmanager
def held_output(output: Path, *, unlock: bool = False) -> Iterator[int]:
    """Hold ``output`` for this process and those that inherit the yielded file descriptor.

    A lock that Snakemake left in ``output`` is removed if whoever worked there last was of this machine and has ended.

    Args:
        output: an existing directory.
        unlock: the caller is about to remove Snakemake's lock on the user's own word.

    Raises:
        HvpflowError: another process works on the output, or may do so.
    """
    descriptor, locked = _hold(output)
    try:
        if not unlock:
            _clear_snakemake_lock(output, alone=locked)
        _write_holder(output)
        yield descriptor
        # Ended in order, so Snakemake removed its lock. A later one would be of somebody who did not come this way.
        _write_holder(output, nobody=True)
    finally:
        os.close(descriptor)


def _hold(output: Path) -> tuple[int, bool]:
    """Take the output's lock, which holds as long as the returned file or a copy of it is open; whether there is one.

    Raises:
        HvpflowError: another process has the lock, or the directory cannot be written.
    """
    path = output / LOCK_NAME
    try:
        output.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise HvpflowError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise HvpflowError(
            f"another process works on {output} ({_described(_holder(output))}): wait for it to end, or stop it"
        ) from error
    except OSError:
        return descriptor, False  # a file system without locks; Snakemake's own remains, and is not removed unasked
    return descriptor, True


def hold_while_running(output: Path) -> None:
    """Hold ``output`` until this process ends, for a workflow that nobody launched."""
    _hold(output)
    _write_holder(output)


def _clear_snakemake_lock(output: Path, *, alone: bool) -> None:
    """Remove Snakemake's lock if ``alone`` says that nobody of this machine works here, and it was one of them."""
    locks = output / SNAKEMAKE_LOCKS
    if not locks.is_dir() or not any(locks.iterdir()):
        return
    holder = _holder(output)
    if alone and holder.get("host") == socket.gethostname():
        shutil.rmtree(locks, ignore_errors=True)
        return
    raise HvpflowError(
        f"{output} is locked by a Snakemake ({_described(holder)}); if it has ended, remove its lock by the same "
        "command with -- --unlock, then repeat the command"
    )


def _holder(output: Path) -> dict[str, Any]:
    """Who wrote its name last; empty where nobody did, or ended in order."""
    try:
        holder = json.loads((output / LOCK_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _write_holder(output: Path, *, nobody: bool = False) -> None:
    holder = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.datetime.now().isoformat(sep=" ", timespec="seconds"),
    }
    # In place: a renamed file would not be the locked one.
    with contextlib.suppress(OSError):
        (output / LOCK_NAME).write_text("" if nobody else json.dumps(holder) + "\n", encoding="utf-8")


def _described(holder: dict[str, Any]) -> str:
    if not {"host", "pid", "since"} <= set(holder):
        return "of unknown origin"
    return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
