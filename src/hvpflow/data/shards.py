"""Writing a split: a stream of tokens cut into headerless uint16 files of equal size."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import IO, Any

import numpy as np

from hvpflow.data.cache import TOKEN_DTYPE


class SplitWriter:
    """Writes at most ``limit`` tokens of one split to ``NAME-00000.bin``, ``NAME-00001.bin``, …"""

    def __init__(self, directory: Path, name: str, *, shard_tokens: int, limit: int) -> None:
        self.tokens = 0
        self.limit = limit
        self._directory = directory
        self._name = name
        self._shard_tokens = shard_tokens
        self._shards: list[dict[str, Any]] = []
        self._handle: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        self._in_shard = 0

    @property
    def full(self) -> bool:
        """Whether ``limit`` tokens are written."""
        return self.tokens >= self.limit

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens, those beyond the limit excepted."""
        rest = tokens[: self.limit - self.tokens]
        while len(rest):
            if self._handle is None:
                path = self._directory / f"{self._name}-{len(self._shards):05d}.bin"
                self._handle, self._digest, self._in_shard = path.open("wb"), hashlib.sha256(), 0
                self._shards.append({"file": path.name})
            piece, rest = np.split(rest, [self._shard_tokens - self._in_shard])
            content = piece.astype(TOKEN_DTYPE).tobytes()
            self._handle.write(content)
            self._digest.update(content)
            self._in_shard += len(piece)
            self.tokens += len(piece)
            if self._in_shard == self._shard_tokens:
                self._finish_shard()

    def finish(self) -> dict[str, Any]:
        """Flush all to disk and return the split's entry in the manifest."""
        self._finish_shard()
        return {"tokens": self.tokens, "shards": self._shards}

    def close(self) -> None:
        """Let go of an unfinished file, after an error."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.close()

    def _finish_shard(self) -> None:
        if self._handle is None:
            return
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self._handle.close()
        self._handle = None
        self._shards[-1] |= {"tokens": self._in_shard, "sha256": self._digest.hexdigest()}
