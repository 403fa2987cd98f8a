"""How packed workers mix their parameters: whom with whom, and how much.

An update number t (from 0) has a doubly stochastic matrix M_t of a topology:

    complete              every worker takes the mean of all
    one_peer_ring         pairs (0,1), (2,3), … at even t and (1,2), …, (W−1,0) at odd t, each taking the pair's mean
    one_peer_exponential  worker i takes the mean of itself and i XOR 2^(t mod log₂W); M over log₂W updates is complete

With adaptive consensus the workers are mixed by γ M_t + (1 − γ) I instead, γ = (rate / largest rate)^p from the share
``start_frac`` of the updates on, and γ = 1 before. Runs of the older format took i − 2^(t mod ⌈log₂W⌉) (mod W) as the
exponential peer, which is not mutual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hvpflow.errors import HvpflowError
from hvpflow.runs.recipe import Recipe


def peers(topology: str, num_workers: int, step: int, *, mutual: bool = True) -> list[int] | None:
    """The one worker that each worker mixes with at update ``step`` (from 0); None if all mix with all.

    Raises:
        HvpflowError: the topology is not defined for this number of workers.
    """
    workers = range(num_workers)
    if topology == "complete":
        return None
    if topology == "one_peer_ring":
        if num_workers % 2:
            raise HvpflowError(f"topology one_peer_ring needs an even number of workers, not {num_workers}")
        forward = [1 if (worker + step) % 2 == 0 else -1 for worker in workers]
        return [(worker + shift) % num_workers for worker, shift in zip(workers, forward)]
    if topology == "one_peer_exponential":
        distance = 1 << (step % (num_workers - 1).bit_length())
        if not mutual:
            return [(worker - distance) % num_workers for worker in workers]
        if num_workers & (num_workers - 1):
            raise HvpflowError(f"topology one_peer_exponential needs a power of two workers, not {num_workers}")
        return [worker ^ distance for worker in workers]
    raise HvpflowError(f"unknown topology {topology!r}")


def consensus_weight(recipe: Recipe, rate: float, step: int, num_steps: int) -> float:
    """γ of update ``step`` (from 0) of ``num_steps`` at learning rate ``rate``."""
    assert recipe.decentralized is not None
    adaptive = recipe.decentralized.adaptive_consensus
    if adaptive is None or step < adaptive.start_frac * num_steps:
        return 1.0
    return (rate / recipe.optimizer.lr) ** adaptive.p


def mix_(arena: Tensor, partners: list[int] | None, weight: float = 1.0) -> None:
    """Mix the rows of ``arena`` [W, S] in place with γ = ``weight``; ``partners`` as ``peers`` returns them."""
    if partners is None:
        arena.lerp_(arena.mean(0, keepdim=True).expand_as(arena), weight)
        return
    others = arena[torch.tensor(partners, device=arena.device)]
    if weight == 1.0:
        # Symmetric in the two, so that a pair's rows become equal to the bit.
        arena.add_(others).mul_(0.5)
    else:
        arena.lerp_(others, 0.5 * weight)
