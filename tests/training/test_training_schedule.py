"""Learning-rate schedules against closed forms and the rates that other runs logged."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvpflow.errors import HvpflowError
from hvpflow.runs.recipe import load_recipe
from hvpflow.training.schedule import Schedule, make_schedule


def cosine(num_steps: int = 100, warmup_steps: float = 10, min_ratio: float = 0.1) -> Schedule:
    return Schedule(name="cosine", peak=2.0, num_steps=num_steps, warmup_steps=warmup_steps, min_ratio=min_ratio)


def test_cosine_passes_through_its_corners() -> None:
    schedule = cosine()
    assert schedule.rate(1) == pytest.approx(0.2)
    assert schedule.rate(10) == 2.0
    assert schedule.rate(55) == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert schedule.rate(100) == pytest.approx(0.2)


def test_wsd_is_flat_then_falls_linearly_to_zero() -> None:
    schedule = Schedule(name="wsd", peak=3.0, num_steps=100, warmup_steps=10, decay_fraction=0.2)
    assert schedule.rate(5) == 1.5
    assert {schedule.rate(step) for step in range(10, 81)} == {3.0}
    assert schedule.rate(90) == pytest.approx(1.5)
    assert schedule.rate(100) == 0.0


@given(st.integers(1, 400), st.floats(0, 1), st.floats(0, 1), st.sampled_from(["cosine", "wsd"]))
def test_rates_rise_to_the_peak_once_and_never_rise_again(steps: int, share: float, value: float, name: str) -> None:
    warmup = int(share * 0.5 * steps)
    schedule = Schedule(
        name=name, peak=1.0, num_steps=steps, warmup_steps=warmup, min_ratio=value, decay_fraction=value * 0.5
    )
    rates = [schedule.rate(step) for step in range(1, steps + 1)]
    assert all(0.0 <= rate <= 1.0 for rate in rates)
    assert all(before < after for before, after in itertools.pairwise(rates[:warmup]))
    assert all(before >= after for before, after in itertools.pairwise(rates[max(warmup - 1, 0) :]))


def test_no_warmup_starts_at_the_peak() -> None:
    assert Schedule(name="wsd", peak=1.0, num_steps=5, warmup_steps=0, decay_fraction=0).rate(1) == 1.0


def test_overlong_warmup_is_refused_with_the_numbers() -> None:
    with pytest.raises(HvpflowError, match="500 updates but the whole training has only 100"):
        cosine(warmup_steps=500)
    with pytest.raises(HvpflowError, match="overlap"):
        Schedule(name="wsd", peak=1.0, num_steps=100, warmup_steps=30, decay_fraction=0.8)


@pytest.mark.parametrize(
    ("run", "num_steps", "tolerance"),
    [("ordinary-new", 101, 0.0), ("ordinary-old", 101, 1e-15), ("packed-old", 92, 1e-15)],
)
def test_logged_rates_of_other_trainings(reference: Path, run: str, num_steps: int, tolerance: float) -> None:
    schedule = make_schedule(load_recipe(reference / "runs" / run / "resolved.yaml"), num_steps)
    rows = [json.loads(line) for line in (reference / "runs" / run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["event"] == "train"]
    assert len(rows) == 13
    for row in rows:
        assert schedule.rate(row["step"]) == pytest.approx(row["lr"], rel=tolerance, abs=0.0)
