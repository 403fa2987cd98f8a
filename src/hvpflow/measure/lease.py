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

STAND_IN_VARIABLE = "HVPFLOW_STAND_IN_GPUS"
"""Environment variable with names, separated by commas, that device ``auto`` leases as it would lease GPUs, while the
CPU computes: to try a machine's setup without any."""

_POLL_SECONDS = 1.0


@contextlib.contextmanager
def lease_device(
    wanted: str | torch.device | None, report: Callable[[str], None], directory: Path | None = None
) -> Iterator[torch.device]:
    """Yield the wanted device; of several CUDA devices that would do (``auto``, ``cuda``), one that no other has.

    CUDA_VISIBLE_DEVICES says which there are. Waits while all are taken. Raises HvpflowError as ``choose_device`` does.
    """
    device = choose_device(wanted)
    choices = _choices(wanted, device)
    if not choices:
        yield device
        return
    directory = directory or Path(tempfile.gettempdir()) / f"hvpflow-{os.getuid()}-gpus"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    waiting = False
    while True:
        for name, choice in choices.items():
            lock = _try_lock(directory / f"{name}.lock")
            if lock is not None:
                with lock:
                    yield choice
                return
        if not waiting:
            report(f"waiting for one of {len(choices)} GPUs: other hvpflow workers have them all")
            waiting = True
        time.sleep(_POLL_SECONDS)


def _choices(wanted: str | torch.device | None, device: torch.device) -> dict[str, torch.device]:
    """The devices that would do, by a name that all processes of the machine give them; none where it is settled."""
    stand_ins = [name for name in os.environ.get(STAND_IN_VARIABLE, "").split(",") if name]
    if stand_ins and wanted in (None, "auto") and device.type == "cpu":
        return dict.fromkeys(stand_ins, device)
    if device.type != "cuda" or device.index is not None or torch.cuda.device_count() < 2:
        return {}
    return {_physical_name(index): torch.device("cuda", index) for index in range(torch.cuda.device_count())}


def _try_lock(path: Path) -> IO[str] | None:
    """Lock the file and write this process's number into it; None where another process has it."""
    handle = path.open("a")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        return None
    handle.truncate(0)
    handle.write(f"{os.getpid()}\n")
    handle.flush()
    return handle


def _physical_name(index: int) -> str:
    """A name that two processes with different CUDA_VISIBLE_DEVICES agree on."""
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return str(uuid) if uuid is not None else f"index-{index}"
