"""Blocks of tokens as PyTorch tensors. Legend: B sequences, T positions."""

from __future__ import annotations

import numpy as np
import torch

from hvpflow.data.cache import PADDING


def to_batch(blocks: np.ndarray, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Split blocks, int64 [B, T+1], into inputs [B, T] and next-token targets [B, T], int64 on ``device``.

    Padding (behind the end of the text, in a partial last block) stays -100 among the targets, which cross-entropy
    ignores. Among the inputs it becomes token 0: a causal model's other positions do not see it.
    """
    rows = torch.from_numpy(blocks)
    if torch.device(device).type == "cuda":
        rows = rows.pin_memory()
    rows = rows.to(device, non_blocking=True)
    tokens, targets = rows[:, :-1], rows[:, 1:].contiguous()
    return torch.where(tokens == PADDING, 0, tokens), targets
