"""The directory a training works in, and how its results get their public names.

Workflow managers delete the outputs of a job that failed or is about to run again. So a training never writes to its
run directory's public names while it works: everything goes to ``RUN/.training``, which is laid out like a run and
marked with the recipe's identity, and what the recipe retains is hard-linked (or copied) to its public name at the end.
The same recipe again finds its finished or half-finished work there; another recipe finds the old run moved aside to
``RUN.replaced-1``, ``RUN.replaced-2``, …: nothing is deleted but the private resume state of a finished training.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hvpflow.errors import HvpflowError
from hvpflow.files import TEMPORARY, atomic_path, read_json, remove_leftovers, write_json

PRIVATE = ".training"
ROLLING_STATE = "rolling.pt"
"""The state that an interrupted training continues from, inside the private directory."""
_IDENTITY = "identity.json"
_LAYOUT_VERSION = 1
RECORDS = ("resolved.yaml", "metrics.jsonl", "result.json", "best.json", "environment.json", "status.json", "run.log")
"""The small files that every run publishes beside its checkpoints."""
_SIGNS_OF_A_RUN = ("resolved.yaml", "metrics.jsonl", "result.json", "final.pt")


class Workspace:
    """The private directory of one training, claimed for one recipe identity."""

    def __init__(self, run_directory: Path, identity: str) -> None:
        self.run_directory = run_directory
        self.directory = run_directory / PRIVATE
        self.identity = identity

    def path(self, name: str) -> Path:
        """Private path of a file that may be published under the same name."""
        return self.directory / name

    def missing(self, names: list[str]) -> list[str]:
        """Those of the retained files ``names`` that the training has not written yet."""
        return [name for name in names if not self.path(name).is_file()]

    def is_complete(self, retained: list[str]) -> bool:
        """Whether the training has ended and holds all that is to be published."""
        result = self.path("result.json")
        return result.is_file() and _status(result) == "complete" and not self.missing([*retained, *RECORDS])

    def publish(self, retained: list[str]) -> None:
        """Give checkpoints and records their public names, each atomically; what is there already stays untouched."""
        for name in retained:
            _link(self.path(name), self.run_directory / name)
        # Records are copied: people edit small files in place, which through a link would change the original too.
        for name in RECORDS:
            _copy(self.path(name), self.run_directory / name)

    def write_status(self, status: dict[str, Any]) -> None:
        """Write status.json, at once under its public name too: it is for whoever looks at the run now."""
        write_json(self.path("status.json"), status)
        write_json(self.run_directory / "status.json", status)


@contextlib.contextmanager
def claim(run_directory: Path, identity: str, progress: Callable[[str], None]) -> Iterator[Workspace]:
    """Hold the workspace of ``run_directory`` for a recipe identity; a run of another one is moved aside first.

    Raises:
        HvpflowError: another process trains there, or the directory cannot be written.
    """
    workspace = Workspace(run_directory, identity)
    if _holds_other_run(workspace):
        with _lock(workspace):
            aside = _free_name(run_directory)
            try:
                run_directory.rename(aside)
            except OSError as error:
                raise HvpflowError(
                    f"{run_directory} holds a run of another recipe and cannot be moved aside to {aside} "
                    f"({error.strerror}): move it yourself, or train with another runtime.output_dir"
                ) from error
        progress(f"{run_directory} held a run of another recipe; it is now at {aside}")
    with _lock(workspace):
        for directory in (workspace.directory, *workspace.directory.glob("node-*"), run_directory):
            remove_leftovers(directory)
        if not workspace.path(_IDENTITY).exists():
            write_json(workspace.path(_IDENTITY), {"layout": _LAYOUT_VERSION, "recipe_identity": identity})
        yield workspace


def _holds_other_run(workspace: Workspace) -> bool:
    mark = workspace.path(_IDENTITY)
    if mark.exists():
        record = read_json(mark)
        return not isinstance(record, dict) or (record.get("layout"), record.get("recipe_identity")) != (
            _LAYOUT_VERSION,
            workspace.identity,
        )
    run = workspace.run_directory
    return any((run / name).exists() for name in _SIGNS_OF_A_RUN) or any(run.glob("epoch-*"))


def _free_name(directory: Path) -> Path:
    number = 1
    while (aside := directory.with_name(f"{directory.name}.replaced-{number}")).exists():
        number += 1
    return aside


@contextlib.contextmanager
def _lock(workspace: Workspace) -> Iterator[None]:
    """Hold an exclusive lock that the system drops when the process ends, however it ends."""
    try:
        workspace.directory.mkdir(parents=True, exist_ok=True)
        handle = (workspace.directory / "lock").open("a")
    except OSError as error:
        raise HvpflowError(f"cannot write {workspace.directory}: {error.strerror or error}") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HvpflowError(
                f"another process is training in {workspace.run_directory}: wait for it to end, or stop it"
            ) from error
        except OSError:
            pass  # some network file systems have no locks; then two trainings at once are the user's to avoid
        yield


def _link(source: Path, target: Path) -> None:
    if target.exists() and target.samefile(source):
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A link cannot replace a file; so it is made under a temporary name and renamed.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.", suffix=TEMPORARY) as temporary:
            link = Path(temporary) / target.name
            os.link(source, link)
            os.utime(link)  # newer than the inputs, which is how workflow managers recognise a fresh output
            link.replace(target)
    except OSError:
        _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    if target.is_file() and target.read_bytes() == source.read_bytes():
        return
    with atomic_path(target) as temporary:
        shutil.copyfile(source, temporary)


def _status(path: Path) -> Any:
    record = read_json(path)
    return record.get("status") if isinstance(record, dict) else None
