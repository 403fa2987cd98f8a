"""Finished work under its content identity: one small JSON file an entry, checked before it is believed. Torch-free.

    STORE/<context digest>/<entry name>.json

The *context* is all that the entries of one checkpoint and case have in common: weights, data and its order, numerical
settings, measurement version. An entry holds its full identity, its value, and a checksum of both. No lock is needed:
files appear whole, and two workers that compute the same entry write the same content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hvpflow.errors import HvpflowError
from hvpflow.files import fingerprint, write_bytes

_SCHEMA_VERSION = 1


def _ignore(message: str) -> None:
    """Report nothing."""


class Store:
    """A directory of finished work, shared by all checkpoints and cases of an analysis, and by concurrent workers."""

    def __init__(self, directory: Path, report: Callable[[str], None] = _ignore) -> None:
        self.directory = directory
        self.report = report
        self._reported: set[Path] = set()

    def report_damage(self, path: Path) -> None:
        """Say once that the entry at ``path`` is damaged."""
        if path not in self._reported:
            self._reported.add(path)
            self.report(f"damaged store entry {path.name}: it is not used, and computed again")

    def context(self, identity: Mapping[str, Any]) -> Context:
        """The part of the store whose entries share ``identity`` (plain JSON data)."""
        return Context(self, dict(identity))


class Context:
    """The entries of one checkpoint and case."""

    def __init__(self, store: Store, identity: dict[str, Any]) -> None:
        self.identity = identity
        self.digest = fingerprint(identity)
        self.directory = store.directory / self.digest[:32]
        self._store = store

    def get(self, name: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The value kept as ``name`` for exactly ``key``; None where there is none.

        A damaged entry is reported and counts as absent, so it is computed again and written over.
        """
        path = self._path(name)
        try:
            entry = json.loads(path.read_bytes())
            value, identity, checksum = entry["value"], entry["identity"], entry["checksum"]
            intact = entry["schema_version"] == _SCHEMA_VERSION and checksum == _checksum(identity, value)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise HvpflowError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError):
            intact = False
        if not intact:
            self._store.report_damage(path)
            return None
        return value if identity == self._identity(key) else None

    def put(self, name: str, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Keep ``value`` as ``name``, atomically; what lay there is replaced."""
        identity = self._identity(key)
        entry = {
            "schema_version": _SCHEMA_VERSION,
            "identity": identity,
            "value": value,
            "checksum": _checksum(identity, value),
        }
        write_bytes(self._path(name), (json.dumps(entry, indent=1, allow_nan=False) + "\n").encode())

    def remove(self, name: str) -> None:
        """Forget ``name``, if it is there."""
        self._path(name).unlink(missing_ok=True)

    def files(self, pattern: str) -> Iterator[Path]:
        """Files of this context by glob pattern."""
        with contextlib.suppress(FileNotFoundError):
            yield from sorted(self.directory.glob(pattern))

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.json"

    def _identity(self, key: Mapping[str, Any]) -> dict[str, Any]:
        return {"context": self.digest, **key}


def _checksum(identity: Any, value: Any) -> str:
    return hashlib.sha256(json.dumps([identity, value], sort_keys=True).encode()).hexdigest()
