"""A Llama-style decoder: RMSNorm, rotary positions, causal attention, gated feed-forward, tied output layer.

Shape legend: B sequences, T positions, V vocabulary, d width, H heads, h components of a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvpflow.models.config import LlamaConfig

IGNORED_TARGET = -100
"""Targets of this value add nothing to the loss (padding)."""


def rotary_table(length: int, head_width: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [length, h/2] of position·theta^(-2j/h), in float64 for a float64 ``like``, else in float32."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, head_width, 2, dtype=dtype, device=like.device) / head_width
    positions = torch.arange(length, dtype=dtype, device=like.device)
    angles = positions[:, None] * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (component j, component j + h/2) of ``x`` [B, H, T, h] by its position's angle."""
    left, right = x.chunk(2, dim=-1)
    # Under autocast x is bfloat16 and the product float32: the result goes back to x's type, as attention wants one.
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, config.width, bias=False)
        self.v_proj = nn.Linear(config.width, config.width, bias=False)
        self.out_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Map [B, T, d] to [B, T, d]."""
        q, k, v = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, T, h]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down_proj = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, d] to [B, T, d]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and feed-forward, each on a normalised copy of the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Map [B, T, d] to [B, T, d]."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """The model of a run. Its state dict holds exactly the names and order of ``LlamaConfig.parameter_shapes``.

    Rotary tables are recomputed on each call instead of being stored, so there are no buffers.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or the summed loss where ``targets`` are given.

        Args:
            tokens: int64 [B, T].
            targets: int64 [B, T]; -100 is ignored.

        Returns:
            Logits [B, T, V], or the scalar sum (not the mean) of cross-entropies in nats over the targets that count.
        """
        x = self.embedding(tokens)  # [B, T, d]
        cosine, sine = rotary_table(tokens.shape[1], self.config.head_width, self.config.rope_theta, x)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits = F.linear(self.norm(x), self.embedding.weight)
        if targets is None:
            return logits
        if logits.dtype != torch.float64:
            logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Draw the initial weights, in parameter order: normal with deviation ``init_std``, norm weights 1.

        The projections that write to the residual stream, ``out_proj`` and ``down_proj``, have
        init_std/√(2·layers), so that the stream's variance does not grow with depth (the scheme of GPT-2).
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
                continue
            std = self.config.init_std
            if name.endswith(("out_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * self.config.layers)
            parameter.normal_(0.0, std, generator=generator)
