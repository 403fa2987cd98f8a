"""Curvature of a language model's loss along its training."""

__version__ = "0.1.0"
