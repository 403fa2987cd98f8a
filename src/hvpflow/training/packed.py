"""Several models trained side by side, mixed over a topology, in one batched pass on one device.

Parameters, gradients and both AdamW moments of all workers lie in contiguous arenas [W, S] (see ``runs.arena``). AdamW
acts element by element, so one fused update of the parameter arena is every worker's own; only the weight decay, which
spares the gains, is a multiplication by a row of factors. What lies between the parameters stays zero throughout.

Update t of worker w, with g_w the clipped gradient of its own sequences' mean loss at x_w:

    awc (adapt while combining):  x_w ← AdamW step with g_w from Σ_v M_t[w, v] x_v
    atc (adapt then combine):     x_w ← Σ_v M_t[w, v] (AdamW step with g_v from x_v)

Legend: W workers, S row length, B sequences of a batch, T positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hvpflow.errors import HvpflowError
from hvpflow.models.llama import Llama
from hvpflow.runs.arena import pack, storage_layout, storage_size, unpack
from hvpflow.runs.packed_format import arena_model, arena_optimizer, check_arena_model, check_arena_optimizer
from hvpflow.runs.recipe import Recipe
from hvpflow.runs.state_format import PACKED, TrainingState
from hvpflow.training.learner import Update, autocast, initial_model
from hvpflow.training.mixing import consensus_weight, mix_, peers
from hvpflow.training.optimizer import set_rate
from hvpflow.training.stacked import stacked_losses


class PackedLearner:
    """W models, all starting from the same weights."""

    state_version = PACKED

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        assert recipe.decentralized is not None
        self._recipe, self._settings, self._device = recipe, recipe.decentralized, device
        self.num_workers = recipe.num_workers
        self.shapes = recipe.model.parameter_shapes()
        sampling = recipe.sampling()
        self._num_steps = sampling.boundaries()[-1] // sampling.batch_blocks
        self._average = initial_model(recipe).to(device)
        initial = {name: value.detach().cpu() for name, value in self._average.named_parameters()}
        self.arena = nn.Parameter(pack([initial] * self.num_workers, self.shapes).to(device))
        self.arena.grad = torch.zeros_like(self.arena)
        self._parameters = {name: view.requires_grad_() for name, view in self._views(self.arena.detach()).items()}
        self._gradients = self._views(self.arena.grad)
        self._decayed = self._decayed_columns()
        fused = device.type == "cuda" and recipe.runtime.fused_optimizer
        settings = recipe.optimizer
        self.optimizer = torch.optim.AdamW(
            [self.arena],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=0.0,  # applied by _decay, as it depends on the column
            fused=fused,
            foreach=None if fused else True,
        )
        compiled = recipe.runtime.compile and device.type == "cuda"
        self._losses = torch.compile(stacked_losses, mode=recipe.runtime.compile_mode) if compiled else stacked_losses

    def model(self) -> Llama:
        """The average of the workers' models."""
        self._average.load_state_dict(unpack(self.arena.detach().mean(0, keepdim=True), self.shapes)[0])
        return self._average

    def workers(self) -> list[dict[str, Tensor]]:
        """Each worker's parameters, as views on CPU where the arena is there."""
        return unpack(self.arena.detach().cpu(), self.shapes)

    def _moments(self) -> tuple[Tensor, Tensor]:
        """AdamW's first and second moments, [W, S] on CPU; zero before the first update."""
        state = self.optimizer.state.get(self.arena)
        if not state:
            return torch.zeros_like(self.arena.detach().cpu()), torch.zeros_like(self.arena.detach().cpu())
        return state["exp_avg"].cpu(), state["exp_avg_sq"].cpu()

    def _num_updates(self) -> int:
        """AdamW's step counter."""
        state = self.optimizer.state.get(self.arena)
        return int(state["step"]) if state else 0

    def update(self, tokens: Tensor, targets: Tensor, rate: float, step: int) -> Update:
        """See Learner; worker w reads rows w, w + W, … of the batch [B, T]."""
        settings = self._settings
        own_tokens, own_targets = (
            rows.unflatten(0, (-1, self.num_workers)).transpose(0, 1) for rows in (tokens, targets)
        )
        with autocast(self._recipe, self._device):
            losses = self._losses(self._parameters, self._recipe.model, own_tokens, own_targets)
        losses = losses / own_targets[0].numel()
        # No worker's loss depends on another's parameters, so the sum's gradient holds each worker's own.
        found = torch.autograd.grad(losses.sum(), list(self._parameters.values()))
        for view, value in zip(self._gradients.values(), found):
            view.copy_(value)
        gradients = self.arena.grad
        assert gradients is not None
        norms = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64).float()
        if self._recipe.optimizer.grad_clip:
            gradients.mul_((self._recipe.optimizer.grad_clip / (norms + 1e-6)).clamp(max=1.0)[:, None])
        mixing_step = step - 1
        partners = peers(settings.topology, self.num_workers, mixing_step, mutual=self._recipe.generation == "new")
        weight = consensus_weight(self._recipe, rate, mixing_step, self._num_steps)
        with torch.no_grad():
            if settings.scheme == "awc":
                mix_(self.arena, partners, weight)
            self._decay(rate)
            set_rate(self.optimizer, rate)
            self.optimizer.step()
            if settings.scheme == "atc":
                mix_(self.arena, partners, weight)
        local_losses, local_norms = torch.stack([losses.detach(), norms]).double().tolist()
        extra = {
            "local_losses": local_losses,
            "local_grad_norms": local_norms,
            "tokens_per_model": step * own_targets[0].numel(),
            "mixing_step": mixing_step,
            "mixing_gamma": weight,
        }
        return Update(loss=sum(local_losses) / self.num_workers, gradient_norm=max(local_norms), extra=extra)

    def state(self) -> dict[str, Any]:
        """See Learner: all workers' arenas."""
        steps = [torch.tensor(float(self._num_updates())) for _ in self.shapes]
        workers = [{"steps": list(steps), "groups": self._groups()} for _ in range(self.num_workers)]
        return {
            "model": arena_model(self.arena.detach().cpu(), self.shapes),
            "optimizer": arena_optimizer(*self._moments(), workers, self.shapes),
        }

    def _groups(self) -> list[dict[str, Any]]:
        """A worker's two parameter groups as AdamW would write them, without ``params``."""
        options = {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}
        return [options | {"weight_decay": decay} for decay in (self._recipe.optimizer.weight_decay, 0.0)]

    def load_state(self, state: TrainingState) -> None:
        """See Learner."""
        where = "the training state"
        if state.version != PACKED:
            raise HvpflowError(f"{where} is of a single model, not of {self.num_workers} packed ones")
        model, optimizer = state.model or {}, state.optimizer or {}
        check_arena_model(model, self.shapes, self.num_workers, where)
        check_arena_optimizer(optimizer, self.shapes, self.num_workers, state.step, where)
        with torch.no_grad():
            self.arena.copy_(model["parameter_storage"])
        try:
            set_rate(self.optimizer, float(optimizer["workers"][0]["groups"][0]["lr"]))
        except (KeyError, TypeError) as error:
            raise HvpflowError(f"{where} lacks the learning rate of its optimizer") from error
        fused = self.optimizer.param_groups[0]["fused"]
        self.optimizer.state[self.arena] = {
            "step": torch.tensor(float(state.step), device=self._device if fused else "cpu"),
            "exp_avg": optimizer["first_moment_storage"].to(self._device, copy=True),
            "exp_avg_sq": optimizer["second_moment_storage"].to(self._device, copy=True),
        }

    def result(self) -> dict[str, Any]:
        """See Learner: what the peer's packed runs report too."""
        return {
            "num_models": self.num_workers,
            "total_parameters": self.num_workers * self._recipe.num_parameters,
            "tokens_per_model": self._recipe.sampling().boundaries()[-1]
            * self._recipe.model.context_length
            // self.num_workers,
            "topology": self._settings.topology,
            "scheme": self._settings.scheme,
        }

    def _views(self, arena: Tensor) -> dict[str, Tensor]:
        """Parameter name -> view [W, *shape] of an arena [W, S]."""
        return {
            entry["name"]: arena[:, entry["start"] : entry["start"] + entry["numel"]].unflatten(1, entry["shape"])
            for entry in storage_layout(self.shapes)
        }

    def _decayed_columns(self) -> Tensor:
        """Which columns hold matrices, bool [S]."""
        decayed = torch.zeros(storage_size(self.shapes), dtype=torch.bool)
        for entry in storage_layout(self.shapes):
            if len(entry["shape"]) >= 2:
                decayed[entry["start"] : entry["start"] + entry["numel"]] = True
        return decayed.to(self._device)

    def _decay(self, rate: float) -> None:
        factor = 1.0 - rate * self._recipe.optimizer.weight_decay
        factors = torch.ones(len(self._decayed), device=self._device).masked_fill_(self._decayed, factor)
        self.arena.mul_(factors)
