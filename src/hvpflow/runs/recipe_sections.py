"""The sections of a recipe (``resolved.yaml``) with their defaults and ranges; field order is the file's order.

Two generations of the format exist. Keys that only one of them has are null in the other and stay out of its file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from hvpflow.errors import HvpflowError

POLICIES_HELP = (
    "final (the last state), interval (every K epochs: checkpoint_epochs: [K]) or explicit (a list of epochs)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """Where the token cache lies, what it must hold, and how sequences are shuffled."""

    cache_dir: str = "data/c4"
    """Token cache; a relative path is looked up from the current directory, then from the run upwards."""
    dataset: str = "allenai/c4"
    """The text: a Hugging Face dataset by name, ``python-stdlib``, or a label of your own for local files."""
    revision: str = "main"
    """Revision of the dataset; main: the one found when the cache is prepared, which is then recorded."""
    tokenizer: str = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
    """``train-bpe`` (trained on the text), the path of a tokenizer.json, or a name on the Hugging Face hub."""
    tokenizer_revision: str = "main"
    """Revision of the tokenizer, as for the dataset."""
    shuffle_seed: int = 42
    """Seed of the document shuffle during preparation."""
    shuffle_buffer: int = 100000
    """Documents in the shuffle buffer during preparation."""
    shard_tokens: int = 10_000_000
    """Tokens of one file of the cache."""
    tokenize_batch_size: int = 256
    """Documents encoded at a time; no effect on the result."""
    prepare_workers: int | None = None
    """Threads that tokenise, at most (new generation); no effect on the result."""
    shuffle_group_size: int | None = None
    """Shards whose sequences are shuffled together (new generation)."""
    buffer_size_mib: float | None = None
    """Size of a range of sequences that are shuffled together (old generation)."""
    prefetch: bool = True
    """Kept for the format; no effect here."""
    prepare_train_tokens: int | None = None
    """Training tokens to prepare; null: what training and an unseen epoch need."""
    prepare_validation_tokens: int | None = None
    """Validation tokens to prepare; null: a twentieth of the training tokens, the subset at least."""

    def __post_init__(self) -> None:
        _non_negative("data", self, "shuffle_seed")
        _positive(
            "data",
            self,
            *("shuffle_buffer", "shard_tokens", "tokenize_batch_size", "prepare_workers", "shuffle_group_size"),
            *("buffer_size_mib", "prepare_train_tokens", "prepare_validation_tokens"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """AdamW; decay acts on matrices only."""

    lr: float = 2e-3
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices."""
    grad_clip: float | None = 1.0
    """Largest gradient norm; null or 0: no clipping."""
    warmup_fraction: float | None = None
    """Share of the steps spent warming up (old generation; the new one has ``lr_schedule``)."""
    min_lr_ratio: float | None = None
    """Last learning rate over ``lr`` (old generation)."""

    def __post_init__(self) -> None:
        _positive("optimizer", self, "lr", "eps")
        _non_negative("optimizer", self, "weight_decay", "grad_clip")
        _shares("optimizer", self, "warmup_fraction", "min_lr_ratio")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise HvpflowError(f"optimizer.{name} is {value}, expected 0 <= {name} < 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class CosineSchedule:
    """Linear warm-up, then half a cosine down to ``min_lr_ratio`` of the peak."""

    name: Literal["cosine"] = "cosine"
    """Half a cosine after the warm-up."""
    warmup_steps: int = 500
    """Updates of linear warm-up."""
    min_lr_ratio: float = 0.1
    """Last learning rate over the peak."""

    def __post_init__(self) -> None:
        _non_negative("lr_schedule", self, "warmup_steps")
        _shares("lr_schedule", self, "min_lr_ratio")


@dataclass(frozen=True, kw_only=True, slots=True)
class WsdSchedule:
    """Linear warm-up, a stable stretch, then decay over the last ``decay_fraction`` of the steps."""

    name: Literal["wsd"] = "wsd"
    """Warm-up, stable, decay."""
    warmup_steps: int = 500
    """Updates of linear warm-up."""
    decay_fraction: float = 0.2
    """Share of the updates in which the rate falls to 0."""

    def __post_init__(self) -> None:
        _non_negative("lr_schedule", self, "warmup_steps")
        _shares("lr_schedule", self, "decay_fraction")


SCHEDULES: dict[str, type[CosineSchedule] | type[WsdSchedule]] = {"cosine": CosineSchedule, "wsd": WsdSchedule}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    """How long to train, in which batches, and what to keep."""

    tokens_per_parameters: float = 20.0
    """Training tokens over parameters of one model."""
    epoch_tokens_per_parameters: float = 0.5
    """Tokens of an epoch over parameters; must divide the former."""
    batch_tokens: int = 32768
    """Tokens of one optimiser step over all workers."""
    micro_batch_size: int = 32
    """Sequences of one forward and backward pass."""
    checkpoint_policy: Literal["none", "final", "interval", "explicit"] = "final"
    """What is kept: nothing, the last state, and by interval or explicit epochs besides."""
    checkpoint_epochs: tuple[int, ...] = (1,)
    """interval: [K], every K-th epoch; explicit: the epochs."""
    save_epoch_training_state: bool = True
    """Keep ``epoch-NNN.pt`` beside each ``epoch-NNN.safetensors``."""
    log_every: int = 10
    """Updates between two rows of metrics.jsonl."""

    def __post_init__(self) -> None:
        _positive(
            "training",
            self,
            *("tokens_per_parameters", "epoch_tokens_per_parameters", "batch_tokens", "micro_batch_size", "log_every"),
        )
        epochs = self.checkpoint_epochs
        if any(epoch < 1 for epoch in epochs) or len(set(epochs)) != len(epochs):
            raise HvpflowError(f"training.checkpoint_epochs is {list(epochs)}, expected distinct epochs from 1 on")
        if self.checkpoint_policy == "interval" and len(epochs) != 1:
            raise HvpflowError(
                f"training.checkpoint_epochs is {list(epochs)}: policy interval takes one number, as in [4] for every "
                "fourth epoch; for a list of epochs use checkpoint_policy: explicit"
            )
        if self.checkpoint_policy == "explicit" and not epochs:
            raise HvpflowError("training.checkpoint_epochs is empty: policy explicit needs the epochs to keep")

    @property
    def num_epochs(self) -> int:
        """The quotient of the two token ratios (whole: the recipe's sampling checks it)."""
        # A float's shortest text is the decimal that the user wrote; the binary values' quotient need not be whole.
        return int(Fraction(repr(self.tokens_per_parameters)) / Fraction(repr(self.epoch_tokens_per_parameters)))


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """Validation: a fixed subset after each epoch, the full split at the end."""

    subset_blocks: int = 512
    """Sequences of the subset."""
    batch_size: int = 32
    """Sequences of one forward pass."""
    seed: int = 12345
    """Seed of the subset."""

    def __post_init__(self) -> None:
        _positive("evaluation", self, "subset_blocks", "batch_size")
        _seed("evaluation", self, "seed")


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeSettings:
    """Machine-side settings; only ``seed`` influences which data are read in which order."""

    seed: int = 42
    """Seed of the initial weights and of the order of sequences."""
    deterministic: bool = False
    """Ask torch for deterministic algorithms."""
    device: str = "cuda:0"
    """cpu, cuda, cuda:N, or auto (a GPU where there is one)."""
    amp: bool = True
    """bfloat16 matrix products on CUDA, float32 parameters."""
    compile: bool = False
    """Compile the model with torch.compile."""
    compile_mode: str = "default"
    """Mode of torch.compile."""
    sdpa_backend: str = "auto"
    """Kernel of attention; auto: the fastest."""
    fused_optimizer: bool = True
    """One kernel for the optimiser, on CUDA."""
    attention_backend: str = "sdpa"
    """Kept for the format; sdpa is the only one."""
    output_dir: str = "runs/default"
    """Run directory."""
    cpu_threads: int | Literal["auto"] = 8
    """Kept for the format; here analysis.cpu_threads and --threads decide."""

    def __post_init__(self) -> None:
        _seed("runtime", self, "seed")
        if not re.fullmatch(r"cpu|auto|cuda(:\d+)?", self.device):
            raise HvpflowError(f"runtime.device is {self.device!r}, expected cpu, cuda, cuda:N or auto")
        if self.cpu_threads != "auto":
            _positive("runtime", self, "cpu_threads")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveConsensus:
    """Mixing with γW + (1−γ)I, γ = (lr / largest lr)^p, after the share ``start_frac`` of the updates."""

    p: float = 1.0
    """Exponent of γ."""
    start_frac: float = 0.0
    """Share of the updates after which γ applies."""

    def __post_init__(self) -> None:
        _non_negative("decentralized.adaptive_consensus", self, "p")
        _shares("decentralized.adaptive_consensus", self, "start_frac")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecentralizedSettings:
    """Several models trained together and mixed over a topology (a packed run)."""

    num_models: int
    """Workers."""
    topology: Literal["complete", "one_peer_ring", "one_peer_exponential"] = "one_peer_exponential"
    """Who mixes with whom."""
    scheme: Literal["awc", "atc"] = "awc"
    """awc: mix parameters, then the local step; atc: step, then mix."""
    adaptive_consensus: AdaptiveConsensus | None = None
    """Mixing that fades with the learning rate; null: full mixing."""

    def __post_init__(self) -> None:
        if self.num_models < 2:
            raise HvpflowError(
                f"decentralized.num_models is {self.num_models}, expected 2 or more; for a single model write "
                "decentralized: null"
            )


def _positive(section: str, settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise HvpflowError(f"{section}.{name} is {value}, expected a positive number")


def _non_negative(section: str, settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value >= 0:
            raise HvpflowError(f"{section}.{name} is {value}, expected 0 or more")


def _shares(section: str, settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 <= value <= 1:
            raise HvpflowError(f"{section}.{name} is {value}, expected a share from 0 to 1")


def _seed(section: str, settings: object, name: str) -> None:
    value = getattr(settings, name)
    if not 0 <= value < 2**32:
        raise HvpflowError(f"{section}.{name} is {value}, expected a seed from 0 to {2**32 - 1}")
