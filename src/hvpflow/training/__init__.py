"""Training runs from recipes: one model, or several packed ones. Knows nothing of measurements."""

from hvpflow.training.loop import TrainingInterruptedError
from hvpflow.training.train import evaluate_checkpoint, train_run

__all__ = ["TrainingInterruptedError", "evaluate_checkpoint", "train_run"]
