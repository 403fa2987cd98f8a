"""The training loop: exact epoch boundaries, validation, logs, exports, and states from which it continues to the bit.

The loop knows nothing of how many models it trains: a Learner makes the updates and writes the files of a position.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from hvpflow.data.cache import TokenCache
from hvpflow.data.epochs import training_stream
from hvpflow.data.loader import to_batch
from hvpflow.errors import HvpflowError
from hvpflow.files import write_json
from hvpflow.interruption import Interrupted, StopRequest
from hvpflow.runs.recipe import Recipe
from hvpflow.training.learner import Learner, Update
from hvpflow.training.metrics import Interval, MetricsLog, evaluation_metrics, peak_memory_bytes
from hvpflow.training.schedule import make_schedule
from hvpflow.training.validation import validate, validation_complete

_SAVE_SECONDS = 30.0
"""At most this much training is lost to a crash (or twenty times what saving a large model's state takes)."""
_REPORT_SECONDS = 5.0


@dataclass(kw_only=True)
class Position:
    """How far a training is."""

    cursor: int = 0
    """Blocks consumed."""
    step: int = 0
    """Updates made."""
    completed_epochs: int = 0
    """Epochs whose end (validation, exports) is done too."""
    best_loss: float | None = None
    """Lowest loss on the validation subset so far."""
    best_epoch: int | None = None
    interval: Interval = field(default_factory=Interval)
    """Updates that no ``train`` row has reported yet."""
    training_seconds: float = 0.0
    """Time spent in updates."""


class Saver(Protocol):
    """Writes files of a learner's position; see ``states``."""

    def save_rolling(self, position: Position) -> None:
        """Write the private state that an interrupted training continues from."""
        ...

    def export_epoch(self, position: Position) -> bool:
        """Write what the recipe keeps of the epoch just completed; whether that includes a resumable state."""
        ...

    def export_final(self, position: Position) -> None:
        """Write what the recipe keeps of the end."""
        ...


class Trainer:
    """One training from a position to its end."""

    def __init__(
        self,
        recipe: Recipe,
        cache: TokenCache,
        learner: Learner,
        saver: Saver,
        directory: Path,
        *,
        device: torch.device,
        stop: StopRequest,
        progress: Callable[[str], None],
        position: Position | None = None,
    ) -> None:
        sampling = recipe.sampling()
        self.recipe, self.cache, self.learner, self.saver, self.device = recipe, cache, learner, saver, device
        self.position = position or Position()
        self._split = cache.split("train")
        self._stream = training_stream(sampling, self._split)
        self._boundaries = sampling.boundaries()
        self._batch_blocks = sampling.batch_blocks
        self.num_steps = self._boundaries[-1] // self._batch_blocks
        self._schedule = make_schedule(recipe, self.num_steps)
        self._metrics = MetricsLog(directory / "metrics.jsonl")
        self._directory = directory
        self._stop, self._progress = stop, progress
        self._began = self._saved = self._reported = time.monotonic()
        self._save_took = 0.0
        self._first_cursor = self.position.cursor

    def run(self) -> dict[str, Any]:
        """Train to the end; returns the contents of result.json.

        Raises:
            Interrupted: a signal came; the state is saved.
            HvpflowError: a loss or gradient is not finite; earlier states are kept.
        """
        num_epochs = len(self._boundaries)
        for epoch in range(self.position.completed_epochs + 1, num_epochs + 1):
            while self.position.cursor < self._boundaries[epoch - 1]:
                self._step(epoch)
                self._stop_if_asked()
                if time.monotonic() - self._saved >= max(_SAVE_SECONDS, 20 * self._save_took):
                    self._save()
            self._end_epoch(epoch)
        return self._finish()

    def _step(self, epoch: int) -> None:
        position, context = self.position, self.recipe.model.context_length
        began = time.perf_counter()
        block_ids = self._stream[position.cursor : position.cursor + self._batch_blocks]
        tokens, targets = to_batch(self._split.read_blocks(block_ids, context), self.device)
        step = position.step + 1
        rate = self._schedule.rate(step)
        update = self.learner.update(tokens, targets, rate, step)
        self._check_finite(update, step, epoch, rate)
        position.step, position.cursor = step, position.cursor + len(block_ids)
        seconds = time.perf_counter() - began
        position.interval.add(loss=update.loss, tokens=len(block_ids) * context, seconds=seconds)
        position.training_seconds += seconds
        at_boundary = position.cursor == self._boundaries[epoch - 1]
        if time.monotonic() - self._reported >= _REPORT_SECONDS and not at_boundary:
            self._report(epoch, position.interval.loss(), rate)
        if step % self.recipe.training.log_every == 0 or at_boundary:
            self._log_updates(epoch, update, rate)

    def _log_updates(self, epoch: int, update: Update, rate: float) -> None:
        position, interval = self.position, self.position.interval
        row = {
            "event": "train",
            "step": position.step,
            "epoch": epoch,
            "tokens": self._tokens(),
            "loss": interval.loss(),
            "lr": rate,
            "grad_norm": update.gradient_norm,
            "tokens_per_second": interval.tokens / max(interval.seconds, 1e-9),
            "training_seconds": interval.seconds,
            "elapsed_tokens_per_second": self._tokens_per_second(),
            "peak_memory_bytes": peak_memory_bytes(self.device),
            **update.extra,
        }
        self._metrics.append(row)
        position.interval = Interval()

    def _end_epoch(self, epoch: int) -> None:
        position = self.position
        metrics = self._validate(subset=True)
        if position.best_loss is None or metrics["loss"] < position.best_loss:
            position.best_loss, position.best_epoch = metrics["loss"], epoch
        row = metrics | {"tokens": self._tokens()}
        row |= {"event": "validation", "epoch": epoch, "step": position.step, "evaluation_tokens": metrics["tokens"]}
        self._metrics.append(row)
        position.completed_epochs = epoch
        if not self.saver.export_epoch(position):
            self._save()
        self._saved = time.monotonic()
        self._write_best()
        self._report(epoch, metrics["loss"], None)
        self._stop_if_asked()

    def _finish(self) -> dict[str, Any]:
        position = self.position
        metrics = self._validate(subset=False)
        self.saver.export_final(position)
        row = metrics | {"tokens": self._tokens()}
        row |= {"event": "final_validation", "step": position.step, "evaluation_tokens": metrics["tokens"]}
        self._metrics.append(row)
        self._write_best()
        elapsed = time.monotonic() - self._began
        self._progress(
            f"validation loss {metrics['loss']:.4f} (perplexity {metrics['perplexity']:.1f}) "
            f"on all {metrics['tokens']} held-out tokens"
        )
        return {
            "status": "complete",
            "parameters": self.recipe.num_parameters,
            "tokens": self._tokens(),
            "step": position.step,
            "epochs": position.completed_epochs,
            "best_subset_loss": position.best_loss,
            "best_epoch": position.best_epoch,
            "final_validation": metrics,
            "seconds_this_session": elapsed,
            "training_seconds": position.training_seconds,
            "training_elapsed_seconds": elapsed,
            "training_tokens_per_second": self._tokens() / max(position.training_seconds, 1e-9),
            "elapsed_tokens_per_second": self._tokens_per_second(),
            "peak_memory_bytes": peak_memory_bytes(self.device),
        }

    def _validate(self, *, subset: bool) -> dict[str, Any]:
        began = time.perf_counter()
        loss, tokens = validate(
            self.learner.model(),
            self.recipe,
            self.cache,
            subset=subset,
            device=self.device,
            check=self._stop_if_asked,
        )
        if not math.isfinite(loss):
            raise HvpflowError(f"the validation loss became {loss} after step {self.position.step}; {self._remedy()}")
        seconds = time.perf_counter() - began
        complete = validation_complete(self.cache)
        return evaluation_metrics(loss, tokens, seconds, "subset" if subset else "full", complete)

    def _check_finite(self, update: Update, step: int, epoch: int, rate: float) -> None:
        if math.isfinite(update.loss) and math.isfinite(update.gradient_norm):
            return
        raise HvpflowError(
            f"the loss became {update.loss:.6g} and its gradient's norm {update.gradient_norm:.6g} at step {step} "
            f"(epoch {epoch}, learning rate {rate:.3g}); {self._remedy()}"
        )

    def _remedy(self) -> str:
        return (
            "lower optimizer.lr, lengthen the warm-up or set optimizer.grad_clip; "
            f"what was saved before is kept in {self._directory}"
        )

    def _stop_if_asked(self) -> None:
        if not self._stop():
            return
        self._save()
        assert self._stop.signal is not None
        raise Interrupted(
            f"training was interrupted by {self._stop.signal.name} after step {self.position.step} of "
            f"{self.num_steps}; its state is saved: repeat the command to continue"
        )

    def _save(self) -> None:
        began = time.monotonic()
        self.saver.save_rolling(self.position)
        self._saved = time.monotonic()
        self._save_took = self._saved - began

    def _write_best(self) -> None:
        name = f"epoch-{self.position.best_epoch:03d}.safetensors"
        weights = name if (self._directory / name).is_file() else None
        record = {"epoch": self.position.best_epoch, "loss": self.position.best_loss, "weights": weights}
        write_json(self._directory / "best.json", record)

    def _tokens(self) -> int:
        return self.position.cursor * self.recipe.model.context_length

    def _tokens_per_second(self) -> float:
        """Of this session, validation and saving included."""
        read = (self.position.cursor - self._first_cursor) * self.recipe.model.context_length
        return read / max(time.monotonic() - self._began, 1e-9)

    def _report(self, epoch: int, loss: float, rate: float | None) -> None:
        """Tell how far the training is: between epochs with the training loss, after one with the validation loss."""
        now = time.monotonic()
        if rate is None and now - self._reported < _REPORT_SECONDS and epoch not in (1, len(self._boundaries)):
            return  # epochs may be much shorter than a reader's patience
        self._reported = now
        speed = self._tokens_per_second()
        left = (self._boundaries[-1] - self.position.cursor) * self.recipe.model.context_length / max(speed, 1e-9)
        kind = "validation loss" if rate is None else "loss"
        shown_rate = "" if rate is None else f", lr {rate:.3g}"
        self._progress(
            f"epoch {epoch}/{len(self._boundaries)}, step {self.position.step}/{self.num_steps}, "
            f"{self._tokens():,} tokens: {kind} {loss:.4f}{shown_rate}, {speed:,.0f} tokens/s, {_clock(left)} left"
        )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
