"""Weights in ``.safetensors`` files: float32 tensors under their parameter names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from hvpflow.errors import HvpflowError
from hvpflow.files import atomic_path
from hvpflow.runs.arena import Shapes
from hvpflow.runs.weights import check_names, check_weights, weights_hash

WEIGHTS_HASH = "weights_hash"
"""Metadata key under which a file carries the hash of its weights."""


def read_safetensors(path: Path, shapes: Shapes, where: str | None = None) -> dict[str, Tensor]:
    """Read and check the weights of one model, in the order of ``shapes``.

    Raises:
        HvpflowError: the file is missing, truncated or corrupt, or its tensors are not those of ``shapes``.
    """
    where = where or str(path)
    # safetensors reports a directory or an empty file with texts of its own; these two come first.
    if not path.is_file():
        raise HvpflowError(f"no checkpoint file {path}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = list(file.keys())
            # From the header alone, so that a wrong file is refused before its values are read.
            check_names(names, shapes, where)
            _check_header({name: file.get_slice(name) for name in names}, shapes, where)
            weights = {name: file.get_tensor(name) for name in names}
            # The format has no checksum; our own files carry one, without which a flipped bit would pass for a weight.
            expected = (file.metadata() or {}).get(WEIGHTS_HASH)
            if expected is not None and expected != weights_hash(weights):
                raise HvpflowError(
                    f"{where}: checksum mismatch, the weights are not those that were written: the file is damaged; "
                    "copy or export it again"
                )
            return check_weights(weights, shapes, where)
    except HvpflowError:
        raise
    except OSError as error:
        raise HvpflowError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # The library's own errors have no common base over its versions.
        raise HvpflowError(
            f"{path} is not a valid safetensors file ({error}): it is truncated or corrupt; copy or export it again"
        ) from error


def _check_header(slices: Mapping[str, Any], shapes: Shapes, where: str) -> None:
    for name, header in slices.items():
        if header.get_dtype() != "F32":
            raise HvpflowError(f"{where}: tensor {name!r} has type {header.get_dtype()}, expected F32")
        if tuple(header.get_shape()) != shapes[name]:
            raise HvpflowError(
                f"{where}: tensor {name!r} has shape {tuple(header.get_shape())}, expected {shapes[name]}"
            )


def read_metadata(path: Path) -> dict[str, str]:
    """The texts that a file carries beside its tensors; empty for a file that carries none."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return dict(file.metadata() or {})
    except Exception as error:
        raise HvpflowError(f"{path} is not a valid safetensors file ({error})") from error


def write_safetensors(path: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None) -> None:
    """Write float32 ``weights`` atomically; ``metadata`` values are stored as text.

    Equal arguments give equal bytes. (The safetensors library writes metadata in an order that changes from run to
    run, so the header, which is plain JSON, is made here.)

    Raises:
        HvpflowError: no room on the disk, or the directory cannot be written.
    """
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = {key: str(metadata[key]) for key in sorted(metadata)}
    tensors, offset = [], 0
    for name in sorted(weights):
        values = weights[name].detach().cpu().contiguous().numpy()
        values = values.astype("<f4", casting="equiv", copy=False)
        end = offset + values.nbytes
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [offset, end]}
        tensors.append(values)
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces bring the values to a multiple of eight bytes, as the format recommends.
    text += b" " * (-len(text) % 8)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for values in tensors:
            file.write(values.data)
