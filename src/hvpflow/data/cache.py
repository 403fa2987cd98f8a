"""A token cache: a directory of uint16 shards and the manifest that identifies them. Opened, checked, never written.

Block i of length T covers tokens [iT, iT+T]: the first T of these T+1 tokens are inputs and the last T are targets,
so neighbouring blocks share one token and their targets are disjoint. Blocks cross shards.

Legend: B sequences, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvpflow.errors import HvpflowError, nearest
from hvpflow.files import fingerprint, read_json, sha256_file

CACHE_VERSION = 1
MANIFEST_NAME = "manifest.json"
TOKEN_DTYPE = "<u2"
TOKEN_BYTES = 2
PADDING = -100
"""What ``read_blocks`` puts where a partial last block has no token: the target that cross-entropy ignores."""

_MANIFEST_TYPES: dict[str, type] = {
    "dataset": str,
    "dataset_revision": str,
    "tokenizer": str,
    "tokenizer_revision": str,
    "vocab_size": int,
    "eos_token_id": int,
    "preprocessing": dict,
    "splits": dict,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """One token stream of a cache, memory-mapped shard by shard when first read."""

    name: str
    files: tuple[Path, ...]
    sha256: tuple[str, ...]
    shard_offsets: np.ndarray
    """int64 [num_shards + 1]: the number of tokens before each shard, and the total."""
    shard_tokens: int
    """Tokens of a full shard; only a preparation record tells it where the split has a single, perhaps short, shard."""
    _maps: dict[int, np.memmap] = field(default_factory=dict, repr=False)

    @property
    def tokens(self) -> int:
        """Number of tokens in the split."""
        return int(self.shard_offsets[-1])

    def num_blocks(self, length: int, *, partial: bool = False) -> int:
        """Blocks of ``length`` inputs: whole ones, and with ``partial`` also a last one that has fewer targets."""
        targets = max(self.tokens - 1, 0)
        return -(-targets // length) if partial else targets // length

    def read_blocks(self, block_ids: np.ndarray, length: int) -> np.ndarray:
        """Tokens of the blocks, int64 [B, T+1] with T = ``length``; behind the last token stands ``PADDING``.

        Raises:
            ValueError: a block that holds no target, that is, an id outside ``num_blocks(length, partial=True)``.
        """
        blocks = np.full((len(block_ids), length + 1), PADDING, dtype=np.int64)
        available = self.num_blocks(length, partial=True)
        for row, block in enumerate(np.asarray(block_ids).tolist()):
            if not 0 <= block < available:
                raise ValueError(f"block {block} is not among the {available} blocks of split {self.name!r}")
            start = block * length
            stop = min(start + length + 1, self.tokens)
            shard = int(np.searchsorted(self.shard_offsets, start, side="right")) - 1
            position = start
            while position < stop:
                first, end = int(self.shard_offsets[shard]), int(self.shard_offsets[shard + 1])
                piece = self._shard(shard)[position - first : min(stop, end) - first]
                blocks[row, position - start : position - start + len(piece)] = piece
                position += len(piece)
                shard += 1
        return blocks

    def _shard(self, index: int) -> np.memmap:
        if index not in self._maps:
            try:
                self._maps[index] = np.memmap(self.files[index], dtype=TOKEN_DTYPE, mode="r")
            except (OSError, ValueError) as error:
                raise HvpflowError(f"cannot read the token shard {self.files[index]}: {error}") from error
        return self._maps[index]


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenCache:
    """A token cache whose manifest and file sizes were checked; ``verify`` checks the contents too."""

    directory: Path
    manifest: dict[str, Any]
    identity: str
    vocab_size: int
    eos_token_id: int
    splits: Mapping[str, Split]

    @classmethod
    def open(cls, directory: Path) -> TokenCache:
        """Open the cache in ``directory``.

        Raises:
            HvpflowError: no such directory, or its manifest is missing, edited or of another version, names a file
                outside the directory, or disagrees with the shards' sizes or token counts.
        """
        manifest = read_manifest(directory)
        recorded = _recorded_shard_tokens(manifest)
        splits = {name: _open_split(directory, name, entry, recorded) for name, entry in manifest["splits"].items()}
        return cls(
            directory=directory,
            manifest=manifest,
            identity=manifest["identity"],
            vocab_size=manifest["vocab_size"],
            eos_token_id=manifest["eos_token_id"],
            splits=splits,
        )

    def split(self, name: str) -> Split:
        """The split called ``name`` ("train" or "validation")."""
        if name not in self.splits:
            raise HvpflowError(
                f"token cache {self.directory} has no split {name!r}{nearest(name, self.splits)}; "
                f"it has: {', '.join(self.splits) or 'none'}"
            )
        return self.splits[name]

    def verify(self) -> None:
        """Hash every shard of every split.

        Raises:
            HvpflowError: a shard cannot be read, or its SHA-256 is not the manifest's.
        """
        for split in self.splits.values():
            for path, expected in zip(split.files, split.sha256):
                try:
                    found = sha256_file(path)
                except OSError as error:
                    raise HvpflowError(f"cannot read the token shard {path}: {error.strerror}") from error
                if found != expected:
                    raise HvpflowError(
                        f"checksum mismatch {path}: its SHA-256 is {found[:12]}…, the manifest says {expected[:12]}…; "
                        f"the shard was altered: restore it, or move {self.directory} away and prepare it again"
                    )


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read and check the manifest of the cache in ``directory``, without looking at the shards.

    Raises:
        HvpflowError: as ``TokenCache.open``.
    """
    path = directory / MANIFEST_NAME
    if not directory.is_dir():
        raise HvpflowError(
            f"no token cache at {directory}: prepare it with `hvpflow prepare`, or name another directory "
            "with --cache-dir"
        )
    if not path.is_file():
        raise HvpflowError(f"{directory} holds no {MANIFEST_NAME}, so it is no finished token cache: prepare it again")
    manifest = read_json(path)
    if not isinstance(manifest, dict):
        raise HvpflowError(f"{path} is no token cache manifest: expected a mapping")
    if manifest.get("version") != CACHE_VERSION:
        raise HvpflowError(
            f"invalid version in {path}: found {manifest.get('version')!r}, this program reads version {CACHE_VERSION}"
        )
    if manifest.get("identity") != manifest_identity(manifest):
        raise HvpflowError(
            f"invalid identity in {path}: the manifest was edited after the cache was made; restore it, "
            f"or move {directory} away and prepare it again"
        )
    if manifest.get("dtype") != TOKEN_DTYPE:
        raise HvpflowError(f"{path} declares tokens of type {manifest.get('dtype')!r}, expected {TOKEN_DTYPE!r}")
    for key, kind in _MANIFEST_TYPES.items():
        if not isinstance(manifest.get(key), kind):
            raise HvpflowError(f"invalid manifest {path}: {key!r} is {manifest.get(key)!r}, expected {kind.__name__}")
    return manifest


def manifest_identity(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of the manifest's canonical JSON without its ``identity``."""
    return fingerprint({key: value for key, value in manifest.items() if key != "identity"})


def _recorded_shard_tokens(manifest: Mapping[str, Any]) -> int | None:
    """Tokens of a full shard, as this program's own caches record it."""
    try:
        return int(manifest["preparation"]["request"]["shard_tokens"])
    except (KeyError, TypeError, ValueError):
        return None


def _open_split(directory: Path, name: str, entry: Any, recorded_shard_tokens: int | None) -> Split:
    try:
        declared = int(entry["tokens"])
        shards = [(str(shard["file"]), int(shard["tokens"]), str(shard["sha256"])) for shard in entry["shards"]]
    except (KeyError, TypeError, ValueError) as error:
        raise HvpflowError(
            f"invalid manifest {directory / MANIFEST_NAME}: split {name!r} must list tokens and shards "
            "with file, tokens and sha256"
        ) from error
    offsets, files = [0], []
    for file, tokens, _ in shards:
        # A plain name has no separator, so it can lead neither up nor to an absolute place.
        if Path(file).name != file or file in ("", ".", "..") or "\0" in file:
            raise HvpflowError(
                f"invalid shard name {file!r} in {directory / MANIFEST_NAME}: expected a plain file name"
            )
        path = directory / file
        try:
            size = path.stat().st_size
        except OSError as error:
            raise HvpflowError(f"cannot read the token shard {path}: {error.strerror}") from error
        if tokens < 1 or size != TOKEN_BYTES * tokens:
            raise HvpflowError(
                f"truncated token shard {path}: it has {size} bytes, {TOKEN_BYTES * tokens} are expected for its "
                f"{tokens} tokens; restore it, or move {directory} away and prepare it again"
            )
        files.append(path)
        offsets.append(offsets[-1] + tokens)
    if offsets[-1] != declared:
        raise HvpflowError(
            f"token count of split {name!r} in {directory / MANIFEST_NAME} does not match its shards: "
            f"declared {declared}, the shards hold {offsets[-1]}"
        )
    return Split(
        name=name,
        files=tuple(files),
        sha256=tuple(digest for _, _, digest in shards),
        shard_offsets=np.asarray(offsets, dtype=np.int64),
        shard_tokens=recorded_shard_tokens or (shards[0][1] if shards else 0),
    )
