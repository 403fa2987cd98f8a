"""The slow, exact engine: a forward derivative of the reverse derivative (Pearlmutter 1994), one direction at a time.

    Hv = d/dε ∇loss(θ + εv) at ε = 0,    vᵀHv = ⟨v, Hv⟩

It needs nothing but derivatives that PyTorch knows, so it serves every model and checks the fast engine. Attention
runs in its plain kernel: the fused ones have neither a forward derivative nor a second one.
Legend: B sequences, T positions, K directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hvpflow.curvature.directions import (
    Directions,
    QuadraticForms,
    check_directions,
    evaluation_mode,
    to_host,
    trainable_parameters,
)
from hvpflow.errors import HvpflowError


def jvp_of_grad(
    model: nn.Module, tokens: Tensor, targets: Tensor, directions: Directions, *, compiled: bool = False
) -> QuadraticForms:
    """Return vᵀHv and its Gauss-Newton part for K directions, for ``model(tokens, targets)``, a summed loss.

    ``tokens`` and ``targets`` are [B, T]. ``compiled`` compiles the Hessian product (not the Gauss-Newton part) with
    the whole model unrolled, which takes minutes for deep ones. Raises HvpflowError where directions do not fit.
    """
    parameters = {name: parameter.detach() for name, parameter in trainable_parameters(model).items()}
    num_directions = check_directions(parameters, directions)
    form = hessian_form(model, compiled=compiled)
    total, gauss_newton = [], []
    with evaluation_mode(model), sdpa_kernel(SDPBackend.MATH):
        for index in range(num_directions):
            direction = {name: stack[index] for name, stack in directions.items()}
            total.append(to_host(form(parameters, direction, tokens, targets)))
            gauss_newton.append(to_host(_gauss_newton(model, parameters, direction, tokens, targets)))
    return QuadraticForms(torch.stack(total), torch.stack(gauss_newton))


def hessian_form(model: nn.Module, *, compiled: bool = False) -> Callable[..., Tensor]:
    """Return the function (parameters, direction, tokens, targets) -> vᵀHv, a float64 scalar."""

    def loss(parameters: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
        return functional_call(model, parameters, (tokens, targets))

    def product(parameters: dict[str, Tensor], direction: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Any:
        return jvp(lambda moving: grad(loss)(moving, tokens, targets), (parameters,), (direction,))[1]

    if compiled:
        product = torch.compile(product, dynamic=False)

    def form(parameters: dict[str, Tensor], direction: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
        hv = product(parameters, direction, tokens, targets)
        return torch.stack([(direction[name].double() * hv[name]).sum() for name in direction]).sum()

    return form


class _CrossEntropyTap(TorchFunctionMode):
    """Cut the graph at every cross-entropy: note how it was called, hand its value on as a fresh leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[[Tensor], Tensor], Tensor]] = []
        self.leaves: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.cross_entropy:
            return func(*args, **kwargs)
        logits, *rest = args if args else (kwargs.pop("input"),)
        self.calls.append((lambda z: F.cross_entropy(z, *rest, **kwargs), logits))
        value = F.cross_entropy(logits.detach(), *rest, **kwargs)
        self.leaves.append(forward_ad.unpack_dual(value).primal.detach().requires_grad_())
        return self.leaves[-1]


def _gauss_newton(
    model: nn.Module, parameters: dict[str, Tensor], direction: dict[str, Tensor], tokens: Tensor, targets: Tensor
) -> Tensor:
    """Return Σ over cross-entropies of ⟨∂loss/∂value, D²value[z', z']⟩ with z' the forward derivative of its logits."""
    tap = _CrossEntropyTap()
    with forward_ad.dual_level():
        moving = {name: forward_ad.make_dual(parameters[name], direction[name]) for name in parameters}
        with tap:
            loss = functional_call(model, moving, (tokens, targets))
        duals = [forward_ad.unpack_dual(logits) for _, logits in tap.calls]
    if not tap.calls:
        raise HvpflowError(
            "the model's loss calls no torch.nn.functional.cross_entropy, so it has no Gauss-Newton part: compute the "
            "loss with that function"
        )
    adjoints = torch.autograd.grad(forward_ad.unpack_dual(loss).primal if loss.requires_grad else loss, tap.leaves)
    forms = []
    for (function, _), dual, adjoint in zip(tap.calls, duals, adjoints, strict=True):
        if dual.tangent is None:
            continue
        z, z_tangent = dual.primal.detach(), dual.tangent.detach()

        def slope(z: Tensor, function: Any = function, z_tangent: Tensor = z_tangent) -> Tensor:
            return jvp(function, (z,), (z_tangent,))[1]

        forms.append((adjoint.double() * jvp(slope, (z,), (z_tangent,))[1].double()).sum())
    return torch.stack(forms).sum() if forms else torch.zeros((), dtype=torch.float64, device=tokens.device)
