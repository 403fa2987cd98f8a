"""What decides the numbers of a measurement. Torch-free: the planner reads it in every workflow job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hvpflow.errors import HvpflowError

MEASUREMENT_VERSION = 2
"""Raised whenever a change of the code changes numbers: finished work of another version is never reused."""

DEFAULT_DIRECTIONS_PER_PASS = 16
MAX_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSettings:
    """The numerical part of an analysis; the same for every checkpoint and both data cases."""

    noise_samples: int | Literal["all"] = 32
    """Effective batches whose gradient noise is measured, drawn without replacement; ``all``: every one."""
    random_samples: int = 32
    """Rademacher directions."""
    seed: int = 42
    """Seed of the choice of batches and of the random directions, 0 to 2³²−1."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of parameters, gradients and directions. Norms and sums are always float64."""
    tf32: bool = True
    """Let CUDA matrix products of float32 run in TF32, where the device can."""
    amp: bool = False
    """Run the model's matrix products in bfloat16, with float32 parameters."""
    hvp_batch_size: int | None = None
    """Sequences in one curvature batch; null: the training microbatch."""
    engine: Literal["taylor", "jvp-of-grad"] = "taylor"
    """``taylor``: the fast one; ``jvp-of-grad``: the slower exact one, for models without rules."""
    compile_hvp: bool = True
    """Compile the engine's rules on CUDA; a CPU always runs them as they are."""
    directions_per_pass: int | Literal["auto"] = "auto"
    """Directions that share one pass over the epoch; more need more memory. ``auto``: 16, or what memory holds."""
    consensus: bool = True
    """Measure the workers' consensus errors where a run has several workers."""

    def __post_init__(self) -> None:
        if self.noise_samples != "all":
            _at_least_one("noise_samples", self.noise_samples, "a number of batches, or all")
        _at_least_one("random_samples", self.random_samples, "a number of directions")
        if not 0 <= self.seed <= MAX_SEED:
            raise HvpflowError(f"seed is {self.seed}, expected 0 to {MAX_SEED}")
        if self.hvp_batch_size is not None:
            _at_least_one("hvp_batch_size", self.hvp_batch_size, "a number of sequences, or null")
        if self.directions_per_pass != "auto":
            _at_least_one("directions_per_pass", self.directions_per_pass, "a number of directions, or auto")
        if self.amp and self.dtype == "float64":
            raise HvpflowError(
                "amp is on with dtype float64; bfloat16 products need float32 parameters: turn amp off, or use float32"
            )

    def numerical_identity(self) -> dict[str, Any]:
        """The settings that change a direction's numbers: not which directions, nor how many share a pass."""
        return {
            "dtype": self.dtype,
            "tf32": self.tf32 and self.dtype == "float32",
            "amp": self.amp,
            "hvp_batch_size": self.hvp_batch_size,
            "engine": self.engine,
            "compile_hvp": self.compile_hvp,
        }

    def selection_identity(self) -> dict[str, Any]:
        """The settings that decide which directions are measured."""
        return {
            "noise_samples": self.noise_samples,
            "random_samples": self.random_samples,
            "seed": self.seed,
            "consensus": self.consensus,
        }


def _at_least_one(name: str, value: Any, expected: str) -> None:
    if value < 1:
        raise HvpflowError(f"{name} is {value}, expected at least 1 ({expected})")
