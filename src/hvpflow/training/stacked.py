"""The Llama of ``models.llama`` for W sets of parameters at once: every product is one batched matrix product.

Legend: W workers, B sequences of each, T positions, V vocabulary, d width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from hvpflow.models.config import LlamaConfig
from hvpflow.models.llama import IGNORED_TARGET, rotary_table, rotate


def stacked_losses(parameters: Mapping[str, Tensor], config: LlamaConfig, tokens: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy of each worker's model on its own sequences.

    Args:
        parameters: name -> [W, *shape], names as in ``LlamaConfig.parameter_shapes``.
        config: sizes of one model.
        tokens: int64 [W, B, T].
        targets: int64 [W, B, T]; -100 is ignored.

    Returns:
        Nats, [W], in float32 (float64 for float64 parameters).
    """
    num_workers, batch_size, length = tokens.shape
    embedding = parameters["embedding.weight"]  # [W, V, d]
    # One table of W·V rows, in which worker w's tokens are shifted by w·V.
    shifts = torch.arange(num_workers, device=tokens.device)[:, None, None] * config.vocab_size
    x = F.embedding((tokens + shifts).flatten(1), embedding.flatten(0, 1))  # [W, B·T, d]
    cosine, sine = rotary_table(length, config.head_width, config.rope_theta, x)

    def normalised(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (config.width,), eps=config.norm_eps) * parameters[f"{name}.weight"][:, None]

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.bmm(x, parameters[f"{name}.weight"].transpose(1, 2))

    for layer in range(config.layers):
        block = f"blocks.{layer}"
        inputs = normalised(x, f"{block}.attention_norm")
        q, k, v = (
            linear(inputs, f"{block}.attention.{name}_proj")
            .reshape(num_workers * batch_size, length, config.heads, config.head_width)
            .transpose(1, 2)  # [W·B, heads, T, head width]
            for name in "qkv"
        )
        mixed = F.scaled_dot_product_attention(rotate(q, cosine, sine), rotate(k, cosine, sine), v, is_causal=True)
        x = x + linear(mixed.transpose(1, 2).reshape(x.shape), f"{block}.attention.out_proj")
        inputs = normalised(x, f"{block}.ffn_norm")
        gated = F.silu(linear(inputs, f"{block}.ffn.gate_proj")) * linear(inputs, f"{block}.ffn.up_proj")
        x = x + linear(gated, f"{block}.ffn.down_proj")
    logits = torch.bmm(normalised(x, "norm"), embedding.transpose(1, 2))  # [W, B·T, V]
    if logits.dtype != torch.float64:
        logits = logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="none")
    return losses.view(num_workers, -1).sum(1)
