"""SIGTERM and SIGINT as a request to stop at the next moment when everything is saved."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from hvpflow.errors import HvpflowError

RETRY_STATUS = 75
"""Exit status for a job that saved its progress and wants to be started again (EX_TEMPFAIL)."""


class Interrupted(HvpflowError):
    """A signal asked to stop, and all progress is saved. Programs exit with ``RETRY_STATUS``."""


class StopRequest:
    """Call it to learn whether a signal has asked to stop; ``signal`` says which."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Turn the first SIGTERM or SIGINT inside the block into a stop request; a second one acts as it did before.

    Outside the main thread, where Python takes no handlers, signals act as usual from the start.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    caught = (signal.SIGTERM, signal.SIGINT)
    earlier = {number: signal.getsignal(number) for number in caught}

    def restore() -> None:
        for number, handler in earlier.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        restore()

    for number in caught:
        signal.signal(number, note)
    try:
        yield request
    finally:
        restore()
