"""Causal language models of the `transformers` package, as they are: tiny and random, several architectures."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from curvature_cases import random_batch, random_directions
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hvpflow.curvature.quadratic import TaylorEngine
from hvpflow.curvature.reference import jvp_of_grad

transformers = pytest.importorskip("transformers", reason="needs the package transformers: pip install transformers")

SIZES = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = SIZES | TOKENS | {"intermediate_size": 48}
GROUPED = LLAMA | {"num_key_value_heads": 2}
GPT2 = TOKENS | {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
OPT = SIZES | TOKENS | {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}


class SummedLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize(
    ("architecture", "options", "precision"),
    [
        ("gpt2", GPT2, 1e-12),
        ("gpt_neox", LLAMA, 1e-12),
        ("opt", OPT, 1e-12),
        # These take their norms in float32, whatever the model's precision.
        ("llama", GROUPED, 1e-5),
        ("mistral", GROUPED | {"sliding_window": 4}, 1e-5),
        ("qwen3", GROUPED | {"head_dim": 8}, 1e-5),
        ("gemma2", GROUPED | {"head_dim": 8}, 1e-5),
        ("phi3", LLAMA, 1e-5),
        ("olmo2", LLAMA, 1e-5),
    ],
)
def test_causal_language_models(architecture, options, precision):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(architecture, **options)
    model = SummedLoss(transformers.AutoModelForCausalLM.from_config(config)).double().eval()
    tokens, targets = random_batch(97, 2, 9, ignored=0.2)
    directions = random_directions(model, 3)
    with sdpa_kernel(SDPBackend.MATH):
        expected = jvp_of_grad(model, tokens, targets, directions)
    assert TaylorEngine(model, (tokens, targets))(tokens, targets, directions).difference(expected) < precision
