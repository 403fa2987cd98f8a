"""Stopping on a signal at a moment when everything is saved."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from hvpflow.errors import HvpflowError

RETRY_STATUS = 75
"""Exit status for a job that saved its progress and wants to be started again (EX_TEMPFAIL)."""


class Interrupted(HvpflowError):
    """A signal asked the worker to stop, and its progress is saved. Programs exit with ``RETRY_STATUS``."""


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether SIGTERM or SIGINT came; a second signal acts as it did before.

    Outside the main thread, where Python takes no handlers, it never says so.
    """
    came = threading.Event()
    previous: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def handle(number: int, frame: FrameType | None) -> None:
        came.set()
        restore()

    if threading.current_thread() is not threading.main_thread():
        yield came.is_set
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        previous[number] = signal.signal(number, handle)
    try:
        yield came.is_set
    finally:
        restore()
