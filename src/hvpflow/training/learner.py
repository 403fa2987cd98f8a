"""What the training loop trains: one model here, several packed ones in ``packed``.

Legend: B sequences of a batch, T positions.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hvpflow.errors import HvpflowError
from hvpflow.models.llama import Llama
from hvpflow.runs.recipe import Recipe
from hvpflow.runs.state_format import ORDINARY, TrainingState
from hvpflow.training.optimizer import clip_gradients, make_adamw, set_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What one optimiser update was like."""

    loss: float
    """Mean loss per token of the whole batch, before the update."""
    gradient_norm: float
    """Norm of its gradient before clipping; packed: the largest of the workers'."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More columns for the ``train`` row."""


class Learner(Protocol):
    """Weights and optimiser state, and the update that changes them."""

    state_version: int
    """Version of the training states that it writes."""

    def update(self, tokens: Tensor, targets: Tensor, rate: float, step: int) -> Update:
        """Update number ``step`` (from 1) on one whole batch, tokens and targets [B, T], at learning rate ``rate``."""
        ...

    def model(self) -> nn.Module:
        """The model to validate and to publish; to be read only."""
        ...

    def state(self) -> dict[str, Any]:
        """The entries ``model`` and ``optimizer`` of a training state; views of what the next update changes."""
        ...

    def load_state(self, state: TrainingState) -> None:
        """Continue from ``state``; raises HvpflowError where it does not fit."""
        ...

    def result(self) -> dict[str, Any]:
        """More entries for result.json."""
        ...


def autocast(recipe: Recipe, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 matrix products where the recipe asks for them and a GPU does them; float32 on CPU."""
    if recipe.runtime.amp and device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def initial_model(recipe: Recipe) -> Llama:
    """The freshly initialised model of a recipe, on CPU so that the device does not change the weights."""
    model = Llama(recipe.model)
    model.init_weights(torch.Generator().manual_seed(recipe.runtime.seed))
    return model


class SingleLearner:
    """One model with AdamW, its batch cut into microbatches."""

    state_version = ORDINARY

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._recipe = recipe
        self._device = device
        self._model = initial_model(recipe).to(device)
        self.optimizer = make_adamw(self._model, recipe, device)
        compiled = recipe.runtime.compile and device.type == "cuda"
        self._loss = torch.compile(self._model, mode=recipe.runtime.compile_mode) if compiled else self._model

    def model(self) -> Llama:
        """The trained model itself."""
        return self._model

    def update(self, tokens: Tensor, targets: Tensor, rate: float, step: int) -> Update:
        """See Learner; the batch's last microbatch may be shorter, and every token weighs the same."""
        num_targets = targets.numel()
        size = self._recipe.training.micro_batch_size
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for start in range(0, len(tokens), size):
            with autocast(self._recipe, self._device):
                loss = self._loss(tokens[start : start + size], targets[start : start + size])
            (loss / num_targets).backward()
            loss_sum += loss.detach().double()
        norm = clip_gradients(self._model.parameters(), self._recipe.optimizer.grad_clip)
        set_rate(self.optimizer, rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mean, gradient_norm = torch.stack([loss_sum / num_targets, norm.double()]).tolist()
        return Update(loss=mean, gradient_norm=gradient_norm)

    def state(self) -> dict[str, Any]:
        """See Learner: names and tensors in module order, and AdamW's own state dict."""
        return {
            "model": OrderedDict((name, value.detach().cpu()) for name, value in self._model.named_parameters()),
            "optimizer": tree_map_only(Tensor, Tensor.cpu, self.optimizer.state_dict()),
        }

    def load_state(self, state: TrainingState) -> None:
        """See Learner; the kernels (fused, foreach) stay this device's, whatever the state was written with."""
        try:
            self._model.load_state_dict(state.model or {})
            # Copied, because what is read from a file may be mapped to it and updates change it in place.
            optimizer = copy.deepcopy(dict(state.optimizer or {}))
            # Set before loading: PyTorch places the step counters by the kernel.
            for group, own in zip(optimizer["param_groups"], self.optimizer.param_groups):
                group["fused"], group["foreach"] = own["fused"], own["foreach"]
            self.optimizer.load_state_dict(optimizer)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise HvpflowError(f"the training state does not fit the recipe's model: {error}") from error

    def result(self) -> dict[str, Any]:
        """See Learner: nothing more."""
        return {}
