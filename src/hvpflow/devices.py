"""The device that torch computes on, by name."""

from __future__ import annotations

import re

import torch

from hvpflow.errors import HvpflowError, nearest


def choose_device(wanted: str | torch.device | None = None) -> torch.device:
    """The device for ``auto`` or None (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        HvpflowError: another name, or CUDA asked for where there is none.
    """
    name = "auto" if wanted is None else str(wanted)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        hint = nearest(name, ("auto", "cpu", "cuda"))
        raise HvpflowError(f"device is {name!r}, expected auto, cpu, cuda or cuda:N{hint}")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch finds no CUDA device"
        raise HvpflowError(
            f"device {name} was asked for, but {built}; use --device cpu (runtime.device: cpu in a recipe)"
        )
    device = torch.device(name)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise HvpflowError(
            f"device {name} was asked for, but there are {torch.cuda.device_count()} CUDA device(s), counted from 0; "
            "use one of them, or --device cpu (runtime.device: cpu in a recipe)"
        )
    return device
