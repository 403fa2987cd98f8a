"""The computing part of a job: ḡ, the engine's check, and passes for the directions that the store lacks."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvpflow.errors import HvpflowError
from hvpflow.files import fingerprint
from hvpflow.interruption import Interrupted
from hvpflow.measure.consensus import fill_consensus
from hvpflow.measure.epoch_pass import PartialSums, run_pass
from hvpflow.measure.finished import FinishedWork
from hvpflow.measure.mean_gradient import compute_mean_gradient
from hvpflow.measure.noise import fill_noise
from hvpflow.measure.progress import Progress
from hvpflow.measure.random import rademacher
from hvpflow.measure.session import Session
from hvpflow.measure.stacks import Direction, Stack
from hvpflow.measure.vectors import (
    Vector,
    load_vector,
    member,
    save_vector,
    squared_norm,
    trainable,
    vector_hash,
    zeros_like,
)

_PARTIAL_MEAN = "partial-mean-gradient.safetensors"


@dataclasses.dataclass(kw_only=True)
class Worker:
    """Computes what is missing; everything it finishes goes to the store at once."""

    session: Session
    finished: FinishedWork
    stop: Callable[[], bool]
    report: Callable[[str], None]
    save_seconds: float
    _mean_vector: Vector | None = None

    def mean_gradient(self, mine: Sequence[Direction]) -> dict[str, Any] | None:
        """ḡ's record, where this shard has noise directions; its vector too, where one of them is to be computed."""
        noise = [direction for direction in mine if direction.kind == "noise"]
        if not noise:
            return None
        known = self.finished.context.get("mean-gradient", {})
        if known is not None:
            self.finished.mean_hash = known["sha256"]
            if not self.finished.pending(noise) or self._load_mean_gradient():
                return known
        with self.session.explain_memory(1):
            computed = compute_mean_gradient(
                self.session.model,
                self.session.reader,
                micro_batch_size=self.session.micro_batch_size,
                amp=self.session.settings.amp,
                partial_path=self.finished.context.directory / _PARTIAL_MEAN,
                partial_key=fingerprint([self.finished.context.digest, self.session.machine]),
                save_seconds=self.save_seconds,
                stop=self.stop,
                report=self.report,
                label=self.session.label,
            )
        meanwhile = self.finished.context.get("mean-gradient", {})
        if meanwhile is not None and meanwhile != known:
            # Another shard's worker was quicker. Its ḡ may differ in a last bit, and a case should have one ḡ.
            self.finished.mean_hash = meanwhile["sha256"]
            if self._load_mean_gradient():
                return meanwhile
        self._mean_vector, self.finished.mean_hash = computed.vector, vector_hash(computed.vector)
        norm = math.sqrt(squared_norm(computed.vector))
        value = {"norm": norm, "loss": computed.loss, "sha256": self.finished.mean_hash, "seconds": computed.seconds}
        save_vector(self._mean_path(), computed.vector, {})
        self.finished.context.put("mean-gradient", {}, value)
        (self.finished.context.directory / _PARTIAL_MEAN).unlink(missing_ok=True)
        return value

    def _mean_path(self) -> Path:
        return self.finished.context.directory / f"mean-gradient-{self.finished.mean_hash[:32]}.safetensors"

    def _load_mean_gradient(self) -> bool:
        """Take ḡ from the store, if it is there and whole."""
        try:
            found = load_vector(self._mean_path(), zeros_like(trainable(self.session.model)))
        except ValueError as error:
            self.report(f"damaged mean gradient in the store: {error}; it is computed again")
            return False
        if found is None or found[1]["sha256"] != self.finished.mean_hash:
            return False
        self._mean_vector = found[0]
        return True

    def clean_up(self, noise_indices: Sequence[int], directions: Sequence[Direction]) -> None:
        """Remove ḡ's vector once all noise of the case, in whichever shard, is finished; partial sums when all is."""
        context = self.finished.context
        patterns = []
        if self.finished.mean_hash and not self.finished.pending([Direction("noise", i) for i in noise_indices]):
            patterns.append("mean-gradient-*.safetensors")
            if not self.finished.pending(directions):
                patterns.append("partial-*")
        for pattern in patterns:
            for path in context.files(pattern):
                path.unlink(missing_ok=True)

    def engine_check(self, mine: Sequence[Direction]) -> dict[str, Any]:
        """The engine's check: made whenever this process is going to use the engine, else as it was kept."""
        kept = self.finished.context.get("engine-check", {})
        if kept is not None and not self.finished.pending(mine):
            return kept
        with self.session.explain_memory(1):
            check = self.session.check_engine()
        self.finished.context.put("engine-check", {}, check)
        return check

    def run_stacks(self, stacks: Sequence[Stack]) -> None:
        """Measure every direction of ``stacks`` that is not finished, a stack in one pass over the epoch."""
        pending = [stack for stack in stacks if self.finished.pending(stack)]
        if not pending:
            return
        progress = Progress(
            self.report, self.session.label, total_tokens=len(pending) * self.session.reader.epoch.num_tokens
        )
        total = sum(direction is not None for stack in stacks for direction in stack)
        done = total - sum(len(self.finished.pending(stack)) for stack in pending)
        progress.note = f"{done}/{total} directions"
        progress.say()
        for stack in pending:
            with self.session.explain_memory(len(stack)):
                done += self._run_stack(stack, progress)
            progress.note = f"{done}/{total} directions"
            progress.say()

    def _run_stack(self, stack: Stack, progress: Progress) -> int:
        """Measure the unfinished members of a stack; the others' positions hold zero directions meanwhile."""
        directions = zeros_like(trainable(self.session.model), len(stack))
        facts: dict[int, dict[str, float]] = {}
        for position, direction in enumerate(stack):
            if direction is not None and self.finished.get(direction) is None:
                if self.stop():
                    raise Interrupted(f"{self.session.label}: stopped by a signal; repeat the command to continue")
                facts[position] = self._fill(direction, member(directions, position))
        moving = [position for position, fact in facts.items() if fact["norm_squared"] > 0]
        key = {
            "partial": [None if direction is None else self.finished.entry(direction)[0] for direction in stack],
            "hvp_batch_size": self.session.hvp_batch_size,
            "machine": self.session.machine,
        }
        partial = PartialSums(self.finished.context, f"partial-{fingerprint(key)[:16]}", key, moving)
        if moving:
            sums = run_pass(
                self.session.engine,
                self.session.reader,
                directions,
                ["an empty place" if direction is None else str(direction) for direction in stack],
                batch_size=self.session.hvp_batch_size,
                partial=partial,
                save_seconds=self.save_seconds,
                stop=self.stop,
                progress=progress,
                label=self.session.label,
            )
        else:
            progress.skip(self.session.reader.epoch.num_tokens)
        for position, fact in facts.items():
            direction, tokens = stack[position], self.session.reader.epoch.num_tokens
            assert direction is not None
            value: dict[str, Any] = dict(
                fact, quadratic=0.0, gauss_newton=0.0, hvp_seconds=0.0, policy=self.session.policy
            )
            if position in moving:
                value["quadratic"] = sums.total[position] / tokens
                value["gauss_newton"] = sums.gauss_newton[position] / tokens
                value["hvp_seconds"] = sums.seconds / len(moving)
            self.finished.put(direction, value)
        partial.remove()
        return len(facts)

    def _fill(self, direction: Direction, into: Vector) -> dict[str, float]:
        """Make ``into``, a zero vector, the direction; return its squared norm, and what else is known of it."""
        started = time.monotonic()
        facts: dict[str, float] = {}
        if direction.kind == "noise":
            assert self._mean_vector is not None
            session = self.session
            facts["gradient_norm"], facts["norm_squared"] = fill_noise(
                session.model,
                session.reader,
                session.reader.epoch.sample_blocks(direction.index),
                self._mean_vector,
                into,
                micro_batch_size=session.micro_batch_size,
                amp=session.settings.amp,
            )
        elif direction.kind == "random":
            drawn = rademacher(
                self.session.shapes, seed=self.session.settings.seed, index=direction.index, dtype=self.session.dtype
            )
            for name, tensor in drawn.items():
                into[name].copy_(tensor)
            facts["norm_squared"] = float(self.session.recipe.num_parameters)
        else:
            assert self.session.checkpoint.workers is not None
            worker = self.session.checkpoint.workers[direction.index]
            facts["norm_squared"] = fill_consensus(worker, self.session.checkpoint.weights, into)
        facts["making_seconds"] = time.monotonic() - started
        if not math.isfinite(facts["norm_squared"]):
            raise HvpflowError(f"{self.session.label}: {direction} is not finite; the weights cannot be measured")
        return facts
