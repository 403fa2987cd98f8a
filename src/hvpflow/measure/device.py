"""The device a worker runs on: its choice, threads, TF32 and determinism, and the policy that records state."""

from __future__ import annotations

import os
import platform
import re
from typing import Any, Literal

import torch

from hvpflow.errors import HvpflowError, nearest
from hvpflow.measure.settings import MeasureSettings


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
        raise HvpflowError(f"device {name} was asked for, but {built}; use --device cpu, or install a CUDA build")
    device = torch.device(name)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise HvpflowError(
            f"device {name} was asked for, but there are {torch.cuda.device_count()} CUDA device(s), counted from 0; "
            "use one of them, or --device cpu"
        )
    return device


def available_cpus() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_threads(cpu_threads: int | Literal["auto"], granted: int | None = None) -> int:
    """Set PyTorch's threads and return their number.

    ``granted`` is what a scheduler gave this job, None where the job has the machine to itself (a local ``-j1``, whose
    one granted thread means nothing). Without it, ``cpu_threads`` counts; ``auto`` is every CPU of the affinity mask.
    """
    wanted: int = available_cpus() if cpu_threads == "auto" else cpu_threads
    threads = wanted if granted is None else granted
    if threads < 1:
        raise HvpflowError(f"cpu_threads is {threads}, expected auto or at least 1")
    torch.set_num_threads(threads)
    return threads


def tf32_supported(device: torch.device) -> bool:
    """Whether the device's matrix units know TF32 (compute capability 8.0 and up)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def configure(device: torch.device, settings: MeasureSettings) -> dict[str, Any]:
    """Set matrix precision and determinism for this process, and return the policy that its records state.

    On CUDA, kernels that add in random order are replaced by deterministic ones: ḡ is kept by the hash of its bits, so
    computing it again must give the same bits.
    """
    effective = settings.tf32 and settings.dtype == "float32" and tf32_supported(device)
    torch.set_float32_matmul_precision("high" if effective else "highest")
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return {
        "device": device.type,
        "device_name": _device_name(device),
        "dtype": settings.dtype,
        "tf32_requested": settings.tf32,
        "tf32_supported": tf32_supported(device),
        "tf32_effective": effective,
        "matmul_precision": "tf32" if effective else "ieee",
        "amp": settings.amp,
        "amp_dtype": "bfloat16" if settings.amp else None,
        "engine": settings.engine,
        "compiled": settings.compile_hvp and device.type == "cuda",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _device_name(device: torch.device) -> str:
    """The GPU's model, or the instruction set that a CPU's kernels are chosen by."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
