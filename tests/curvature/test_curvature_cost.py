"""What a pass costs: arithmetic counted by PyTorch's counter, memory by watching every tensor that lives."""

from __future__ import annotations

import weakref

import pytest
import torch
from curvature_cases import TinyLlama, random_batch, random_directions, randomized
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hvpflow.curvature.memory import estimate_bytes
from hvpflow.curvature.quadratic import TaylorEngine

VOCABULARY, WIDTH, FFN, LAYERS, B, T = 256, 32, 88, 4, 4, 32


def model_and_batch():
    model = randomized(TinyLlama(VOCABULARY, WIDTH, 4, ffn=FFN, layers=LAYERS), dtype=torch.float32)
    return model, *random_batch(VOCABULARY, B, T)


def forward_flops() -> int:
    """2 · tokens · matrix parameters (the head is one, the embedding none), and full T² attention twice."""
    matrices = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * FFN) + VOCABULARY * WIDTH
    return 2 * B * T * matrices + LAYERS * 2 * (2 * B * T * T * WIDTH)


def test_the_formula_counts_what_the_counter_counts():
    model, tokens, targets = model_and_batch()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, targets)
    assert counter.get_total_flops() == forward_flops()


@pytest.mark.parametrize(("K", "pairs", "limit"), [(8, True, 2.45), (16, True, 2.3), (8, False, 3.4), (16, False, 3.3)])
def test_arithmetic_per_direction(K, pairs, limit):
    """With the plain attention kernel the counter misses nothing: no in-place product is used, and out= is counted."""
    model, tokens, targets = model_and_batch()
    directions = random_directions(model, K)
    out = torch.empty(2, 2)
    with FlopCounterMode(display=False) as probe:
        torch.mm(out, out, out=torch.empty(2, 2))
        torch.addmm(out, torch.ones(2, 2), torch.ones(2, 2), out=out)
    assert probe.get_total_flops() == 2 * 16
    engine = TaylorEngine(model, (tokens, targets), paired_width=1 if pairs else 1000)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        engine(tokens, targets, directions)
    per_direction = counter.get_total_flops() / K / forward_flops()
    # What the method itself costs: two or three products a direction, and the primal pass's two for all.
    assert (2 if pairs else 3) + 1.5 / K < per_direction <= limit


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operations inside the block have made and that still live, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.watch(value.untyped_storage())
        return result

    def watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.alive:
            return
        self.alive[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        self.now -= self.alive.pop(key)


def peak_bytes(K: int) -> int:
    model, tokens, targets = model_and_batch()
    engine = TaylorEngine(model, (tokens, targets))
    engine.workspace.slice_elements = 1 << 13  # slices do not grow with K: they must not hide what does
    directions = random_directions(model, K)
    engine(tokens, targets, directions)
    with LiveBytes() as live:
        engine(tokens, targets, directions)
    return live.peak


def test_live_memory_grows_by_less_than_one_layers_tangents_per_direction():
    """The directions themselves are made outside and not counted."""
    one, sixteen = peak_bytes(1), peak_bytes(16)
    slice_of_attention = B * 4 * T * T * 4
    layer = B * T * (6 * WIDTH + 3 * FFN) * 4 + slice_of_attention
    growth = (sixteen - one) / 15
    assert B * T * FFN * 4 < growth < layer  # it does grow by the tangents that must be alive


@pytest.mark.parametrize("K", [1, 8])
def test_the_estimate_of_memory_is_an_upper_bound_and_not_far_above(K):
    model = randomized(TinyLlama(256, 64, 4, ffn=160, layers=3), dtype=torch.float32)
    tokens, targets = random_batch(256, 8, 64)
    engine = TaylorEngine(model, (tokens, targets))
    engine.workspace.slice_elements = 1 << 12
    engine.workspace.head_tokens, engine.workspace.head_columns = 64, 64
    directions = random_directions(model, K)
    engine(tokens, targets, directions)
    with LiveBytes() as live:
        engine(tokens, targets, directions)
    needed = live.peak + sum(stack.numel() * stack.element_size() for stack in directions.values())
    fixed, each = estimate_bytes(engine.plan_of_example, engine.workspace)
    assert needed < fixed + K * each < 1.5 * needed
