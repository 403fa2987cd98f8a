"""Errors whose text is meant for the person at the keyboard, and the search for the name they meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HvpflowError(Exception):
    """A problem the user can mend. Its text says what was found, what was expected and what to do.

    Programs print the text alone and exit with status 1; anything else that is raised is our own defect.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the known name most like ``name``, or "" where none is alike."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
