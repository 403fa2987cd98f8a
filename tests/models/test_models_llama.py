"""The Llama model against a plain numpy implementation in float64, and its names, counts and types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvpflow.errors import HvpflowError
from hvpflow.models.config import LlamaConfig
from hvpflow.models.llama import Llama, rotary_table, rotate
from hvpflow.runs.recipe import load_recipe

RECIPES = Path(__file__).resolve().parents[2] / "config" / "recipes"
SMALL = LlamaConfig(
    vocab_size=37, layers=3, width=24, heads=2, ffn_width=40, context_length=16, rope_theta=100.0, norm_eps=1e-3
)


def small_model(dtype: torch.dtype = torch.float64) -> Llama:
    model = Llama(SMALL).to(dtype)
    model.init_weights(torch.Generator().manual_seed(3))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # Norm weights of 1 would hide a forgotten multiplication.
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(4))
            else:
                parameter.mul_(10)
    return model


def small_batch() -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.randint(0, SMALL.vocab_size, (3, 17), generator=torch.Generator().manual_seed(5))
    return numbers[:, :-1], numbers[:, 1:]


def numpy_logits(weights: dict[str, np.ndarray], config: LlamaConfig, tokens: np.ndarray) -> np.ndarray:
    """Logits of one sequence [T] -> [T, V], position by position and head by head."""

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * weight

    size = config.width // config.heads
    frequencies = np.array([config.rope_theta ** (-2 * j / size) for j in range(size // 2)])

    def turn(vector: np.ndarray, position: int) -> np.ndarray:
        pairs = (vector[: size // 2] + 1j * vector[size // 2 :]) * np.exp(1j * position * frequencies)
        return np.concatenate([pairs.real, pairs.imag])

    x = weights["embedding.weight"][tokens]
    for layer in range(config.layers):
        w = {name.removeprefix(f"blocks.{layer}."): value for name, value in weights.items()}
        y = norm(x, w["attention_norm.weight"])
        q, k, v = (y @ w[f"attention.{name}_proj.weight"].T for name in "qkv")
        mixed = np.zeros_like(x)
        for head in range(config.heads):
            part = slice(head * size, (head + 1) * size)
            for t in range(len(tokens)):
                query = turn(q[t, part], t)
                scores = np.array([query @ turn(k[s, part], s) for s in range(t + 1)]) / np.sqrt(size)
                attention = np.exp(scores - scores.max())
                mixed[t, part] = attention / attention.sum() @ v[: t + 1, part]
        x = x + mixed @ w["attention.out_proj.weight"].T
        y = norm(x, w["ffn_norm.weight"])
        gate = y @ w["ffn.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["ffn.up_proj.weight"].T)) @ w["ffn.down_proj.weight"].T
    return norm(x, weights["norm.weight"]) @ weights["embedding.weight"].T


@pytest.fixture
def expected() -> tuple[np.ndarray, float]:
    """Logits [B, T, V] and summed loss of the plain implementation."""
    weights = {name: value.numpy() for name, value in small_model().state_dict().items()}
    tokens, targets = small_batch()
    logits = np.stack([numpy_logits(weights, SMALL, row) for row in tokens.numpy()])
    chosen = np.take_along_axis(logits, targets.numpy()[..., None], -1)[..., 0]
    return logits, float((np.log(np.exp(logits).sum(-1)) - chosen).sum())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_forward_equals_plain_implementation(
    expected: tuple[np.ndarray, float], dtype: torch.dtype, tolerance: float
) -> None:
    model, (tokens, targets) = small_model().to(dtype), small_batch()
    logits, loss = model(tokens), model(tokens, targets)
    assert logits.dtype == loss.dtype == dtype
    np.testing.assert_allclose(logits.detach().numpy(), expected[0], rtol=0, atol=tolerance * np.abs(expected[0]).max())
    assert float(loss.detach()) == pytest.approx(expected[1], rel=tolerance)


def test_loss_is_a_sum_that_skips_ignored_targets() -> None:
    model, (tokens, targets) = small_model(), small_batch()
    padded = targets.clone()
    padded[1:] = -100
    assert float(model(tokens, padded).detach()) == pytest.approx(
        float(model(tokens[:1], targets[:1]).detach()), rel=1e-12
    )


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model, (tokens, _) = small_model(), small_batch()
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % SMALL.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
    assert not torch.allclose(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize(
    ("given_type", "table_type"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_rotary_angles_are_computed_in_full_precision(given_type: torch.dtype, table_type: torch.dtype) -> None:
    cosine, sine = rotary_table(1000, 8, 1e4, torch.zeros(1, dtype=given_type))
    assert cosine.dtype == sine.dtype == table_type
    assert rotate(torch.ones(1, 1, 1000, 8, dtype=given_type), cosine, sine).dtype == given_type
    angles = np.arange(1000)[:, None] * 1e4 ** (-np.arange(0, 8, 2) / 8)
    # float32 angles near 1000 are known to about 1000 · 2^-24.
    tolerance = 1e-11 if table_type == torch.float64 else 2e-4
    np.testing.assert_allclose(cosine.numpy(), np.cos(angles), rtol=0, atol=tolerance)


def test_autocast_keeps_loss_and_gradients_in_float32() -> None:
    model, (tokens, targets) = small_model(torch.float32), small_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(tokens).dtype == torch.bfloat16
        loss = model(tokens, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}
    assert float(loss.detach()) == pytest.approx(float(model(tokens, targets).detach()), rel=2e-2)


def test_state_dict_has_the_documented_names_order_and_shapes_and_no_buffers() -> None:
    model = Llama(SMALL)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert list(shapes.items()) == list(SMALL.parameter_shapes().items())
    assert [name for name, _ in model.named_parameters()] == list(shapes)
    assert list(shapes)[:6] == [
        "embedding.weight",
        "blocks.0.attention_norm.weight",
        *(f"blocks.0.attention.{name}_proj.weight" for name in "qkv"),
        "blocks.0.attention.out_proj.weight",
    ]
    assert list(shapes)[-1] == "norm.weight"
    assert not list(model.buffers())


def test_export_gives_the_same_loss() -> None:
    model, batch = small_model(), small_batch()
    exported = torch.export.export(model, batch).module()
    torch.testing.assert_close(exported(*batch), model(*batch), rtol=1e-12, atol=0)


def test_initial_weights() -> None:
    config = LlamaConfig(vocab_size=500, layers=2, width=64, heads=2, ffn_width=96, init_std=0.03)
    first, second = Llama(config), Llama(config)
    first.init_weights(torch.Generator().manual_seed(1))
    second.init_weights(torch.Generator().manual_seed(1))
    for (name, one), two in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)
        if one.ndim == 1:
            assert torch.equal(one, torch.ones_like(one))
            continue
        std = 0.03 / 2 if name.endswith(("out_proj.weight", "down_proj.weight")) else 0.03
        # The standard deviation of n normal draws scatters by 1/sqrt(2n), here at most 1.1 %.
        assert float(one.detach().std()) == pytest.approx(std, rel=0.05)


@given(
    vocab_size=st.integers(2, 300),
    layers=st.integers(1, 4),
    heads=st.integers(1, 4),
    half=st.integers(1, 5),
    ffn_width=st.integers(1, 40),
)
@settings(max_examples=25, deadline=None)
def test_parameter_count(vocab_size: int, layers: int, heads: int, half: int, ffn_width: int) -> None:
    config = LlamaConfig(vocab_size=vocab_size, layers=layers, heads=heads, width=2 * half * heads, ffn_width=ffn_width)
    with torch.device("meta"):
        model = Llama(config)
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "count"), [("demo", 207_296), ("20m", 20_403_520), ("50m", 48_507_392), ("90m", 91_605_120)]
)
def test_presets_have_their_parameter_counts(name: str, count: int) -> None:
    config = load_recipe(RECIPES / f"{name}.yaml").model
    with torch.device("meta"):
        model = Llama(config)
    assert config.num_parameters == count == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"width": 50, "heads": 4}, "model.width 50"),
        ({"width": 15, "heads": 5}, "even"),
        ({"vocab_size": 1}, "2 to 65536"),
        ({"vocab_size": 65537}, "2 to 65536"),
        ({"layers": 0}, "model.layers is 0"),
        ({"norm_eps": 0.0}, "model.norm_eps"),
        ({"heads": -1}, "model.heads"),
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, float], named: str) -> None:
    with pytest.raises(HvpflowError, match=named):
        LlamaConfig(**change)  # type: ignore[arg-type]
