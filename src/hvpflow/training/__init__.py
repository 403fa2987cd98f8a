"""Training runs from recipes: one model, or several packed ones. Knows nothing of measurements."""

from hvpflow.training.train import evaluate_checkpoint, train_run

__all__ = ["evaluate_checkpoint", "train_run"]
