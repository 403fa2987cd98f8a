"""How a worker computes on its device: TF32 and determinism, and the policy that records state."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from hvpflow.measure.settings import MeasureSettings


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


def memory_bytes(device: torch.device) -> int:
    """The memory of a GPU; of a CPU the machine's, or less where a control group limits this process (Linux)."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="ascii").strip().rpartition("::/")[2]
        for group in (Path(own), *Path(own).parents):
            limit = "/sys/fs/cgroup" / group / "memory.max"
            if limit.is_file() and (text := limit.read_text(encoding="ascii").strip()).isdigit():
                limits.append(int(text))
    except OSError:  # another system, or another kind of control groups
        pass
    return min(limits)


def _device_name(device: torch.device) -> str:
    """The GPU's model, or the instruction set that a CPU's kernels are chosen by."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
