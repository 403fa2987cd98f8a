"""Blocks as tensors."""

from __future__ import annotations

import numpy as np
import torch

from hvpflow.data.cache import PADDING
from hvpflow.data.loader import to_batch


def test_targets_are_the_next_tokens_and_padding_is_ignored() -> None:
    tokens, targets = to_batch(np.array([[5, 6, 7, 8], [8, 9, PADDING, PADDING]]), "cpu")
    assert tokens.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert targets.tolist() == [[6, 7, 8], [9, -100, -100]]
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
