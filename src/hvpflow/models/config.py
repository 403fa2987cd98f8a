"""Sizes of a Llama-style model. Imports no torch: workflow planning reads it in every job."""

from __future__ import annotations

from dataclasses import dataclass

from hvpflow.errors import HvpflowError


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """The ``model`` section of a recipe.

    The defaults are the 20 M-parameter model. The output layer is the transposed embedding, so one
    ``embedding.weight`` of shape (vocab_size, width) is counted once.
    """

    vocab_size: int = 32000
    """Size of the vocabulary, 2 to 65536 (tokens are stored as 16-bit integers)."""
    layers: int = 8
    """Transformer blocks."""
    width: int = 320
    """Size of the residual stream; ``width / heads`` must be even, as rotary embedding pairs components."""
    heads: int = 5
    """Attention heads."""
    ffn_width: int = 896
    """Inner size of the gated feed-forward layers."""
    context_length: int = 1024
    """Tokens in a training sequence."""
    rope_theta: float = 1e4
    """Base of the rotary angles."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of initial matrices."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "ffn_width", "context_length", "rope_theta", "norm_eps", "init_std"):
            value = getattr(self, name)
            if not value > 0:
                raise HvpflowError(f"model.{name} is {value}, expected a positive number")
        if not 2 <= self.vocab_size <= 65536:
            raise HvpflowError(f"model.vocab_size is {self.vocab_size}, expected 2 to 65536")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise HvpflowError(
                f"model.width {self.width} divided by model.heads {self.heads} is {self.width / self.heads:g}, "
                "expected an even whole number: change one of the two"
            )

    @property
    def head_width(self) -> int:
        """Components of one attention head."""
        return self.width // self.heads

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters, V d + layers (4 d² + 3 d f + 2 d) + d."""
        d = self.width
        per_layer = 4 * d * d + 3 * d * self.ffn_width + 2 * d
        return self.vocab_size * d + self.layers * per_layer + d

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter, in module order (that of gradients, random signs and packed storage)."""
        d, f = self.width, self.ffn_width
        shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (self.vocab_size, d)}
        for layer in range(self.layers):
            block = f"blocks.{layer}"
            shapes[f"{block}.attention_norm.weight"] = (d,)
            for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
                shapes[f"{block}.attention.{projection}.weight"] = (d, d)
            shapes[f"{block}.ffn_norm.weight"] = (d,)
            shapes[f"{block}.ffn.gate_proj.weight"] = (f, d)
            shapes[f"{block}.ffn.up_proj.weight"] = (f, d)
            shapes[f"{block}.ffn.down_proj.weight"] = (d, f)
        shapes["norm.weight"] = (d,)
        return shapes
