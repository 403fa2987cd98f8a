"""Rademacher directions: ±1 with equal probability, drawn on the CPU whatever the device, so that all devices agree."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from hvpflow.errors import HvpflowError
from hvpflow.measure.vectors import Vector

_STREAM = 3
_PROBE = 1024


def rademacher(shapes: Mapping[str, tuple[int, ...]], *, seed: int, index: int, dtype: torch.dtype) -> Vector:
    """Random direction ``index`` on the CPU: entries −1 and +1 in ``dtype``, in the order of ``shapes``.

    The signs are the lowest bits of successive outputs of an MT19937 seeded by SeedSequence([seed, 3, index]), running
    on from one parameter to the next; 0 gives −1.
    """
    generator = torch.Generator(device="cpu").manual_seed(_stream_seed(seed, index))
    return {
        name: torch.randint(0, 2, shape, generator=generator, dtype=torch.int8).to(dtype).mul_(2).sub_(1)
        for name, shape in shapes.items()
    }


def check_rademacher_stream() -> None:
    """Raise HvpflowError if PyTorch's generator no longer gives the MT19937 bits that directions are defined by."""
    drawn = rademacher({"probe": (_PROBE,)}, seed=42, index=0, dtype=torch.float64)["probe"].numpy()
    bits = np.random.RandomState(_stream_seed(42, 0)).randint(0, 2**32, _PROBE, dtype=np.uint32) & 1
    if not np.array_equal(drawn, bits.astype(np.float64) * 2 - 1):
        raise HvpflowError(
            f"PyTorch {torch.__version__} draws other random bits than the releases that hvpflow was tested with; "
            "install one of those, since random directions would not be comparable"
        )


def _stream_seed(seed: int, index: int) -> int:
    return int(np.random.SeedSequence([seed, _STREAM, index]).generate_state(1)[0])
