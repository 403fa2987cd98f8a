"""Python examples in the documentation run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from hvpflow.models.config import LlamaConfig
from hvpflow.models.llama import Llama

DOCS = Path(__file__).parents[2] / "docs"


def test_engine_example():
    config = LlamaConfig(vocab_size=32, layers=1, width=16, heads=2, ffn_width=24, context_length=8)
    tokens, targets = torch.randint(32, (2, 2, 8))
    names = {"model": Llama(config).eval(), "tokens": tokens, "targets": targets}
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "engine.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(example, names)
    assert names["forms"].total.shape == (8,)
    assert names["forms"].total.isfinite().all()
