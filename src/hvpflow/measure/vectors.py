"""Vectors of parameter space, kept as one tensor a parameter. Norms are float64 sums of float64 products."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from hvpflow.files import write_bytes

Vector = dict[str, Tensor]
"""Parameter name -> tensor of its shape."""


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The unique trainable parameters in module order; a tied tensor counts once, under its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def zeros_like(parameters: Mapping[str, Tensor], num_directions: int | None = None) -> Vector:
    """A zero vector with the parameters' shapes, dtype and device; or a stack of them, [K, *shape]."""
    lead = () if num_directions is None else (num_directions,)
    return {name: torch.zeros((*lead, *p.shape), dtype=p.dtype, device=p.device) for name, p in parameters.items()}


def member(stack: Vector, position: int) -> Vector:
    """View of one member of a stack [K, *shape]."""
    return {name: tensor[position] for name, tensor in stack.items()}


def squared_norm(vector: Mapping[str, Tensor]) -> float:
    """‖v‖² = Σ v² over all elements."""
    return math.fsum(float(tensor.detach().double().square().sum()) for tensor in vector.values())


def vector_hash(vector: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bits, in name order."""
    digest = hashlib.sha256()
    for name in sorted(vector):
        tensor = vector[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_vector(path: Path, vector: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write ``vector`` as safetensors, atomically, with its hash among the metadata."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in vector.items()}
    write_bytes(path, safetensors.torch.save(tensors, {**metadata, "sha256": vector_hash(tensors)}))


def load_vector(path: Path, like: Mapping[str, Tensor]) -> tuple[Vector, dict[str, str]] | None:
    """Read what ``save_vector`` wrote, with names, shapes, dtype and device of ``like``.

    None where there is no such file; ValueError where the file is damaged or of another shape.
    """
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        raise ValueError(f"cannot read {path.name}: {error}") from error
    if metadata.get("sha256") != vector_hash(tensors):
        raise ValueError(f"the checksum of {path.name} is wrong")
    described = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    if described != {name: (tensor.shape, tensor.dtype) for name, tensor in like.items()}:
        raise ValueError(f"{path.name} holds other tensors")
    return {name: tensors[name].to(like[name].device) for name in like}, metadata
