"""Learning rates: linear warm-up, then a cosine or a warm-up–stable–decay (WSD) curve. Free of torch.

Steps count from 1, and the rate of step s is used by the s-th optimiser update; with S updates in all and w of
warm-up,

    s < w:       peak · s / w
    cosine:      peak · (m + (1 − m) · ½(1 + cos π (s − w)/(S − w)))              m = min_lr_ratio
    wsd:         peak, then over the last d = decay_fraction · S updates  peak · (S − s)/d

so the last update uses the curve's end value (m · peak, or 0). Older recipes give the warm-up as a fraction of all
updates, which need not be a whole number of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hvpflow.errors import HvpflowError
from hvpflow.runs.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate of every update of a training."""

    name: Literal["cosine", "wsd"]
    peak: float
    """Largest rate, reached at the end of the warm-up."""
    num_steps: int
    """Updates in the whole training (S above)."""
    warmup_steps: float
    """Updates until the peak (w above)."""
    min_ratio: float = 0.0
    """The cosine's end value over the peak (m above)."""
    decay_fraction: float = 0.0
    """WSD: the part of all updates in which the rate falls linearly to 0."""

    def __post_init__(self) -> None:
        if self.warmup_steps >= self.num_steps and self.warmup_steps > 0:
            raise HvpflowError(
                f"the warm-up takes {self.warmup_steps:g} updates but the whole training has only {self.num_steps}: "
                "lower lr_schedule.warmup_steps or raise training.tokens_per_parameters"
            )
        if self.name == "wsd" and self.warmup_steps + self.decay_fraction * self.num_steps > self.num_steps:
            raise HvpflowError(
                f"warm-up ({self.warmup_steps:g} updates) and decay ({self.decay_fraction:g} of {self.num_steps}) "
                "overlap: lower lr_schedule.warmup_steps or lr_schedule.decay_fraction"
            )

    def rate(self, step: int) -> float:
        """Learning rate of update ``step`` (1 … num_steps)."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.name == "wsd":
            decay_steps = self.decay_fraction * self.num_steps
            return self.peak * min(1.0, (self.num_steps - step) / decay_steps) if decay_steps > 0 else self.peak
        progress = (step - self.warmup_steps) / (self.num_steps - self.warmup_steps)
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_schedule(recipe: Recipe, num_steps: int) -> Schedule:
    """The schedule a recipe asks for, of either generation, over ``num_steps`` updates."""
    peak = recipe.optimizer.lr
    section = recipe.lr_schedule
    if section is None:
        fraction = recipe.optimizer.warmup_fraction or 0.0
        ratio = recipe.optimizer.min_lr_ratio or 0.0
        return Schedule(
            name="cosine", peak=peak, num_steps=num_steps, warmup_steps=fraction * num_steps, min_ratio=ratio
        )
    if section.name == "wsd":
        return Schedule(
            name="wsd",
            peak=peak,
            num_steps=num_steps,
            warmup_steps=section.warmup_steps,
            decay_fraction=section.decay_fraction,
        )
    return Schedule(
        name="cosine",
        peak=peak,
        num_steps=num_steps,
        warmup_steps=section.warmup_steps,
        min_ratio=section.min_lr_ratio,
    )
