"""The language models, as plain PyTorch modules."""
