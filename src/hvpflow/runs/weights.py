"""A model's weights as a mapping from names to tensors: checks and digests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hvpflow.errors import HvpflowError, nearest
from hvpflow.files import fingerprint
from hvpflow.runs.arena import Shapes, average

_AVERAGE_RTOL, _AVERAGE_ATOL = 1e-5, 1e-7


def check_names(names: Sequence[str], shapes: Shapes, where: str) -> None:
    """Refuse missing and unknown tensor names.

    Raises:
        HvpflowError: the text names the first of them; ``where`` tells the file (and worker).
    """
    missing = [name for name in shapes if name not in names]
    extra = [name for name in names if name not in shapes]
    if missing:
        raise HvpflowError(
            f"{where} lacks the tensor {missing[0]!r} ({len(missing)} missing, {len(extra)} unknown): it does not "
            "belong to the run's model section, or was written by another program"
        )
    if extra:
        raise HvpflowError(
            f"{where} holds the tensor {extra[0]!r}{nearest(extra[0], shapes)}, which the run's model does not have "
            f"({len(extra)} unknown)"
        )


def check_tensor(tensor: object, name: str, shape: tuple[int, ...], where: str) -> Tensor:
    """Return ``tensor`` if it is a finite, dense float32 tensor of ``shape``.

    Raises:
        HvpflowError: it is anything else.
    """
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise HvpflowError(f"{where}: {name!r} is no dense tensor")
    if tensor.dtype != torch.float32:
        raise HvpflowError(f"{where}: tensor {name!r} has type {tensor.dtype}, expected torch.float32")
    # The shape is compared before any value is touched: strides of 0 can make a small file's tensor huge.
    if tuple(tensor.shape) != shape:
        raise HvpflowError(f"{where}: tensor {name!r} has shape {tuple(tensor.shape)}, expected {shape}")
    finite = torch.isfinite(tensor)
    if not finite.all():
        count = int(tensor.numel() - finite.sum())
        raise HvpflowError(
            f"{where}: tensor {name!r} holds {count} non-finite value(s): the training diverged or the file "
            "is damaged; take an earlier checkpoint"
        )
    return tensor


def check_weights(weights: Mapping[str, object], shapes: Shapes, where: str) -> dict[str, Tensor]:
    """Return a copy of ``weights`` in the order of ``shapes``, fully checked and independent of any file.

    Raises:
        HvpflowError: names, types, shapes or values are not as expected.
    """
    check_names(list(weights), shapes, where)
    return {
        name: check_tensor(weights[name], name, shape, where).detach().clone(memory_format=torch.contiguous_format)
        for name, shape in shapes.items()
    }


def weights_hash(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over the tensors sorted by name: the name, the text of ``(dtype, shape)``, the little-endian values."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(name.encode())
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        values = tensor.numpy()
        digest.update(values.astype(values.dtype.newbyteorder("<"), copy=False).data)
    return digest.hexdigest()


def result_key(average_hash: str, worker_hashes: Sequence[str] | None) -> str:
    """Key of a checkpoint's results: the weights hash, or a digest of it with the workers' hashes in order.

    States of equal average whose workers differ have different consensus errors, so they must not share results.
    """
    if worker_hashes is None:
        return average_hash
    return fingerprint({"weights_hash": average_hash, "workers": list(worker_hashes)})


def check_average(root: Mapping[str, Tensor], workers: Sequence[Mapping[str, Tensor]], where: str) -> None:
    """Refuse root weights that are not the workers' average, |root - mean| <= 1e-7 + 1e-5 |mean| for each element.

    Raises:
        HvpflowError: the text names the tensor and the largest difference.
    """
    for name, mean in average(workers).items():
        if not torch.allclose(root[name], mean, rtol=_AVERAGE_RTOL, atol=_AVERAGE_ATOL):
            difference = float((root[name] - mean).abs().max())
            raise HvpflowError(
                f"root weights differ from the worker average: {where} (tensor {name!r}, by up to {difference:.3g}): "
                "root and node files are of different states; export them again, or use --no-consensus"
            )
