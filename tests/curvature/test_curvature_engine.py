"""The fast engine on whole models: against the dense Hessian and the exact reference, in float64."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from curvature_cases import (
    TinyGPT,
    TinyLlama,
    dense_hessian,
    flatten,
    random_batch,
    random_directions,
    randomized,
)
from torch import nn

from hvpflow.curvature.quadratic import QuadraticForms, TaylorEngine, make_engine
from hvpflow.curvature.reference import jvp_of_grad
from hvpflow.errors import HvpflowError

MODELS = {
    "llama": lambda: TinyLlama(),
    "llama_grouped_query": lambda: TinyLlama(heads=4, kv_heads=2, width=16),
    "gpt": lambda: TinyGPT(),
    "gpt_tanh_window_mask": lambda: TinyGPT(approximate="tanh", mask="window"),
    "gpt_float_mask": lambda: TinyGPT(mask="float"),
}


def close(measured: QuadraticForms, expected: QuadraticForms, rtol: float = 1e-12) -> None:
    """Relative to the larger of vᵀHv and its Gauss-Newton part, as vᵀHv may cancel."""
    scale = torch.maximum(expected.total.abs(), expected.gauss_newton.abs())
    for mine, theirs in zip(measured, expected, strict=True):
        assert ((mine - theirs).abs() <= rtol * scale).all(), (measured, expected)


@pytest.mark.parametrize("name", MODELS)
def test_whole_models_against_the_reference(name):
    model = randomized(MODELS[name]())
    tokens, targets = random_batch(11, 3, 7, ignored=0.3)
    directions = random_directions(model, 3)
    expected = jvp_of_grad(model, tokens, targets, directions)
    for loop, paired_width in ((True, 1), (True, 1000), (False, 1)):
        engine = TaylorEngine(model, (tokens, targets), paired_width=paired_width)
        engine.workspace.loop_directions = loop
        close(engine(tokens, targets, directions), expected)
        engine.workspace.slice_elements = 50
        engine.workspace.head_tokens, engine.workspace.head_columns = 5, 4
        close(engine(tokens, targets, directions), expected)


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_whole_models_against_the_dense_hessian(name):
    model = randomized((TinyLlama if name == "llama" else TinyGPT)(layers=1))
    tokens, targets = random_batch(11, 2, 4, ignored=0.2)
    directions = random_directions(model, 33)
    v = flatten(directions)
    expected = torch.einsum("ki,ij,kj->k", v, dense_hessian(model, tokens, targets), v)
    measured = make_engine(model, (tokens, targets))(tokens, targets, directions)
    torch.testing.assert_close(measured.total, expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))


def test_directions_and_batches_may_be_taken_apart():
    model = randomized(TinyLlama())
    tokens, targets = random_batch(13, 5, 6, ignored=0.2)
    directions = random_directions(model, 4)
    engine = make_engine(model, (tokens[:2], targets[:2]))
    whole = engine(tokens, targets, directions)
    single = [engine(tokens, targets, {n: d[k : k + 1] for n, d in directions.items()}) for k in range(4)]
    close(QuadraticForms(*(torch.cat(part) for part in zip(*single))), whole)
    parts = [engine(tokens[s], targets[s], directions) for s in (slice(0, 2), slice(2, 4), slice(4, 5))]
    close(QuadraticForms(*(torch.stack(part).sum(0) for part in zip(*parts))), whole)


def test_parallelogram():
    model = randomized(TinyGPT())
    tokens, targets = random_batch(11, 2, 5)
    a, b = random_directions(model, 1, seed=3), random_directions(model, 1, seed=4)
    stack = {n: torch.cat((a[n] + b[n], a[n] - b[n], a[n], b[n])) for n in a}
    q = make_engine(model, (tokens, targets))(tokens, targets, stack).total
    torch.testing.assert_close(q[0] + q[1], 2 * q[2] + 2 * q[3], rtol=1e-11, atol=0)


@pytest.mark.parametrize(("B", "T", "ignored"), [(1, 1, 0.0), (3, 1, 0.0), (1, 2, 1.0)])
def test_single_tokens_and_batches_without_a_counted_target(B, T, ignored):
    model = randomized(TinyLlama())
    tokens, targets = random_batch(13, B, T, ignored=ignored)
    directions = random_directions(model, 1)
    measured = make_engine(model, (tokens, targets))(tokens, targets, directions)
    close(measured, jvp_of_grad(model, tokens, targets, directions))
    assert ignored < 1 or measured.total.item() == 0


def test_tied_parameters_count_once_and_a_tied_head_differs_from_an_untied_one():
    class Pair(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            if tied:
                self.head.weight = self.embed.weight

        def forward(self, tokens, targets):
            logits = self.head(F.gelu(self.embed(tokens)))
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    tokens, targets = random_batch(7, 2, 3)
    for tied in (True, False):
        model = randomized(Pair(tied))
        directions = random_directions(model, 2)
        assert len(directions) == (1 if tied else 2)
        measured = make_engine(model, (tokens, targets))(tokens, targets, directions)
        close(measured, jvp_of_grad(model, tokens, targets, directions))


def test_frozen_and_unused_parameters_are_listed_and_contribute_nothing():
    model = randomized(TinyLlama())
    model.spare = nn.Parameter(torch.ones(3, dtype=torch.float64))
    model.blocks[0].gate.weight.requires_grad_(False)
    model.blocks[1].qkv.weight.requires_grad_(False)
    tokens, targets = random_batch(13, 2, 4)
    directions = random_directions(model, 2)
    engine = TaylorEngine(model, (tokens, targets))
    assert engine.unused_parameters == ["spare"]
    assert engine.frozen_parameters == ["blocks.0.gate.weight", "blocks.1.qkv.weight"]
    close(engine(tokens, targets, directions), jvp_of_grad(model, tokens, targets, directions))


def test_weights_are_read_anew_at_each_call_and_directions_are_left_alone():
    model = randomized(TinyLlama())
    tokens, targets = random_batch(13, 2, 4)
    directions = random_directions(model, 2)
    before = {n: d.clone() for n, d in directions.items()}
    engine = make_engine(model, (tokens, targets))
    first = engine(tokens, targets, directions)
    assert all(torch.equal(before[n], d) for n, d in directions.items())
    model.load_state_dict(randomized(TinyLlama(), seed=9).state_dict())
    close(engine(tokens, targets, directions), jvp_of_grad(model, tokens, targets, directions))
    assert (engine(tokens, targets, directions).total != first.total).all()


def test_the_products_own_model():
    from hvpflow.models.config import LlamaConfig
    from hvpflow.models.llama import Llama

    config = LlamaConfig(vocab_size=19, layers=2, width=16, heads=2, ffn_width=24, context_length=8)
    model = randomized(Llama(config))
    tokens, targets = random_batch(19, 3, 8, ignored=0.1)
    directions = random_directions(model, 2)
    engine = TaylorEngine(model, (tokens, targets))
    names = [getattr(step.node.target, "__name__", "") for step in engine.plan_of_example.steps]
    assert "head_cross_entropy" in names
    assert names.count("gated_product") == 2
    close(engine(tokens, targets, directions), jvp_of_grad(model, tokens, targets, directions))


@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("make", [TinyLlama, TinyGPT])
def test_mixed_precision_stays_near_the_exact_value(make, loop):
    exact = randomized(make(width=32))
    with torch.no_grad():  # a network so steep that bfloat16 is lost in it proves nothing
        for parameter in exact.parameters():
            parameter.mul_(0.2 if parameter.dim() > 1 else 1)
    tokens, targets = random_batch(11, 4, 8)
    directions = random_directions(exact, 4)
    expected = jvp_of_grad(exact, tokens, targets, directions)
    rounded = make(width=32).eval()
    rounded.load_state_dict(exact.state_dict())
    engine = TaylorEngine(rounded, (tokens, targets), amp=True)
    engine.workspace.loop_directions = loop
    measured = engine(tokens, targets, {n: d.float() for n, d in directions.items()})
    close(measured, expected, rtol=0.02)
    single = TaylorEngine(rounded, (tokens, targets))(tokens, targets, {n: d.float() for n, d in directions.items()})
    close(single, expected, rtol=1e-5)
    assert (single.total - expected.total).abs().sum() < (measured.total - expected.total).abs().sum()


def test_difference_sees_both_parts_on_one_scale():
    exact = QuadraticForms(torch.tensor([1.0, -3.0]), torch.tensor([2.0, 1.0]))
    assert exact.difference(exact) == 0
    assert QuadraticForms(exact.total + 0.02, exact.gauss_newton).difference(exact) == pytest.approx(0.01)
    assert QuadraticForms(exact.total, exact.gauss_newton * 1.03).difference(exact) == pytest.approx(0.03)
    assert math.isnan(QuadraticForms(exact.total * math.nan, exact.gauss_newton).difference(exact))


def test_unknown_engine_and_reference_by_name():
    model = randomized(TinyLlama(layers=1))
    tokens, targets = random_batch(13, 1, 3)
    with pytest.raises(HvpflowError, match="did you mean 'taylor'"):
        make_engine(model, (tokens, targets), kind="tailor")
    directions = random_directions(model, 1)
    slow = make_engine(model, (tokens, targets), kind="jvp-of-grad")
    close(slow(tokens, targets, directions), jvp_of_grad(model, tokens, targets, directions))


def test_number_of_directions_grows_with_memory():
    model = randomized(TinyLlama(), dtype=torch.float32)
    engine = TaylorEngine(model, random_batch(13, 4, 16))
    chosen = [engine.directions_within(size) for size in (1, 1 << 26, 1 << 27, 1 << 30)]
    assert chosen[0] == 1
    assert 1 < chosen[1] < chosen[2] < chosen[3]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiled rules need a C++ compiler on a CPU (g++)")
@pytest.mark.parametrize("name", MODELS)
def test_compiled_rules(name):
    model = randomized(MODELS[name]())
    tokens, targets = random_batch(11, 3, 7, ignored=0.3)
    directions = random_directions(model, 3)
    engine = TaylorEngine(model, (tokens, targets), compile_rules=True)
    for loop in (True, False):
        engine.workspace.loop_directions = loop
        close(engine(tokens, targets, directions), jvp_of_grad(model, tokens, targets, directions))
