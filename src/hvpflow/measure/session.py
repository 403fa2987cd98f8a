"""The model of one checkpoint on a device, its engine, and the check of the one against a slower other.

Built only when there is something to compute: a shard whose directions are all in the store needs no model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hvpflow.curvature.quadratic import Engine, TaylorEngine, make_engine
from hvpflow.curvature.reference import jvp_of_grad
from hvpflow.data.cache import TokenCache
from hvpflow.errors import HvpflowError
from hvpflow.measure.batches import EpochReader
from hvpflow.measure.device import memory_bytes
from hvpflow.measure.random import rademacher
from hvpflow.measure.settings import DEFAULT_DIRECTIONS_PER_PASS, MeasureSettings
from hvpflow.measure.vectors import trainable, zeros_like
from hvpflow.models.llama import Llama
from hvpflow.runs.checkpoints import Checkpoint
from hvpflow.runs.recipe import Recipe

_CHECK_SEQUENCES = 2
_CHECK_DIRECTIONS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """What all passes of a shard have in common."""

    recipe: Recipe
    checkpoint: Checkpoint
    settings: MeasureSettings
    reader: EpochReader
    policy: dict[str, Any]
    label: str
    cache: TokenCache

    @property
    def dtype(self) -> torch.dtype:
        """Precision of parameters and directions."""
        return torch.float64 if self.settings.dtype == "float64" else torch.float32

    @property
    def micro_batch_size(self) -> int:
        """Sequences of one gradient computation."""
        return self.recipe.training.micro_batch_size

    @property
    def hvp_batch_size(self) -> int:
        """Sequences of one curvature batch, at most the epoch's."""
        wanted = self.settings.hvp_batch_size or self.micro_batch_size
        return min(wanted, len(self.reader.epoch.block_ids))

    @functools.cached_property
    def model(self) -> nn.Module:
        """The checkpoint's model in evaluation mode. Whoever asks is about to compute, so the text is verified here."""
        self.cache.verify()
        model = Llama(self.recipe.model)
        model.load_state_dict(self.checkpoint.weights, strict=True)
        model.to(device=self.reader.device, dtype=self.dtype).eval()
        dimension = sum(parameter.numel() for parameter in trainable(model).values())
        assert dimension == self.recipe.num_parameters, (dimension, self.recipe.num_parameters)
        return model

    @functools.cached_property
    def engine(self) -> Engine:
        """The curvature engine, built for curvature batches of this session."""
        example = self.reader.read_padded(self.reader.epoch.block_ids[: self.hvp_batch_size], self.hvp_batch_size)
        return make_engine(
            self.model,
            example,
            kind=self.settings.engine,
            amp=self.settings.amp,
            compile_rules=self.policy["compiled"],
        )

    @functools.cached_property
    def directions_per_pass(self) -> int:
        """Directions of one pass: as set, or the usual number, fewer where the device's memory would not hold them.

        The device's whole memory counts, not what is free just now, so that a repeated run makes the same choice.
        """
        wanted = self.settings.directions_per_pass
        if wanted != "auto":
            return wanted
        weights = sum(parameter.numel() * parameter.element_size() for parameter in trainable(self.model).values())
        share = 1.0 if self.reader.device.type == "cuda" else 0.5  # others live in the machine's memory, too
        beside = int(share * memory_bytes(self.reader.device)) - 2 * weights  # the model's and the mean gradient
        if isinstance(self.engine, TaylorEngine):
            fitting = self.engine.directions_within(beside)
        else:  # it takes one at a time, and only holds the others
            fitting = max(1, beside // (2 * weights))
        return min(DEFAULT_DIRECTIONS_PER_PASS, fitting)

    def check_engine(self) -> dict[str, Any]:
        """Compare the engine with the derivative of the gradient on a few sequences of the epoch.

        Raises:
            HvpflowError: they differ by more than rounding explains.
        """
        block_ids = self.reader.epoch.block_ids[:_CHECK_SEQUENCES]
        tokens, targets = self.reader.read(block_ids)
        parameters = trainable(self.model)
        directions = zeros_like(parameters, _CHECK_DIRECTIONS)
        for index in range(_CHECK_DIRECTIONS):
            drawn = rademacher(self.shapes, seed=self.settings.seed, index=index, dtype=self.dtype)
            for name, tensor in drawn.items():
                directions[name][index].copy_(tensor)
        # Filled up to the shape of all other batches, so that what is checked is what will run.
        found = self.engine(*self.reader.read_padded(block_ids, self.hvp_batch_size), directions)
        expected = jvp_of_grad(self.model, tokens, targets, directions)
        difference = found.difference(expected)
        tolerance = self._check_tolerance()
        if not difference <= tolerance:
            raise HvpflowError(
                f"{self.label}: engine {self.settings.engine} differs from the derivative of the gradient by "
                f"{difference:.1e} relative on {len(tokens)} sequences, more than {tolerance:.0e}; measure with "
                "engine jvp-of-grad, and please report this"
            )
        return {
            "engine": self.settings.engine,
            "reference": "jvp-of-grad",
            "sequences": len(tokens),
            "directions": _CHECK_DIRECTIONS,
            "relative_difference": difference,
            "tolerance": tolerance,
        }

    @property
    def machine(self) -> dict[str, Any]:
        """What a rounding error may depend on besides the settings."""
        return {key: self.policy[key] for key in ("device", "device_name", "threads", "torch")}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter shapes in parameter order, the order in which random signs are drawn."""
        return {name: tuple(parameter.shape) for name, parameter in trainable(self.model).items()}

    @contextlib.contextmanager
    def explain_memory(self, num_directions: int) -> Iterator[None]:
        """Turn a failed allocation into advice."""
        try:
            yield
        except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU's allocator raises a plain one
            if not any(sign in str(error).lower() for sign in ("out of memory", "can't allocate memory")):
                raise
            lower = f"hvp_batch_size to {max(self.hvp_batch_size // 2, 1)}"
            if num_directions > 1:
                lower += f", or directions_per_pass to {num_directions // 2}"
            raise HvpflowError(
                f"{self.label}: out of memory with hvp_batch_size {self.hvp_batch_size} and {num_directions} "
                f"direction(s) a pass; lower {lower} (gradients go by the recipe's "
                f"microbatch, {self.micro_batch_size})"
            ) from error

    def _check_tolerance(self) -> float:
        if self.settings.amp:
            return 0.2
        if self.policy["tf32_effective"]:
            return 2e-2
        return 1e-9 if self.settings.dtype == "float64" else 1e-3
