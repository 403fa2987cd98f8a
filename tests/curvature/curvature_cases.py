"""Small language models that the curvature tests share: everything a rule must serve, nothing of the product's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotate(x: Tensor, theta: float = 1e4) -> Tensor:
    """Rotary embedding over [B, H, T, E], halves paired."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float32, device=x.device)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.attention_norm = nn.Parameter(torch.ones(width))
        self.ffn_norm = nn.Parameter(torch.ones(width))
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, ffn, bias=False)
        self.up = nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, width = x.shape
        h = F.rms_norm(x, (width,), self.attention_norm, 1e-5)
        sizes = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        q, k, v = (part.view(B, T, -1, self.size).transpose(1, 2) for part in self.qkv(h).split(sizes, dim=-1))
        o = F.scaled_dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        x = x + self.out(o.transpose(1, 2).reshape(B, T, width))
        h = F.rms_norm(x, (width,), self.ffn_norm, 1e-5)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class TinyLlama(nn.Module):
    """RMSNorm, rotary causal attention, SiLU-gated feed-forward, tied head without bias."""

    def __init__(
        self,
        vocab: int = 13,
        width: int = 8,
        heads: int = 2,
        kv_heads: int | None = None,
        ffn: int = 12,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads or heads, ffn) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(width))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = F.rms_norm(x, (x.shape[-1],), self.norm, 1e-5)
        logits = F.linear(x, self.embed.weight)
        if targets is None:
            return logits
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, approximate: str) -> None:
        super().__init__()
        self.heads, self.approximate = heads, approximate
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        B, T, width = x.shape
        h = self.norm1(x)
        q, k, v = (layer(h).view(B, T, self.heads, -1).permute(0, 2, 1, 3) for layer in (self.q, self.k, self.v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(o.permute(0, 2, 1, 3).contiguous().view(B, T, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=self.approximate))


class TinyGPT(nn.Module):
    """LayerNorm with bias, learned positions, GELU, biased layers, untied head with bias, optional mask."""

    def __init__(
        self,
        vocab: int = 11,
        width: int = 6,
        heads: int = 2,
        layers: int = 2,
        length: int = 16,
        approximate: str = "none",
        mask: str = "causal",
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, approximate) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)
        self.mask = mask

    def attention_mask(self, T: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        if self.mask == "causal":
            return None
        keep = torch.ones(T, T, dtype=torch.bool, device=device).tril().triu(-2)
        if self.mask == "window":
            return keep
        return torch.zeros(T, T, dtype=dtype, device=device).masked_fill(~keep, -1e9)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        T = tokens.shape[1]
        x = self.embed(tokens) + self.position(torch.arange(T, device=tokens.device))
        mask = self.attention_mask(T, tokens.device, x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), reduction="sum")


def randomized(model: nn.Module, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Give every parameter values of order one, so that no second derivative is hidden by an initialisation."""
    generator = torch.Generator().manual_seed(seed)
    model = model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(dtype), alpha=0.5) if parameter.dim() == 1 else parameter.copy_(0.5 * noise)
    return model.eval()


def random_batch(vocab: int, B: int, T: int, *, seed: int = 1, ignored: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(vocab, (2, B, T), generator=generator)
    return tokens, targets.masked_fill(torch.rand(B, T, generator=generator) < ignored, -100)


def random_directions(model: nn.Module, K: int, *, seed: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(K, *p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def dense_hessian(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """[D, D] by double backward with the plain attention kernel, an oracle apart from both engines."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    parameters = [p for p in model.parameters() if p.requires_grad]
    with sdpa_kernel(SDPBackend.MATH):
        gradients = torch.autograd.grad(model(tokens, targets), parameters, create_graph=True, allow_unused=True)
    flat = torch.cat([(g if g is not None else p * 0).reshape(-1) for g, p in zip(gradients, parameters)])
    rows = []
    for entry in flat:
        row = torch.autograd.grad(entry, parameters, retain_graph=True, allow_unused=True)
        rows.append(torch.cat([(r if r is not None else p * 0).reshape(-1) for r, p in zip(row, parameters)]))
    return torch.stack(rows).detach()


def flatten(directions: dict[str, Tensor]) -> Tensor:
    return torch.cat([stack.flatten(1) for stack in directions.values()], dim=1)
