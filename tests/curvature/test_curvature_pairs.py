"""Two products for three: the identity itself, also where its terms differ most in size or vanish."""

from __future__ import annotations

import pytest
import torch
from curvature_cases import TinyGPT, TinyLlama, random_batch, random_directions, randomized
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvpflow.curvature.quadratic import TaylorEngine
from hvpflow.curvature.reference import jvp_of_grad
from hvpflow.curvature.rules_linear import balance, paired_linear, paired_products


def tangent_and_form(x: Tensor, weight: Tensor, dx: Tensor, dweight: Tensor, adjoint: Tensor) -> tuple[Tensor, Tensor]:
    (epsilon,) = balance(weight, dweight[None])
    out = torch.empty_like(adjoint)
    shifted = x + epsilon * dx, weight + epsilon * dweight
    form = paired_products(x @ weight.t(), *shifted, dx, dweight, adjoint, epsilon, out, torch.empty_like(out))
    return out, form


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    powers=st.tuples(*[st.integers(-8, 8)] * 4),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_two_products_give_what_three_give_at_any_scale(seed, sizes, powers, dtype):
    n, i, o = sizes
    torch.manual_seed(seed)
    shapes = (n, i), (o, i), (n, i), (o, i)
    exact = [10.0**power * torch.randn(shape, dtype=torch.float64) for power, shape in zip(powers, shapes)]
    operands = [part.to(dtype) for part in exact]
    adjoint = torch.randn(n, o, dtype=dtype)
    tangent, form = tangent_and_form(*operands, adjoint)
    x, weight, dx, dweight = (part.double() for part in operands)
    parts = dx @ weight.t(), x @ dweight.t()
    size = dx.norm(dim=1) * weight.norm() + x.norm(dim=1) * dweight.norm()  # of each token's row
    precision = 16 * i * torch.finfo(dtype).eps
    assert ((tangent.double() - sum(parts)).norm(dim=1) <= precision * size).all()
    product = adjoint.double() * (dx @ dweight.t())
    assert abs(form - product.sum()) <= precision * adjoint.double().norm() * dx.norm() * dweight.norm()


@pytest.mark.parametrize("fixed", ["weight", "direction", "both"])
def test_zero_weights_and_directions(fixed):
    torch.manual_seed(0)
    x, weight, dx, dweight, adjoint = (torch.randn(4, 4) for _ in range(5))
    if fixed != "direction":
        weight = torch.zeros(4, 4)
    if fixed != "weight":
        dweight = torch.zeros(4, 4)
    tangent, form = tangent_and_form(x, weight, dx, dweight, adjoint)
    torch.testing.assert_close(tangent, dx @ weight.t() + x @ dweight.t(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(form.float(), (adjoint * (dx @ dweight.t())).sum(), rtol=1e-5, atol=1e-5)


def spread(model: torch.nn.Module, kind: str) -> dict[str, Tensor]:
    """Two directions, of one size or of very different ones in different parameters or rows."""
    directions = random_directions(model, 2)
    for number, (name, stack) in enumerate(directions.items()):
        if kind == "tiny":
            stack *= 1e-12
        if kind == "parameters":
            stack *= 10.0 ** -(number % 7)
        if kind == "rows":
            stack *= 10 ** (-4 * torch.rand(2, stack.shape[1], *[1] * (stack.dim() - 2)))
        if kind == "one" and name != next(iter(directions)):
            stack *= 0
    return directions


@pytest.mark.parametrize("kind", ["even", "tiny", "parameters", "rows", "one"])
@pytest.mark.parametrize("make", [TinyLlama, TinyGPT])
def test_rounding_costs_what_it_costs_in_three_products(make, kind):
    model = randomized(make(width=32))
    with torch.no_grad():  # as in a trained network: a steeper one amplifies any rounding
        for parameter in model.parameters():
            parameter.mul_(0.2 if parameter.dim() > 1 else 1)
    rounded = make(width=32).eval()
    rounded.load_state_dict(model.state_dict())
    model.load_state_dict(rounded.state_dict())
    tokens, targets = random_batch(11, 8, 16)
    directions = {name: stack.float() for name, stack in spread(model, kind).items()}
    exact = jvp_of_grad(model, tokens, targets, {name: stack.double() for name, stack in directions.items()})
    engine = TaylorEngine(rounded, (tokens, targets), paired_width=1)
    assert any(step.node.target is paired_linear for step in engine.plan_of_example.steps)
    two = engine(tokens, targets, directions).difference(exact)
    engine.workspace.loop_directions = False
    three = engine(tokens, targets, directions).difference(exact)
    assert two <= max(4 * three, 2e-6)


@pytest.mark.parametrize("paired_width", [1, 1000])
def test_what_all_logits_have_in_common_costs_no_precision(paired_width):
    model = randomized(TinyGPT(width=16))
    rounded = TinyGPT(width=16).eval()
    rounded.load_state_dict(model.state_dict())
    model.load_state_dict(rounded.state_dict())
    tokens, targets = random_batch(11, 8, 16)
    directions = {name: 0 * stack.float() for name, stack in random_directions(model, 2).items()}
    directions["head.weight"] += 300 + torch.rand_like(directions["head.weight"])
    directions["head.bias"] += 1000
    exact = jvp_of_grad(model, tokens, targets, {name: stack.double() for name, stack in directions.items()})
    engine = TaylorEngine(rounded, (tokens, targets), paired_width=paired_width)
    assert engine(tokens, targets, directions).difference(exact) < 1e-4
