"""A run and a token cache small enough for a dense Hessian, made from seeds; and the dense matrices themselves."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import yaml
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from hvpflow.data.cache import TokenCache
from hvpflow.data.epochs import Epoch, analysis_epoch, required_train_tokens
from hvpflow.files import fingerprint, write_json
from hvpflow.measure.measurement import measure_shard
from hvpflow.measure.settings import MeasureSettings
from hvpflow.measure.store import Store
from hvpflow.models.llama import Llama
from hvpflow.runs.recipe import recipe_from_mapping
from hvpflow.runs.run import Run, open_run

VOCABULARY, LENGTH, SHARD_TOKENS = 16, 8, 50
CHECKPOINT = "epoch-001.safetensors"


def recipe_mapping(workers: int = 1) -> dict[str, Any]:
    """12 sequences an epoch, in batches of 3 (one worker) or 4 (two workers), microbatches of 2."""
    return {
        "model": {
            **{"vocab_size": VOCABULARY, "layers": 1, "width": 8, "heads": 2, "ffn_width": 12},
            "context_length": LENGTH,
        },
        "data": {
            **{"cache_dir": "cache", "dataset": "made-up", "revision": "r1", "tokenizer": "none"},
            **{"tokenizer_revision": "r1", "shuffle_seed": 42, "shuffle_buffer": 100, "shard_tokens": SHARD_TOKENS},
            "shuffle_group_size": 1,
        },
        "training": {
            **{"tokens_per_parameters": 0.28, "epoch_tokens_per_parameters": 0.14, "micro_batch_size": 2},
            "batch_tokens": LENGTH * (3 if workers == 1 else 2 * workers),
        },
        "runtime": {"seed": 42, "device": "cpu", "cpu_threads": 1},
        "decentralized": None if workers == 1 else {"num_models": workers, "topology": "complete"},
    }


def make_cache(directory: Path, tokens: int) -> None:
    """A train split of random tokens, Zipf-like so that the model's loss is not flat."""
    stream = np.random.default_rng(0).geometric(0.2, tokens).clip(1, VOCABULARY) - 1
    directory.mkdir(parents=True)
    shards = []
    for number, start in enumerate(range(0, tokens, SHARD_TOKENS)):
        content = stream[start : start + SHARD_TOKENS].astype("<u2").tobytes()
        name = f"train-{number:05d}.bin"
        (directory / name).write_bytes(content)
        shards.append({"file": name, "tokens": len(content) // 2, "sha256": hashlib.sha256(content).hexdigest()})
    manifest: dict[str, Any] = {
        **{"version": 1, "dataset": "made-up", "dataset_revision": "r1", "tokenizer": "none"},
        **{"tokenizer_revision": "r1", "tokenizer_fingerprint": "0" * 64, "vocab_size": VOCABULARY},
        **{"eos_token_id": 0, "dtype": "<u2", "validation_complete": True},
        "preprocessing": {"shuffle_seed": 42, "shuffle_buffer": 100, "append_eos": True, "add_special_tokens": False},
        "splits": {"train": {"tokens": tokens, "shards": shards}, "validation": {"tokens": 0, "shards": []}},
    }
    write_json(directory / "manifest.json", manifest | {"identity": fingerprint(manifest)})


def make_run(directory: Path, workers: int = 1, *, equal_workers: bool = False) -> tuple[Run, TokenCache]:
    """A run with one checkpoint of random weights; with several workers, the average and one file each."""
    recipe = recipe_from_mapping(recipe_mapping(workers))
    run_directory = directory / "run"
    run_directory.mkdir(parents=True)
    (run_directory / "resolved.yaml").write_text(yaml.safe_dump(recipe.to_mapping(), sort_keys=False))
    make_cache(directory / "cache", required_train_tokens(recipe.sampling(), SHARD_TOKENS))
    states = []
    for worker in range(workers):
        generator = torch.Generator().manual_seed(0 if equal_workers else worker)
        model = Llama(recipe.model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.4, generator=generator)
        states.append({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    average = {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
    safetensors.torch.save_file(average, run_directory / CHECKPOINT)
    if workers > 1:
        for worker, state in enumerate(states):
            node = run_directory / f"node-{worker:03d}"
            node.mkdir()
            safetensors.torch.save_file(state, node / CHECKPOINT)
    return open_run(run_directory), TokenCache.open(directory / "cache")


def measure(run: Run, cache: TokenCache, store: Path, case: str = "seen", **options: Any) -> dict[str, Any]:
    """``measure_shard`` on the CPU with its dull arguments filled in; settings and arguments may be mixed."""
    arguments = {"inspect_record": None, "shard": 0, "num_shards": 1, "device": "cpu", "progress": lambda line: None}
    for name in [*arguments, "save_seconds"]:
        if name in options:
            arguments[name] = options.pop(name)
    checkpoint = options.pop("checkpoint", CHECKPOINT)
    settings = MeasureSettings(**{"dtype": "float64", "noise_samples": 3, "random_samples": 2} | options)
    return dict(measure_shard(run, checkpoint, cache, case, settings, store=Store(store), **arguments))


def without_times(value: Any) -> Any:
    """The record without what differs from run to run by nature."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if not key.endswith(("seconds", "timing"))}
    if isinstance(value, list):
        return [without_times(item) for item in value]
    return value


class DenseCase:
    """Dense float64 Hessian and Gauss-Newton matrix of an epoch's token-mean loss, [D, D], and gradients [D]."""

    def __init__(self, run: Run, cache: TokenCache, case: str) -> None:
        self.model = Llama(run.recipe.model).double().eval()
        weights = safetensors.torch.load_file(run.directory / CHECKPOINT)
        self.model.load_state_dict(weights)
        self.epoch: Epoch = analysis_epoch(run.recipe.sampling(), cache, case)
        self.split = cache.split("train")
        self.parameters = {name: tensor.detach() for name, tensor in self.model.named_parameters()}
        self.point = self.flat(self.parameters)
        self.gradient, self.hessian = self._second_order(self.epoch.block_ids)
        self.gauss_newton = self._gauss_newton()

    def flat(self, vector: dict[str, Tensor]) -> Tensor:
        return torch.cat([vector[name].double().reshape(-1) for name in self.parameters])

    def batch_gradient(self, block_ids: np.ndarray) -> Tensor:
        point = self.point.clone().requires_grad_()
        return torch.autograd.grad(self._mean_loss(point, block_ids), point)[0]

    def _unflat(self, point: Tensor) -> dict[str, Tensor]:
        pieces = point.split([tensor.numel() for tensor in self.parameters.values()])
        return {name: piece.view_as(self.parameters[name]) for name, piece in zip(self.parameters, pieces)}

    def _blocks(self, block_ids: np.ndarray) -> Tensor:
        return torch.from_numpy(self.split.read_blocks(block_ids, LENGTH))

    def _mean_loss(self, point: Tensor, block_ids: np.ndarray) -> Tensor:
        blocks = self._blocks(block_ids)
        logits = functional_call(self.model, self._unflat(point), (blocks[:, :-1],))
        # Written out, so that neither the model's loss nor its reduction is taken on trust.
        scores = logits.log_softmax(-1).gather(-1, blocks[:, 1:, None])
        return -scores.sum() / scores.numel()

    def _second_order(self, block_ids: np.ndarray) -> tuple[Tensor, Tensor]:
        point = self.point.clone().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            gradient = torch.autograd.grad(self._mean_loss(point, block_ids), point, create_graph=True)[0]
            rows = torch.autograd.grad(gradient, point, torch.eye(len(point)).double(), is_grads_batched=True)[0]
        return gradient.detach(), rows

    def _gauss_newton(self) -> Tensor:
        matrix = torch.zeros_like(self.hessian)
        for block in self.epoch.block_ids:
            tokens = self._blocks(np.array([block]))[:, :-1]
            point = self.point.clone().requires_grad_()
            with sdpa_kernel(SDPBackend.MATH):
                logits = functional_call(self.model, self._unflat(point), (tokens,)).reshape(-1, VOCABULARY)
                units = torch.eye(LENGTH * VOCABULARY).double().reshape(-1, LENGTH, VOCABULARY)
                jacobian = torch.autograd.grad(logits, point, units, is_grads_batched=True)[0]
            jacobian = jacobian.reshape(LENGTH, VOCABULARY, -1)
            p = logits.detach().softmax(-1)
            inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
            matrix += torch.einsum("tvd,tve->de", jacobian, inner @ jacobian)
        return matrix / self.epoch.num_tokens
