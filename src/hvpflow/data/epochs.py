"""Epochs as data: how long they are, which sequences the seen and the unseen one hold, which batches are sampled.

Everything here is exact integer and rational arithmetic on a few settings, so that a plan and the work agree.
Reads token counts only, never a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

import numpy as np

from hvpflow.data.cache import Split, TokenCache
from hvpflow.data.order import derived_seed, group_order, random_stream, range_order, shard_offsets_from
from hvpflow.errors import HvpflowError, nearest

Case = Literal["seen", "unseen"]
_UNSEEN = 2
_NOISE_CHOICE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """All that the order of sequences depends on, besides the cache itself."""

    context_length: int
    """T: inputs in a sequence (block)."""
    batch_tokens: int
    """Tokens of one effective training batch, over all workers."""
    microbatch_size: int
    """Sequences in one gradient computation."""
    num_workers: int = 1
    """Packed models trained side by side; 1 for an ordinary run."""
    num_parameters: int
    """Parameters of a single model, also for packed runs."""
    tokens_per_parameters: float
    epoch_tokens_per_parameters: float
    seed: int
    loader_version: Literal[1, 2]
    buffer_size_mib: float | None = None
    """Loader version 1: capacity of a shuffle range, at two bytes a token."""
    shuffle_group_size: int | None = None
    """Loader version 2: shards in a shuffle group."""

    def __post_init__(self) -> None:
        for name in ("context_length", "batch_tokens", "microbatch_size", "num_workers", "num_parameters"):
            if getattr(self, name) < 1:
                raise HvpflowError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.seed < 0:
            raise HvpflowError(f"the seed is {self.seed}, expected at least 0")
        if self.batch_tokens % self.context_length:
            raise HvpflowError(
                f"training.batch_tokens is {self.batch_tokens}, expected a multiple of model.context_length, "
                f"{self.context_length}"
            )
        if self.num_workers > 1 and self.batch_blocks != self.num_workers * self.microbatch_size:
            raise HvpflowError(
                f"training.batch_tokens holds {self.batch_blocks} sequences, but packed workers take "
                f"{self.num_workers} x {self.microbatch_size} (num_models x micro_batch_size) without accumulation"
            )
        if self.microbatch_size > self.batch_blocks:
            raise HvpflowError(
                f"training.micro_batch_size is {self.microbatch_size}, more than the {self.batch_blocks} sequences "
                "of a batch (training.batch_tokens / model.context_length)"
            )
        if self.loader_version == 1 and self.range_blocks < 1:
            raise HvpflowError(
                f"data.buffer_size_mib is {self.buffer_size_mib}, too little for one sequence of "
                f"{self.context_length} tokens"
            )
        if self.loader_version == 2 and (self.shuffle_group_size is None or self.shuffle_group_size < 1):
            raise HvpflowError(f"data.shuffle_group_size is {self.shuffle_group_size}, expected at least 1")
        self.boundaries()

    @property
    def batch_blocks(self) -> int:
        """Sequences of one effective batch."""
        return self.batch_tokens // self.context_length

    @property
    def range_blocks(self) -> int:
        """Loader version 1: blocks in a shuffle range."""
        if self.buffer_size_mib is None:
            return 0
        return int(self.buffer_size_mib * 2**20) // (2 * self.context_length)

    def boundaries(self) -> tuple[int, ...]:
        """Blocks read by the end of epoch k = 1 … K: floor(k E + 1/2) batches, E = nominal epoch tokens / batch tokens.

        The floats are taken as the decimal numbers they print as, and the arithmetic is rational.

        Raises:
            HvpflowError: the epochs do not fit the budget a whole number of times, or one is shorter than a batch.
        """
        epoch, budget = Fraction(repr(self.epoch_tokens_per_parameters)), Fraction(repr(self.tokens_per_parameters))
        if epoch <= 0 or budget <= 0 or (budget / epoch).denominator != 1:
            raise HvpflowError(
                f"training.tokens_per_parameters ({self.tokens_per_parameters}) must be a whole multiple of "
                f"training.epoch_tokens_per_parameters ({self.epoch_tokens_per_parameters}), both above 0"
            )
        batches = epoch * self.num_parameters / self.batch_tokens
        ends = [0]
        for number in range(1, int(budget / epoch) + 1):
            ends.append(int(number * batches + Fraction(1, 2)))
            if ends[-1] == ends[-2]:
                raise HvpflowError(
                    f"epoch {number} is shorter than a batch: {float(epoch * self.num_parameters):g} tokens an epoch, "
                    f"{self.batch_tokens} a batch; raise training.epoch_tokens_per_parameters or lower "
                    "training.batch_tokens"
                )
        return tuple(end * self.batch_blocks for end in ends[1:])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Epoch:
    """One data case of an analysis: a full epoch of sequences in a fixed order, cut into effective batches."""

    case: Case
    block_ids: np.ndarray
    """int64 [blocks], ids in the cache's train split, in reading order."""
    batch_blocks: int
    num_workers: int
    context_length: int
    identity: dict[str, Any]
    """Plain data that determine the sequences and their order: the case's entry in an analysis manifest."""

    @property
    def num_tokens(self) -> int:
        """Targets of the epoch: the normaliser of its mean loss."""
        return len(self.block_ids) * self.context_length

    @property
    def num_noise_samples(self) -> int:
        """Batch gradients that the epoch holds: one for each worker of each effective batch."""
        return len(self.block_ids) // self.batch_blocks * self.num_workers

    def sample_blocks(self, sample_index: int) -> np.ndarray:
        """Block ids, int64 [batch_blocks / num_workers], of sample ``batch * num_workers + worker``."""
        batch, worker = divmod(self._checked(sample_index), self.num_workers)
        rows = self.block_ids[batch * self.batch_blocks : (batch + 1) * self.batch_blocks]
        return rows[worker :: self.num_workers]

    def sample_batch(self, sample_index: int) -> dict[str, int]:
        """Where a sample lies: ``cursor`` and size (``blocks``) of its effective batch, ``worker`` of ``workers``."""
        batch, worker = divmod(self._checked(sample_index), self.num_workers)
        return {
            "cursor": batch * self.batch_blocks,
            "blocks": self.batch_blocks,
            "worker": worker,
            "workers": self.num_workers,
        }

    def _checked(self, sample_index: int) -> int:
        if not 0 <= sample_index < self.num_noise_samples:
            raise ValueError(f"sample {sample_index} is not among the epoch's {self.num_noise_samples}")
        return sample_index


def training_stream(sampling: Sampling, split: Split) -> np.ndarray:
    """Block ids, int64 [boundaries[-1]], in the order in which training reads them.

    Raises:
        HvpflowError: the split is too small.
    """
    return _training_stream(sampling, split)[0]


def analysis_epoch(sampling: Sampling, cache: TokenCache, case: Case) -> Epoch:
    """The full epoch that case ``seen`` or ``unseen`` measures on.

    ``seen`` is the training's first epoch. ``unseen`` has as many sequences from the text behind all that training
    may read, in an order of its own.

    Raises:
        HvpflowError: an unknown case, or a cache too small for it, with the numbers and the command that mends it.
    """
    if case not in get_args(Case):
        raise HvpflowError(f"unknown data case {case!r}{nearest(str(case), get_args(Case))}; known: seen, unseen")
    split = cache.split("train")
    boundaries = sampling.boundaries()
    if case == "seen":
        seed, start, budget = sampling.seed, 0, boundaries[-1]
        block_ids = training_stream(sampling, split)[: boundaries[0]]
    else:
        seed, budget = derived_seed(sampling.seed, _UNSEEN), boundaries[0]
        block_ids, start = _unseen_stream(sampling, split, seed)
    loader: dict[str, Any] = {
        "version": sampling.loader_version,
        "cache_identity": cache.identity,
        "split": "train",
        "length": sampling.context_length,
        "blocks": budget,
    }
    if sampling.loader_version == 1:
        loader["buffer_blocks"] = sampling.range_blocks
    else:
        loader["shuffle_group_size"] = sampling.shuffle_group_size
    loader["seed"] = seed
    blocks = len(block_ids)
    identity = {
        "case": case,
        "loader": loader,
        "physical_start_block": start,
        "blocks": blocks,
        "tokens": blocks * sampling.context_length,
        "available_noise_batches": blocks // sampling.batch_blocks * sampling.num_workers,
        "configured_total_epochs": len(boundaries),
    }
    return Epoch(
        case=case,
        block_ids=block_ids,
        batch_blocks=sampling.batch_blocks,
        num_workers=sampling.num_workers,
        context_length=sampling.context_length,
        identity=identity,
    )


def required_train_tokens(sampling: Sampling, shard_tokens: int) -> int:
    """Tokens that a train split needs for the whole training and an unseen epoch behind it, with whole shuffle groups.

    Args:
        sampling: of the run.
        shard_tokens: tokens in every shard but the last.
    """
    length = sampling.context_length
    boundaries = sampling.boundaries()
    if sampling.loader_version == 1:
        return (boundaries[-1] + boundaries[0]) * length + 1
    start_token = _group_training_end(sampling, shard_tokens) * length
    # Shard ends behind start_token, seen from there: the groups of the unseen epoch end at every group_size-th.
    first_shard_end = start_token // shard_tokens + 1
    group_size = _group_size(sampling)
    shards_needed = (start_token + (boundaries[0] - 1) * length) // shard_tokens + 1 - (first_shard_end - 1)
    last_shard_end = first_shard_end - 1 + -(-shards_needed // group_size) * group_size
    end = last_shard_end * shard_tokens - start_token
    return start_token + -(-end // length) * length + 1


def required_training_tokens(sampling: Sampling, shard_tokens: int) -> int:
    """Tokens that a train split needs for the training alone."""
    if sampling.loader_version == 1:
        return sampling.boundaries()[-1] * sampling.context_length + 1
    return _group_training_end(sampling, shard_tokens) * sampling.context_length + 1


def choose_noise_samples(population: int, count: int | Literal["all"], seed: int) -> np.ndarray:
    """Indices of ``min(count, population)`` of an epoch's samples, int64, ascending, drawn without replacement.

    Raises:
        HvpflowError: a count below 1.
    """
    if count == "all":
        return np.arange(population)
    if count < 1:
        raise HvpflowError(f"the number of noise samples is {count}, expected at least 1 or 'all'")
    chosen = random_stream(seed, _NOISE_CHOICE).choice(population, min(count, population), replace=False)
    return np.sort(chosen)


def check_random_streams() -> None:
    """Compare NumPy's streams with recorded vectors: NumPy does not promise them for ever.

    Raises:
        HvpflowError: this NumPy would choose other sequences or batches than earlier ones.
    """
    observed = (
        derived_seed(42, _UNSEEN),
        random_stream(42, 1, 0).permutation(12).tolist(),
        random_stream(42, 1, 1).permutation(100_000)[:5].tolist(),
        # choice() has three algorithms, by the size of the population and of the sample.
        random_stream(42, _NOISE_CHOICE).choice(25, 8, replace=False).tolist(),
        random_stream(42, _NOISE_CHOICE).choice(20_000, 6, replace=False).tolist(),
        random_stream(42, _NOISE_CHOICE).choice(20_000, 500, replace=False)[:6].tolist(),
    )
    if observed != _GOLDEN:
        raise HvpflowError(
            f"NumPy {np.__version__} draws other random numbers than the versions that this program was made with, so "
            "results would not be comparable; install another NumPy (known to agree: 2.0 to 2.4)"
        )


_GOLDEN = (
    955475868,
    [0, 7, 4, 9, 8, 3, 1, 2, 10, 6, 5, 11],
    [76308, 64332, 7041, 14698, 75586],
    [17, 5, 19, 22, 18, 14, 7, 0],
    [14959, 18279, 19737, 5238, 7995, 15882],
    [9488, 13049, 10172, 18181, 10189, 7099],
)


def _group_size(sampling: Sampling) -> int:
    assert sampling.shuffle_group_size is not None
    return sampling.shuffle_group_size


def _group_training_end(sampling: Sampling, shard_tokens: int) -> int:
    """Block at which the shuffle group ends that holds the last block of the training budget."""
    length, group_tokens = sampling.context_length, _group_size(sampling) * shard_tokens
    end = ((sampling.boundaries()[-1] - 1) * length // group_tokens + 1) * group_tokens
    return -(-end // length)


def _training_stream(sampling: Sampling, split: Split) -> tuple[np.ndarray, int]:
    """The training's block ids and the first block behind the text that it may read."""
    budget, length = sampling.boundaries()[-1], sampling.context_length
    if sampling.loader_version == 1:
        if split.num_blocks(length) < budget:
            raise _too_small(sampling, split, "the training", required_training_tokens)
        return range_order(budget, sampling.range_blocks, sampling.seed), budget
    found = group_order(split.shard_offsets, _group_size(sampling), length, budget, sampling.seed)
    if found is None:
        raise _too_small(sampling, split, "the training in complete shuffle groups", required_training_tokens)
    return found


def _unseen_stream(sampling: Sampling, split: Split, seed: int) -> tuple[np.ndarray, int]:
    """The unseen epoch's block ids and its first physical block."""
    blocks, length = sampling.boundaries()[0], sampling.context_length
    _, start = _training_stream(sampling, split)
    if sampling.loader_version == 1:
        if split.num_blocks(length) < start + blocks:
            raise _too_small(sampling, split, "the unseen epoch", required_train_tokens)
        return start + range_order(blocks, sampling.range_blocks, seed), start
    offsets = shard_offsets_from(split.shard_offsets, start * length)
    found = group_order(offsets, _group_size(sampling), length, blocks, seed)
    if found is None:
        raise _too_small(sampling, split, "the unseen epoch in complete shuffle groups", required_train_tokens)
    return start + found[0], start


def _too_small(sampling: Sampling, split: Split, purpose: str, required: Any) -> HvpflowError:
    directory = split.files[0].parent if split.files else "without training text"
    shard_tokens = split.shard_tokens or sampling.context_length
    everything = required_train_tokens(sampling, shard_tokens)
    return HvpflowError(
        f"token cache {directory} is too small for {purpose}: {required(sampling, shard_tokens)} training tokens are "
        f"needed, {split.tokens} are present; prepare a larger cache with `hvpflow prepare --config RECIPE.yaml "
        f"--set data.prepare_train_tokens={everything}`"
    )
