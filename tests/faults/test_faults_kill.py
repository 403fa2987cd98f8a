"""SIGKILL at random moments and around every file operation: the repeated commands end where undisturbed ones do."""

from __future__ import annotations

import signal

import pytest
from faults_cases import ROUNDS, TALLY, Bench, choices

KILLS = {"prepare": 1, "train": 3, "inspect": 1, "measure": 2, "samples": 1, "summary": 1, "figures": 1}
"""Kills of one step in one round."""


@pytest.mark.parametrize("trial", range(ROUNDS))
def test_killed_at_random_moments(bench: Bench, trial: int) -> None:
    """A whole analysis in which every step is killed again and again, each time a little later on average."""
    choose = choices("moments", trial)
    bench.restore(before=bench.steps[0])
    for step in bench.steps:
        for attempt in range(KILLS[step.name]):
            moment = choose.uniform(0, bench.cpu[step])
            number = choose.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
            context = f"trial {trial}, {step.words}, attempt {attempt}, {number.name} after {moment:.3f} s"
            status = bench.run(step, kill_after=moment, extra=choose.uniform(0, 0.01), signal=number)
            bench.check_whole(context)
            if status == 0:
                break
            assert status in (-number, 75), f"{context}: status {status}\n{bench.server.said()}"
            TALLY[f"{step.name} ended by {number.name} at a random moment"] += 1
        bench.finish(step, f"trial {trial}")
    bench.check_equal(f"trial {trial}")


@pytest.mark.parametrize("name", list(KILLS))
def test_killed_around_file_operations(bench: Bench, name: str) -> None:
    """Just before or after a renaming, flush, link, … or with half of a file written."""
    step = bench.find(name)
    moments = list(range(1, bench.operations[step] + 1))
    choose = choices("operations", name)
    count = min(len(moments), {"prepare": 4, "train": 6, "measure": 4, "figures": 1}.get(name, 2) * ROUNDS)
    for moment in sorted(choose.sample(moments, count)):
        context = f"{step.words} killed at file operation {moment} of {len(moments)}"
        bench.restore(before=step)
        status = bench.run(step, kill_at=moment)
        bench.check_whole(context)
        if status == 0:
            continue  # how often progress is saved depends on time, so this run had fewer operations
        assert status == -signal.SIGKILL, f"{context}: status {status}\n{bench.server.said()}"
        TALLY[f"{name} killed around a file operation"] += 1
        bench.finish(step, context)
        for later in bench.steps[bench.steps.index(step) + 1 :] if moment == moments[0] else []:
            bench.finish(later, context)
        bench.check_whole(context)
