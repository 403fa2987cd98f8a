"""SIGTERM and SIGINT as a request to stop at the next safe place."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """Whether a signal has asked to stop, and which."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Turn the first SIGTERM or SIGINT inside the block into a StopRequest; a second one acts as usual.

    Outside the main thread, where Python allows no handlers, signals act as usual from the start.
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
