"""One GPU for each worker: several workers of one machine take distinct devices by file locks.

A lock holds as long as its process lives and vanishes with it, however it ends. The files lie in the machine's own
temporary directory, since they say something about this machine only. Results never depend on them: should a lock
fail, two workers share a device and are merely slow.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import torch

from hvpflow.devices import choose_device

_POLL_SECONDS = 1.0


@contextlib.contextmanager
def lease_device(
    wanted: str | torch.device | None, report: Callable[[str], None], directory: Path | None = None
) -> Iterator[torch.device]:
    """Yield the wanted device; of several CUDA devices that would do (``auto``, ``cuda``), one that no other has.

    Waits while all are taken. Raises HvpflowError as ``choose_device`` does.
    """
    device = choose_device(wanted)
    if device.type != "cuda" or device.index is not None or torch.cuda.device_count() < 2:
        yield device
        return
    directory = directory or Path(tempfile.gettempdir()) / f"hvpflow-{os.getuid()}-gpus"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    waiting = False
    while True:
        for index in range(torch.cuda.device_count()):
            lock = _try_lock(directory / f"{_physical_name(index)}.lock")
            if lock is not None:
                with lock:
                    yield torch.device("cuda", index)
                return
        if not waiting:
            report(f"waiting for one of {torch.cuda.device_count()} GPUs: other hvpflow workers have them all")
            waiting = True
        time.sleep(_POLL_SECONDS)


def _try_lock(path: Path) -> IO[str] | None:
    handle = path.open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        return None
    return handle


def _physical_name(index: int) -> str:
    """A name that two processes with different CUDA_VISIBLE_DEVICES agree on."""
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return str(uuid) if uuid is not None else f"index-{index}"
