"""How programs speak: lines on stderr and in a log, and a user's mistake as its message alone."""

from __future__ import annotations

import contextlib
import errno
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from hvpflow.errors import HvpflowError
from hvpflow.interruption import RETRY_STATUS, Interrupted

ERROR_PREFIX = "hvpflow: error: "
INTERRUPTED_PREFIX = "hvpflow: interrupted: "


class Reporter:
    """Says each line on stderr, and writes it to a log where one is given."""

    def __init__(self, log: Path | None) -> None:
        self._log: TextIO | None = None
        # A disk too full for a log may have room for the result, and a terminal that went away misses only words.
        if log is not None:
            with contextlib.suppress(OSError):
                log.parent.mkdir(parents=True, exist_ok=True)
                self._log = log.open("w", encoding="utf-8", buffering=1)

    def say(self, line: str) -> None:
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.write(line + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()


def reported(work: Callable[[], None], say: Callable[[str], None]) -> int:
    """Do ``work``; return 0, or say what went wrong and return the exit status for it.

    A mistake of the user's is said as its message alone. Anything unforeseen is a defect of ours: its traceback is
    shown, for the report that we ask for.
    """
    try:
        work()
    except Interrupted as error:
        say(f"{INTERRUPTED_PREFIX}{error}")
        return RETRY_STATUS
    except HvpflowError as error:
        say(f"{ERROR_PREFIX}{error}")
        return 1
    except KeyboardInterrupt:
        say(f"{INTERRUPTED_PREFIX}repeat the command to continue")
        return 130
    except MemoryError:
        say(f"{ERROR_PREFIX}out of memory: lower analysis.directions_per_pass or analysis.hvp_batch_size")
        return 1
    except BrokenPipeError:
        return 1  # whoever read our output has gone
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            say(f"{ERROR_PREFIX}no room on the disk: free some space, then repeat the command")
        else:
            say(f"{ERROR_PREFIX}{error.filename or 'a file'}: {error.strerror or error}")
        return 1
    except Exception:
        say(traceback.format_exc().rstrip())
        say(f"{ERROR_PREFIX}this is a defect of hvpflow; please report it with the lines above")
        return 2
    return 0
