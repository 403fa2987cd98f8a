"""Every local rule by itself, and the shapes that operands may have, against the forward derivative of the gradient.

Each case is a small function of parameters that bend before they reach the operation, so first and second derivatives
of its inputs are all at work.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from curvature_cases import random_directions
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hvpflow.curvature.quadratic import TaylorEngine
from hvpflow.curvature.reference import hessian_form
from hvpflow.errors import HvpflowError


class Case(nn.Module):
    """A scalar: a fixed random weighting of function(bent parameters, tokens), plus a square that bends it again."""

    def __init__(self, function, *shapes, positive=False, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.function, self.positive = function, positive
        self.p = nn.ParameterList(
            [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
        )
        self.seed = seed

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        bent = [0.3 + p.exp() if self.positive else p + 0.3 * p.tanh() for p in self.p]
        y = self.function(*bent)
        weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).reshape(y.shape).sin()
        return (y * weights).sum() + (y * y).mean()


def agree(model: nn.Module, K: int = 3) -> None:
    """Total of K directions at once, batched and looped, sliced finely and not at all, against the reference."""
    tokens = targets = torch.zeros(1, 1, dtype=torch.long)
    directions = random_directions(model, K)
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    form = hessian_form(model)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = torch.stack(
            [form(parameters, {n: d[k] for n, d in directions.items()}, tokens, targets) for k in range(K)]
        )
    scale = float(expected.abs().max())
    for loop, paired_width in ((True, 1), (True, 1000), (False, 1)):
        engine = TaylorEngine(model, (tokens, targets), paired_width=paired_width)
        for elements, tile in ((7, (2, 3)), (1 << 20, (1 << 10, 1 << 10))):
            engine.workspace.loop_directions = loop
            engine.workspace.slice_elements = elements
            engine.workspace.head_tokens, engine.workspace.head_columns = tile
            measured = engine(tokens, targets, directions).total
            torch.testing.assert_close(measured, expected, rtol=1e-12, atol=1e-12 * scale)


def add_scaled(a, b):
    return torch.add(a, b, alpha=0.7) - torch.sub(b, a, alpha=2)


STRUCTURE = {
    "views": lambda a: a.view(6, 4).reshape(2, 12).flatten().unflatten(0, (3, 8)).unsqueeze(1).squeeze(1),
    "transposes": lambda a: a.transpose(0, 2).permute(1, 0, -1)[..., :2].contiguous() @ a[0].t()[:2].clone(),
    "slices": lambda a: a[:, 1:, ::2] * a.select(0, 1)[1:, :2],
    "splits": lambda a: a.split(2, dim=-1)[0] * a.split([1, 3], dim=-1)[1][..., :2] + a.chunk(2, -1)[1],
    "unbind": lambda a: a.unbind(1)[0] + torch.stack((a[:, 0], torch.ones(2, 4, dtype=a.dtype)), dim=1).sum(1),
    "cat": lambda a: torch.cat((a, torch.ones(2, 3, 1, dtype=a.dtype), a * a), dim=-1),
    "expand": lambda a: a[:1].expand(5, 3, 4) * a[:, :1, :1].sum(0, keepdim=True),
    "repeat": lambda a: a.repeat_interleave(2, dim=1),
    "reductions": lambda a: a.mean(-1) * a.sum((0, 2)) + a.mean() + a.sum(1, keepdim=True).mean(),
    "scalars": lambda a: 2 - (-a) / 3 + 0.5 * a - 1 + a * 2,
    "masked_fill": lambda a: a.masked_fill(torch.arange(4) > 2, 2.0) ** 2,
    "where": lambda a: torch.where(torch.arange(4) > 1, a * a, 0.5) + torch.where(torch.arange(4) > 2, a, a.exp()),
    "dtype": lambda a: a.to(torch.float64).type_as(a) * a.double(),
    "detached": lambda a: a * a.detach() + a.sin(),
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_structural_operations(name):
    agree(Case(STRUCTURE[name], (2, 3, 4)))


POINTWISE = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "sin": torch.sin,
    "cos": torch.cos,
    "relu": F.relu,
    "relu_squared": lambda a: F.relu(a).square(),
    "relu_times_itself": lambda a: F.relu(a) * F.relu(a),
    "cube": lambda a: a**3,
    "softplus": lambda a: F.softplus(a, beta=2.0, threshold=3.0),
}
POSITIVE = {
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "power": lambda a: a**-1.7,
}


@pytest.mark.parametrize("name", [*POINTWISE, *POSITIVE])
def test_pointwise_operations(name):
    agree(Case(POINTWISE.get(name) or POSITIVE[name], (3, 5), positive=name in POSITIVE))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mul, [(3, 4), (3, 4)]),
        (torch.mul, [(2, 3, 4), (3, 1)]),
        (torch.div, [(3, 4), (3, 4)]),
        (torch.div, [(4,), (2, 3, 4)]),
        (lambda a: 2.0 / a, [(3, 4)]),
        (add_scaled, [(3, 4), (2, 3, 4)]),
        (lambda a, b: F.silu(a) * b, [(5, 4), (5, 4)]),
        (lambda a, b: b * F.gelu(a, approximate="tanh"), [(5, 4), (5, 4)]),
        (lambda a, b: F.gelu(a) * b, [(5, 4), (5, 4)]),
        (lambda a, b: torch.sigmoid(a) * b, [(5, 4), (5, 4)]),
        (lambda a, b: F.silu(a) * b, [(5, 4), (4,)]),
    ],
)
def test_operations_of_two_operands(function, shapes):
    agree(Case(function, *shapes, positive=function is torch.div or len(shapes) == 1))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (F.linear, [(3, 4), (5, 4)]),
        (F.linear, [(2, 3, 4), (5, 4), (5,)]),
        (lambda x: F.linear(x, torch.ones(2, 4, dtype=x.dtype).tril()), [(3, 4)]),
        (lambda w, b: F.linear(torch.ones(3, 4, dtype=w.dtype).tril(), w, b), [(5, 4), (5,)]),
        (lambda b: F.linear(torch.ones(3, 4, dtype=b.dtype), torch.ones(5, 4, dtype=b.dtype), b), [(5,)]),
        (torch.matmul, [(2, 3, 4), (4, 5)]),
        (torch.matmul, [(2, 1, 3, 4), (3, 4, 2)]),
        (torch.mm, [(3, 4), (4, 2)]),
        (torch.bmm, [(2, 3, 4), (2, 4, 2)]),
        (torch.addmm, [(2,), (3, 4), (4, 2)]),
        (lambda b: torch.addmm(b, torch.ones(3, 4, dtype=b.dtype), torch.ones(4, 2, dtype=b.dtype)), [(2,)]),
        (lambda w: F.embedding(torch.tensor([[0, 2], [2, 1]]), w), [(4, 3)]),
    ],
)
def test_matrix_products(function, shapes):
    agree(Case(function, *shapes))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w: F.rms_norm(x, (4,), w, 1e-3), [(3, 4), (4,)]),
        (lambda x: F.rms_norm(x, (3, 4)), [(2, 3, 4)]),
        (lambda w: F.rms_norm(torch.ones(3, 4, dtype=w.dtype).tril(), (4,), w, 1e-3), [(4,)]),
        (lambda x, w, b: F.layer_norm(x, (4,), w, b, 1e-3), [(2, 3, 4), (4,), (4,)]),
        (lambda x, b: F.layer_norm(x, (4,), None, b), [(3, 4), (4,)]),
        (lambda x: F.layer_norm(x, (4,)), [(3, 4)]),
        (lambda w, b: F.layer_norm(torch.ones(3, 4, dtype=w.dtype).tril(), (4,), w, b), [(4,), (4,)]),
        (lambda z: z.softmax(-1), [(2, 3, 4)]),
        (lambda z: F.softmax(z, dim=1), [(2, 3, 4)]),
        (lambda z: F.log_softmax(z, dim=0), [(3, 4)]),
        (lambda z: torch.logsumexp(z, dim=-1), [(2, 3, 4)]),
        (lambda z: torch.logsumexp(z, dim=0, keepdim=True), [(3, 4)]),
    ],
)
def test_normalisations(function, shapes):
    agree(Case(function, *shapes))


def attention(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


MASK = torch.tensor([[True, True, False, False], [False] * 4, [True] * 4])


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({}, [(2, 3, 4), (2, 5, 4), (2, 5, 6)]),
        ({"is_causal": True}, [(2, 2, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)]),
        ({"is_causal": True}, [(1, 3, 4), (1, 5, 4), (1, 5, 4)]),
        ({"is_causal": True, "scale": 0.3}, [(1, 1, 1, 4), (1, 1, 1, 4), (1, 1, 1, 4)]),
        ({"attn_mask": MASK}, [(2, 2, 3, 4), (2, 2, 4, 4), (2, 2, 4, 4)]),
        ({"attn_mask": MASK.double() * 0.7}, [(2, 3, 4), (2, 4, 4), (2, 4, 4)]),
        ({"attn_mask": torch.arange(24.0).view(2, 1, 3, 4).double().sin()}, [(2, 2, 3, 4), (2, 2, 4, 4), (2, 2, 4, 4)]),
        ({"is_causal": True, "enable_gqa": True}, [(2, 4, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)]),
        (
            {"enable_gqa": True, "attn_mask": torch.ones(2, 4, 3, 4, dtype=torch.bool).tril(1)},
            [(2, 4, 3, 4), (2, 1, 4, 4), (2, 1, 4, 4)],
        ),
    ],
)
def test_attention(options, shapes):
    agree(Case(lambda *qkv: attention(*qkv, **options), *shapes))


def test_attention_with_one_moving_operand_and_slices_of_queries():
    fixed = torch.linspace(-1, 1, 2 * 150 * 2, dtype=torch.float64).view(2, 150, 2).sin()
    for position in range(3):
        operands = [fixed, fixed * 2, fixed.cos()]

        def function(moved, position=position, operands=operands):
            chosen = [moved if index == position else x for index, x in enumerate(operands)]
            return attention(*chosen, is_causal=True)

        agree(Case(function, (2, 150, 2)), K=2)


def cross_entropy(targets, **options):
    return lambda z: F.cross_entropy(z, torch.tensor(targets), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "sum"},
        {"reduction": "mean"},
        {"reduction": "none"},
        {"reduction": "sum", "label_smoothing": 0.2},
        {"reduction": "mean", "label_smoothing": 0.2},
        {"reduction": "sum", "ignore_index": 2},
    ],
)
def test_cross_entropy(options):
    agree(Case(cross_entropy([0, 2, 4], **options), (3, 5)))


class Head(Case):
    """Bent inputs, an output layer of plain parameters, and their loss, which is bent again."""

    def __init__(self, options: dict, bias: bool):
        super().__init__(cross_entropy([0, 2, 4, 5, 2, 1], **options), (2, 4, 3))
        self.head = nn.Linear(3, 7, bias=bias, dtype=torch.float64)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        z = self.head(self.p[0] + self.p[0].tanh())[:, :-1]
        loss = self.function(z.reshape(-1, 7))
        return loss + 0.1 * loss * loss


@pytest.mark.parametrize("options", [{"reduction": "sum"}, {"reduction": "mean", "ignore_index": 2}])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", ["nothing", "weight", "bias", "p"])
def test_output_layer_fused_with_its_loss(options, bias, frozen):
    model = Head(options, bias)
    for name, p in model.named_parameters():
        p.requires_grad_(frozen not in name)
    engine = TaylorEngine(model, (torch.zeros(1, 1, dtype=torch.long),) * 2)
    assert any(getattr(s.node.target, "__name__", "") == "head_cross_entropy" for s in engine.plan_of_example.steps)
    agree(model)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    K=st.sampled_from([1, 2, 33]),
    rows=st.integers(1, 5),
    width=st.integers(1, 6),
    out=st.integers(1, 4),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    activation=st.sampled_from([F.silu, F.gelu, torch.tanh]),
)
def test_chains_of_any_shape(K, rows, width, out, scale, activation):
    def function(x, w, g):
        h = F.rms_norm(x * scale, (width,), g, 1e-5)
        return activation(F.linear(h, w)) * F.linear(h, w * w)

    agree(Case(function, (rows, width), (out, width), (width,)), K)


def test_an_operation_without_a_rule_is_refused_by_name():
    class Inner(nn.Module):
        def forward(self, x):
            return torch.cumsum(x, 0)

    class Outer(Case):
        def __init__(self):
            super().__init__(Inner(), (3,))

    with pytest.raises(HvpflowError, match=r"aten\.cumsum\.default.*function \(Inner\).*engine: jvp-of-grad"):
        agree(Outer())


@pytest.mark.parametrize(
    ("function", "shapes", "reason"),
    [
        (lambda q, m: attention(q, q, q, attn_mask=m), [(1, 3, 4), (3, 3)], "mask moves"),
        (lambda q: attention(q, q, q, dropout_p=0.1), [(1, 3, 4)], "dropout"),
        (lambda a: F.dropout(a, 0.5, training=True), [(3,)], "random"),
        (torch.matmul, [(3, 4), (4,)], "vector"),
        (lambda z: cross_entropy([0], weight=torch.ones(2).double())(z), [(1, 2)], "class weights"),
    ],
)
def test_arguments_beyond_a_rule_are_refused(function, shapes, reason):
    with pytest.raises(HvpflowError, match=reason):
        agree(Case(function, *shapes))
