"""Sequences of an epoch as model inputs on the device. Legend: B sequences, T positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from hvpflow.data.cache import Split
from hvpflow.data.epochs import Epoch
from hvpflow.data.loader import to_batch

IGNORED_TARGET = -100


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpochReader:
    """Reads one epoch's sequences."""

    epoch: Epoch
    split: Split
    device: torch.device

    def read(self, block_ids: np.ndarray) -> tuple[Tensor, Tensor]:
        """Tokens and targets, each [B, T], of these blocks."""
        return to_batch(self.split.read_blocks(block_ids, self.epoch.context_length), self.device)

    def read_padded(self, block_ids: np.ndarray, batch_size: int) -> tuple[Tensor, Tensor]:
        """As ``read``, filled up to ``batch_size`` sequences whose targets are ignored: an engine sees one shape."""
        tokens, targets = self.read(block_ids)
        missing = batch_size - len(tokens)
        if missing <= 0:
            return tokens, targets
        filler = tokens.new_zeros(missing, tokens.shape[1])
        return torch.cat((tokens, filler)), torch.cat((targets, torch.full_like(filler, IGNORED_TARGET)))


def chunks(block_ids: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Consecutive pieces of at most ``size`` blocks."""
    for start in range(0, len(block_ids), size):
        yield block_ids[start : start + size]


def num_chunks(block_ids: np.ndarray, size: int) -> int:
    """How many pieces ``chunks`` gives."""
    return -(-len(block_ids) // size)
