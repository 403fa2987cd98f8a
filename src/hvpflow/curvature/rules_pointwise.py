"""Rules of operations that act on each entry by itself, with one or two moving operands.

For y = φ(a, b): y' = φ_a a' + φ_b b' and D² = φ_aa a'² + 2φ_ab a'b' + φ_bb b'². The derivatives do not depend on the
direction, so they are formed once per slice of entries and serve all K directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hvpflow.curvature.rules import Call, Workspace, inner, rule, widen

aten = torch.ops.aten

Derivatives = Callable[..., tuple[Tensor, Tensor]]
"""a -> (φ'(a), φ''(a))."""


def silu(a: Tensor) -> tuple[Tensor, Tensor]:
    """φ = aσ(a): φ' = σ(1 + a(1 − σ)), φ'' = σ(1 − σ)(2 + a(1 − 2σ))."""
    s = a.sigmoid()
    return s * (1 + a * (1 - s)), s * (1 - s) * (2 + a * (1 - 2 * s))


def gelu(a: Tensor) -> tuple[Tensor, Tensor]:
    """φ = aΦ(a), Φ the normal distribution with density n: φ' = Φ + a·n, φ'' = (2 − a²)n."""
    density = torch.exp(-0.5 * a * a) * (1 / math.sqrt(2 * math.pi))
    return 0.5 * (1 + torch.erf(a * math.sqrt(0.5))) + a * density, (2 - a * a) * density


def gelu_tanh(a: Tensor) -> tuple[Tensor, Tensor]:
    """φ = ½a(1 + τ), τ = tanh(g), g = √(2/π)(a + 0.044715a³).

    τ' = (1 − τ²)g', τ'' = (1 − τ²)(g'' − 2τg'²); φ' = ½(1 + τ) + ½aτ', φ'' = τ' + ½aτ''.
    """
    c = math.sqrt(2 / math.pi)
    t = torch.tanh(c * (a + 0.044715 * a**3))
    g1, g2 = c * (1 + 3 * 0.044715 * a * a), c * 6 * 0.044715 * a
    t1 = (1 - t * t) * g1
    t2 = (1 - t * t) * (g2 - 2 * t * g1 * g1)
    return 0.5 * (1 + t) + 0.5 * a * t1, t1 + 0.5 * a * t2


def relu(a: Tensor) -> tuple[Tensor, Tensor]:
    """φ' = [a > 0], φ'' = 0 wherever it exists."""
    return (a > 0).to(a.dtype), torch.zeros_like(a)


def tanh(a: Tensor) -> tuple[Tensor, Tensor]:
    """φ' = 1 − τ², φ'' = −2τ(1 − τ²)."""
    t = torch.tanh(a)
    return 1 - t * t, -2 * t * (1 - t * t)


def sigmoid(a: Tensor) -> tuple[Tensor, Tensor]:
    """φ' = σ(1 − σ), φ'' = σ(1 − σ)(1 − 2σ)."""
    s = a.sigmoid()
    return s * (1 - s), s * (1 - s) * (1 - 2 * s)


def softplus(a: Tensor) -> tuple[Tensor, Tensor]:
    """φ = log(1 + eᵃ): φ' = σ, φ'' = σ(1 − σ)."""
    s = a.sigmoid()
    return s, s * (1 - s)


def exp(a: Tensor) -> tuple[Tensor, Tensor]:
    e = a.exp()
    return e, e


def log(a: Tensor) -> tuple[Tensor, Tensor]:
    return 1 / a, -1 / (a * a)


def sin(a: Tensor) -> tuple[Tensor, Tensor]:
    return a.cos(), -a.sin()


def cos(a: Tensor) -> tuple[Tensor, Tensor]:
    return -a.sin(), -a.cos()


def sqrt(a: Tensor) -> tuple[Tensor, Tensor]:
    """φ' = 1/(2√a), φ'' = −1/(4a√a)."""
    return 0.5 * a**-0.5, -0.25 * a**-1.5


def rsqrt(a: Tensor) -> tuple[Tensor, Tensor]:
    """φ = a^−½: φ' = −½a^−³⁄², φ'' = ¾a^−⁵⁄²."""
    return -0.5 * a**-1.5, 0.75 * a**-2.5


def reciprocal(a: Tensor) -> tuple[Tensor, Tensor]:
    return -1 / (a * a), 2 / (a * a * a)


def power(a: Tensor, exponent: float) -> tuple[Tensor, Tensor]:
    """φ = aⁿ: φ' = n aⁿ⁻¹, φ'' = n(n − 1)aⁿ⁻²."""
    if exponent == 2:
        return 2 * a, torch.full_like(a, 2)
    second = exponent * (exponent - 1)
    return exponent * a ** (exponent - 1), second * a ** (exponent - 2) if second else torch.zeros_like(a)


def unary_form(derivatives: Derivatives, a: Tensor, adjoint: Tensor, da: Tensor, *extra: Any) -> tuple[Tensor, Tensor]:
    """(φ'(a)a', ⟨ȳφ''(a), a'²⟩)."""
    first, second = derivatives(widen(a), *extra)
    return first * da, inner(da * (widen(adjoint) * second), widen(da))


def gated_form(
    derivatives: Derivatives, activation: Callable[[Tensor], Tensor], a: Tensor, b: Tensor, adjoint: Tensor,
    da: Tensor, db: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y = φ(a)b: (φ'(a)b a' + φ(a)b', ⟨ȳφ''(a)b, a'²⟩ + 2⟨ȳφ'(a), a'b'⟩)."""
    a, b, adjoint = widen(a), widen(b), widen(adjoint)
    first, second = derivatives(a)
    tangent = (first * b) * da
    tangent.addcmul_(activation(a).to(tangent.dtype), db.to(tangent.dtype))
    bent = (adjoint * second * b) * da
    bent.addcmul_((2 * adjoint * first).to(bent.dtype), db.to(bent.dtype))
    return tangent, inner(bent, widen(da))


def product_form(a: Tensor, b: Tensor, adjoint: Tensor, da: Tensor, db: Tensor) -> tuple[Tensor, Tensor]:
    """y = ab: (a'b + ab', 2⟨ȳ, a'b'⟩)."""
    tangent = widen(b) * da + widen(a) * db
    return tangent, 2 * inner(widen(adjoint) * da, widen(db).expand_as(tangent))


def quotient_form(a: Tensor, b: Tensor, adjoint: Tensor, da: Tensor, db: Tensor) -> tuple[Tensor, Tensor]:
    """y = a/b: y' = (a' − y b')/b; from yb = a twice differentiated, D² = −2y'b'/b."""
    tangent = (da - (a / b) * db) / b
    return tangent, -2 * inner(adjoint / b * tangent, db.expand_as(tangent))


def run_sliced(
    work: Workspace, form: Callable[..., tuple[Tensor, Tensor]], values: list[Tensor], tangents: list[Tensor],
    dtype: torch.dtype, *, reuse: bool = False,
) -> Tensor:  # fmt: skip
    """Run ``form(*values, *tangents)`` over slices of the entries, all of one shape; return the tangent.

    With ``reuse`` it may be written over the first of ``tangents``.

    Adds the contribution to the total. On a CPU a slice's temporaries stay in the cache; compiled code needs none.
    """
    K, shape = work.num_directions, tangents[0].shape
    size = max(1, work.slice_elements // K)
    values = [value.reshape(-1) for value in values]
    tangents = [tangent.reshape(K, -1) for tangent in tangents]
    length = values[0].shape[0]
    if length <= size:
        tangent, contribution = form(*values, *tangents)
        work.total += contribution
        return tangent.to(dtype).view(shape)
    in_place = reuse and tangents[0].dtype == dtype
    output = tangents[0] if in_place else tangents[0].new_empty((K, length), dtype=dtype)
    for start in range(0, length, size):
        part = slice(start, start + size)
        tangent, contribution = form(*(v[part] for v in values), *(t[:, part] for t in tangents))
        output[:, part] = tangent
        work.total += contribution
    return output.view(shape)


def _stored(call: Call, *names: str) -> torch.dtype:
    """Precision of the output's tangent: that of the operands' tangents."""
    dtypes = [call.tangents[name].dtype for name in names]
    return dtypes[0] if len(dtypes) == 1 else torch.promote_types(*dtypes)


def _unary(operation: Any, derivatives: Derivatives, *extra: str) -> None:
    def form(a: Tensor, adjoint: Tensor, da: Tensor) -> tuple[Tensor, Tensor]:
        return unary_form(derivatives, a, adjoint, da)

    @rule(operation, reads=lambda moving: ("self",), curved=lambda moving: True)
    def apply(call: Call) -> Tensor:
        assert call.adjoint is not None
        return run_sliced(
            call.work, call.work.pointwise(form), [call["self"], call.adjoint], [call.tangent("self")],
            _stored(call, "self"),
        )  # fmt: skip


for _operation, _derivatives in (
    (aten.silu.default, silu),
    (aten.tanh.default, tanh),
    (aten.sigmoid.default, sigmoid),
    (aten.exp.default, exp),
    (aten.log.default, log),
    (aten.sin.default, sin),
    (aten.cos.default, cos),
    (aten.sqrt.default, sqrt),
    (aten.rsqrt.default, rsqrt),
    (aten.reciprocal.default, reciprocal),
    (aten.relu.default, relu),
):
    _unary(_operation, _derivatives)


def square(a: Tensor) -> tuple[Tensor, Tensor]:
    return power(a, 2)


_unary(aten.square.default, square)


def gelu_form(a: Tensor, adjoint: Tensor, da: Tensor) -> tuple[Tensor, Tensor]:
    return unary_form(gelu, a, adjoint, da)


def gelu_tanh_form(a: Tensor, adjoint: Tensor, da: Tensor) -> tuple[Tensor, Tensor]:
    return unary_form(gelu_tanh, a, adjoint, da)


def _self(moving: frozenset[str]) -> tuple[str, ...]:
    return ("self",)


@rule(aten.gelu.default, reads=_self, curved=bool)
def gelu_rule(call: Call) -> Tensor:
    assert call.adjoint is not None
    form = call.work.pointwise(gelu_tanh_form if call["approximate"] == "tanh" else gelu_form)
    values = [call["self"], call.adjoint]
    return run_sliced(call.work, form, values, [call.tangent("self")], _stored(call, "self"))


@rule(aten.softplus.default, reads=_self, curved=bool)
def softplus_rule(call: Call) -> Tensor:
    """log(1 + e^(βa))/β, which PyTorch replaces by a itself where βa exceeds its threshold."""
    assert call.adjoint is not None
    beta, threshold = call["beta"], call["threshold"]

    def derivatives(a: Tensor) -> tuple[Tensor, Tensor]:
        first, second = softplus(beta * a)
        straight = beta * a > threshold
        return first.masked_fill(straight, 1), (beta * second).masked_fill(straight, 0)

    tangent, contribution = unary_form(derivatives, call["self"], call.adjoint, call.tangent("self"))
    call.work.total += contribution
    return tangent


@rule(aten.pow.Tensor_Scalar, reads=_self, curved=bool)
def power_rule(call: Call) -> Tensor:
    assert call.adjoint is not None
    tangent, contribution = unary_form(power, call["self"], call.adjoint, call.tangent("self"), call["exponent"])
    call.work.total += contribution
    return tangent


def _factors(moving: frozenset[str]) -> tuple[str, ...]:
    """A product needs the value of a factor only where the other one moves."""
    return tuple(name for name, other in (("self", "other"), ("other", "self")) if other in moving)


def _both(moving: frozenset[str]) -> bool:
    return {"self", "other"} <= moving


@rule(aten.mul.Tensor, reads=_factors, curved=_both)
def product(call: Call) -> Tensor:
    K, shape = call.work.num_directions, call.output.shape
    if not _both(frozenset(call.tangents)):
        moved, fixed = ("self", "other") if "self" in call.tangents else ("other", "self")
        return (call.aligned(moved) * call[fixed]).expand(K, *shape)
    a, b, da, db = call["self"], call["other"], call.aligned("self"), call.aligned("other")
    assert call.adjoint is not None
    if a.shape == b.shape:
        form = call.work.pointwise(product_form)
        return run_sliced(call.work, form, [a, b, call.adjoint], [da, db], _stored(call, "self", "other"))
    tangent, contribution = product_form(a, b, call.adjoint, da, db)
    call.work.total += contribution
    return tangent


@rule(
    aten.div.Tensor,
    reads=lambda moving: ("self", "other") if "other" in moving else ("other",),
    curved=lambda moving: "other" in moving,
)
def quotient(call: Call) -> Tensor:
    K, shape = call.work.num_directions, call.output.shape
    if "other" not in call.tangents:
        return (call.aligned("self") / call["other"]).expand(K, *shape)
    assert call.adjoint is not None
    db = call.aligned("other")
    da = call.aligned("self") if "self" in call.tangents else torch.zeros_like(db)
    tangent, contribution = quotient_form(call["self"], call["other"], call.adjoint, da, db)
    call.work.total += contribution
    return tangent


class _Gate(torch.autograd.Function):
    """φ(a)·b that keeps a and b alone for its backward pass."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.name = name
        return ACTIVATIONS[name][0](a) * b

    @staticmethod
    def backward(ctx: Any, *adjoints: Tensor) -> Any:
        a, b = ctx.saved_tensors
        adjoint = adjoints[0]
        with torch.enable_grad():  # PyTorch's own first derivative takes one pass
            a = a.detach().requires_grad_()
            active = ACTIVATIONS[ctx.name][0](a)
        da = torch.autograd.grad(active, a, adjoint * b)[0] if ctx.needs_input_grad[0] else None
        return da, adjoint * active.detach() if ctx.needs_input_grad[1] else None, None


def _gelu_tanh(a: Tensor) -> Tensor:
    return F.gelu(a, approximate="tanh")


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Derivatives]] = {
    "silu": (F.silu, silu),
    "gelu": (F.gelu, gelu),
    "gelu_tanh": (_gelu_tanh, gelu_tanh),
    "relu": (F.relu, relu),
    "sigmoid": (torch.sigmoid, sigmoid),
    "tanh": (torch.tanh, tanh),
}


def gated_product(a: Tensor, b: Tensor, name: str) -> Tensor:
    """φ(a)·b as one operation, φ named in ACTIVATIONS; the graph puts it where it finds the pair."""
    return _Gate.apply(a, b, name)


def _gate_form(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    activation, derivatives = ACTIVATIONS[name]

    def form(a: Tensor, b: Tensor, adjoint: Tensor, da: Tensor, db: Tensor) -> tuple[Tensor, Tensor]:
        return gated_form(derivatives, activation, a, b, adjoint, da, db)

    return form


_GATE_FORMS = {name: _gate_form(name) for name in ACTIVATIONS}


@rule(gated_product, reads=lambda moving: ("a", "b"), curved=bool)
def gated_product_rule(call: Call) -> Tensor:
    assert call.adjoint is not None
    form = call.work.pointwise(_GATE_FORMS[call["name"]])
    values, tangents = [call["a"], call["b"], call.adjoint], [call.tangent("a"), call.tangent("b")]
    return run_sliced(call.work, form, values, tangents, _stored(call, "a", "b"), reuse="a" in call.owned)
