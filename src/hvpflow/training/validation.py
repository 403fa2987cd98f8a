"""The mean loss on held-out text: a fixed random subset after each epoch, all of it at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from hvpflow.data.cache import Split, TokenCache
from hvpflow.data.loader import to_batch
from hvpflow.errors import HvpflowError
from hvpflow.models.llama import IGNORED_TARGET
from hvpflow.runs.recipe import Recipe


def validation_subset(split: Split, length: int, num_blocks: int, seed: int) -> np.ndarray:
    """Ids of ``min(num_blocks, all)`` whole blocks, int64, ascending, drawn without replacement by ``seed``.

    Raises:
        HvpflowError: the split has no whole block.
    """
    available = split.num_blocks(length)
    if available == 0:
        raise HvpflowError(
            f"the validation split has {split.tokens} tokens, fewer than one sequence of {length + 1}: prepare a cache "
            "with a larger data.prepare_validation_tokens"
        )
    chosen = np.random.default_rng(seed).choice(available, min(num_blocks, available), replace=False)
    return np.sort(chosen)


def mean_loss(
    model: nn.Module,
    split: Split,
    block_ids: np.ndarray,
    length: int,
    *,
    batch_size: int,
    device: torch.device,
    check: Callable[[], None] = lambda: None,
) -> tuple[float, int]:
    """Mean cross-entropy per token (nats) over some blocks, and the number of their targets.

    Args:
        model: ``model(tokens, targets)`` returns the summed loss.
        split: where the blocks lie; the last one may be partial, its missing targets do not count.
        block_ids: int64 ids.
        length: inputs of a block.
        batch_size: blocks in one forward pass.
        device: where the model is.
        check: called before every forward pass; may raise to leave.
    """
    total, num_targets = 0.0, 0
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for start in range(0, len(block_ids), batch_size):
                check()
                tokens, targets = to_batch(split.read_blocks(block_ids[start : start + batch_size], length), device)
                num_targets += int((targets != IGNORED_TARGET).sum())
                total += float(model(tokens, targets))
    finally:
        model.train(training)
    return total / num_targets, num_targets


def validate(
    model: nn.Module,
    recipe: Recipe,
    cache: TokenCache,
    *,
    subset: bool,
    device: torch.device,
    check: Callable[[], None] = lambda: None,
) -> tuple[float, int]:
    """``mean_loss`` over a recipe's validation subset, or over the whole split with its partial last block."""
    split, length = cache.split("validation"), recipe.model.context_length
    block_ids = validation_subset(split, length, recipe.evaluation.subset_blocks, recipe.evaluation.seed)
    if not subset:
        block_ids = np.arange(split.num_blocks(length, partial=True))
    return mean_loss(
        model, split, block_ids, length, batch_size=recipe.evaluation.batch_size, device=device, check=check
    )


def validation_complete(cache: TokenCache) -> Any:
    """Whether the cache holds the corpus' whole validation split."""
    return cache.manifest.get("validation_complete", False)
