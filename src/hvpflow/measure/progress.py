"""Lines that say how far a worker is, how fast, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable

LINE_SECONDS = 10.0
"""Least time between two lines."""


class Progress:
    """Progress of one phase, in units of work that it is told of."""

    def __init__(self, report: Callable[[str], None], label: str, *, total_tokens: int) -> None:
        self._report, self._label = report, label
        self._total, self._done, self._skipped = total_tokens, 0, 0
        self.note = ""
        self._started = self._last_line = time.monotonic()

    def skip(self, tokens: int) -> None:
        """Note work that was found done: it counts as done, but not for the speed."""
        self._done += tokens
        self._skipped += tokens

    def advance(self, tokens: int) -> None:
        """Note ``tokens`` more; say so unless a line was written a moment ago."""
        self._done += tokens
        if time.monotonic() - self._last_line >= LINE_SECONDS:
            self.say()

    def say(self) -> None:
        """Write a line now."""
        self._last_line = time.monotonic()
        seconds = self._last_line - self._started
        parts = [f"{100 * self._done / max(self._total, 1):.0f} %"]
        done_here = self._done - self._skipped
        if seconds > 0 and done_here > 0:
            rate = done_here / seconds
            parts.append(f"{rate:,.0f} tokens/s")
            if self._total > self._done:
                parts.append(f"{duration((self._total - self._done) / rate)} left")
        if self.note:
            parts.insert(0, self.note)
        self._report(f"{self._label}: {', '.join(parts)}")


def duration(seconds: float) -> str:
    """``seconds`` for people, in its two greatest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
