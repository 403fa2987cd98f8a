"""The face of the curvature engine: vᵀHv of a batch's summed loss for a stack of directions.

Legend: B sequences, T positions, K directions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hvpflow.curvature.directions import (
    Directions,
    QuadraticForms,
    check_directions,
    evaluation_mode,
    to_host,
    trainable_parameters,
)
from hvpflow.curvature.graph import make_plan
from hvpflow.curvature.memory import estimate_bytes
from hvpflow.curvature.plan import Plan
from hvpflow.curvature.reference import jvp_of_grad
from hvpflow.curvature.rules import Workspace
from hvpflow.curvature.rules_head import CPU_TILE
from hvpflow.curvature.taylor import primal_pass, source_values, tangent_pass
from hvpflow.errors import HvpflowError, nearest

__all__ = ["Directions", "Engine", "QuadraticForms", "TaylorEngine", "make_engine"]

Engine = Callable[[Tensor, Tensor, Directions], QuadraticForms]


class TaylorEngine:
    """(tokens [B, T], targets [B, T], directions) -> QuadraticForms.

    K directions cost as many matrix products as 2K + 2 forward passes on a CPU, in layers of ``paired_width`` inputs or
    more, and as 3K + 2 where products are cheaper than passes over memory (narrow layers, CUDA) or where bfloat16 would
    lose what cancels. Holds the model, whose weights are read anew at each call, and one planned graph per shape of the
    batch.
    """

    def __init__(
        self, model: nn.Module, example: tuple[Tensor, Tensor], *, amp: bool = False, compile_rules: bool = False,
        paired_width: int = 128,
    ) -> None:  # fmt: skip
        self.model = model
        on_cpu = example[0].device.type == "cpu"
        if on_cpu:
            _keep_freed_memory()
        tokens, columns = CPU_TILE if on_cpu else (1 << 15, 1 << 12)
        self.workspace = Workspace(
            num_directions=1,
            device=example[0].device,
            amp=amp,
            compile_rules=compile_rules,
            loop_directions=on_cpu,
            paired_width=paired_width if on_cpu and not amp else None,
            slice_elements=(1 << 18) * torch.get_num_threads() if on_cpu else 1 << 27,
            head_tokens=tokens,
            head_columns=columns,
        )
        self._plans: dict[Any, Plan] = {}
        self.plan_of_example = self.plan(*example)
        self.unused_parameters = self.plan_of_example.unused
        """Trainable parameters that the loss does not depend on; they contribute zero."""
        self.frozen_parameters = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        """Parameters that do not move: no part of any direction."""

    def plan(self, tokens: Tensor, targets: Tensor) -> Plan:
        key = (tokens.shape, targets.shape, tokens.dtype, targets.dtype)
        if key not in self._plans:
            with evaluation_mode(self.model):
                self._plans[key] = make_plan(self.model, tokens, targets, paired_width=self.workspace.paired_width)
        return self._plans[key]

    def __call__(self, tokens: Tensor, targets: Tensor, directions: Directions) -> QuadraticForms:
        num_directions = check_directions(trainable_parameters(self.model), directions)
        plan = self.plan(tokens, targets)
        work = replace(self.workspace, num_directions=num_directions)
        with evaluation_mode(self.model):
            sources = source_values(plan, self.model, (tokens, targets))
            kept, adjoints = primal_pass(plan, sources, amp=work.amp)
            tangent_pass(plan, work, sources, kept, adjoints, directions)
        return QuadraticForms(to_host(work.total), to_host(work.gauss_newton))

    def directions_within(self, memory_bytes: int) -> int:
        """Return the largest number of directions whose estimated memory fits ``memory_bytes``, but at least 1.

        For batches of the example's shape. ``memory_bytes`` is what there is beside the weights; the directions count
        towards it. The estimate is made from the planned graph, and a tenth is kept in reserve.
        """
        fixed, each = estimate_bytes(self.plan_of_example, self.workspace)
        return max(1, int((0.9 * memory_bytes - fixed) // each))


def _keep_freed_memory() -> None:
    """Let the C library keep what a pass frees for the next one.

    glibc returns the top of its heap to the system beyond twice the largest mapped block that was freed so far, and
    maps larger blocks each time anew; both mean that pages are cleared again in every pass. It counts blocks up to
    32 MiB. This one is never written, so it takes no memory; other C libraries are not concerned.
    """
    torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8)


def make_engine(
    model: nn.Module,
    example: tuple[Tensor, Tensor],
    *,
    kind: Literal["taylor", "jvp-of-grad"] = "taylor",
    amp: bool = False,
    compile_rules: bool = False,
) -> Engine:
    """Return the function (tokens [B, T], targets [B, T], directions) -> QuadraticForms for ``model``.

    ``model(tokens, targets)`` returns the summed token loss. ``example`` is a batch of the usual shape; others are
    accepted and planned when they come. ``amp`` runs matrix products in bfloat16. ``compile_rules`` compiles each
    pointwise rule once. Raises HvpflowError for an unknown kind or an operation without a rule.
    """
    if kind == "taylor":
        return TaylorEngine(model, example, amp=amp, compile_rules=compile_rules)
    if kind != "jvp-of-grad":
        raise HvpflowError(
            f"unknown engine {kind!r}{nearest(kind, ['taylor', 'jvp-of-grad'])}; expected 'taylor' or 'jvp-of-grad'"
        )

    def engine(tokens: Tensor, targets: Tensor, directions: Directions) -> QuadraticForms:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=amp, cache_enabled=False):
            return jvp_of_grad(model, tokens, targets, directions)

    return engine
