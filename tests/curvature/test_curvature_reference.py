"""The slow engine against dense Hessians, and the gradient against autograd."""

from __future__ import annotations

import pytest
import torch
from curvature_cases import (
    TinyGPT,
    TinyLlama,
    dense_hessian,
    flatten,
    random_batch,
    random_directions,
    randomized,
)

from hvpflow.curvature.gradient import add_gradient
from hvpflow.curvature.reference import jvp_of_grad
from hvpflow.errors import HvpflowError


@pytest.mark.parametrize("make", [TinyLlama, TinyGPT])
def test_total_is_the_dense_hessians(make):
    model = randomized(make(layers=1))
    tokens, targets = random_batch(11, 2, 5)
    directions = random_directions(model, 3)
    v = flatten(directions)
    expected = torch.einsum("ki,ij,kj->k", v, dense_hessian(model, tokens, targets), v)
    torch.testing.assert_close(jvp_of_grad(model, tokens, targets, directions).total, expected, rtol=1e-12, atol=0)


def test_gauss_newton_part_is_the_logits_jacobian_around_the_losss_hessian():
    model = randomized(TinyLlama(layers=1))
    tokens, targets = random_batch(13, 2, 5, ignored=0.3)
    directions = random_directions(model, 2)
    names = list(directions)

    def logits(*values):
        return torch.func.functional_call(model, dict(zip(names, values)), (tokens,)).flatten(0, 1)

    parameters = tuple(dict(model.named_parameters())[name].detach() for name in names)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        jacobian = torch.func.jacrev(logits, argnums=tuple(range(len(names))))(*parameters)
    J = torch.cat([part.flatten(2) for part in jacobian], dim=2)  # [tokens, vocabulary, D]
    p = logits(*parameters).softmax(-1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    inner[targets.flatten() == -100] = 0
    z = torch.einsum("nvd,kd->knv", J, flatten(directions))
    expected = torch.einsum("knv,nvw,knw->k", z, inner, z)
    measured = jvp_of_grad(model, tokens, targets, directions).gauss_newton
    torch.testing.assert_close(measured, expected.detach(), rtol=1e-12, atol=0)


def test_gradient_is_added_with_its_scale():
    model = randomized(TinyLlama())
    tokens, targets = random_batch(13, 3, 5)
    into = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    loss = add_gradient(model, tokens, targets, into, scale=0.25)
    expected_loss = model(tokens, targets)
    expected_loss.backward()
    assert loss == expected_loss.item()
    for name, p in model.named_parameters():
        torch.testing.assert_close(into[name], 1 + 0.25 * p.grad, rtol=1e-13, atol=1e-13)


def test_directions_that_do_not_fit_are_refused():
    model = randomized(TinyLlama(layers=1))
    tokens, targets = random_batch(13, 1, 3)
    directions = random_directions(model, 2)
    with pytest.raises(HvpflowError, match=r"norms.*did you mean 'norm'"):
        jvp_of_grad(model, tokens, targets, directions | {"norms": directions["norm"]})
    with pytest.raises(HvpflowError, match=r"no direction for parameter 'norm'"):
        jvp_of_grad(model, tokens, targets, {n: d for n, d in directions.items() if n != "norm"})
    with pytest.raises(HvpflowError, match=r"shape \(1, 13, 8\)"):
        jvp_of_grad(model, tokens, targets, directions | {"embed.weight": directions["embed.weight"][:1]})
