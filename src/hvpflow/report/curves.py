"""The points behind the figures: one for each distinct state and data case, as curves over training tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvpflow.report.style import Kind

Scale = Literal["linear", "log"]

# Above this ratio of the greatest to the least magnitude, a linear axis hides the small ones.
_WIDE_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class Curve:
    """A statistic along training for one data case: arrays [points], NaN where a value or a band does not exist."""

    kind: Kind
    case: str
    tokens: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def has_band(self) -> bool:
        return bool(np.isfinite(self.low).any())


def distinct_points(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One row for each (result_key, tokens, case), by tokens: aliases are one point."""
    unique = {(row["tokens"], row["result_key"], row["case"]): row for row in rows}
    return [unique[key] for key in sorted(unique)]


def curves(points: Sequence[Mapping[str, Any]], kinds: Iterable[Kind]) -> list[Curve]:
    """The curves of every kind and case that has at least one value; a kind's seen curve before its unseen one."""
    found = []
    for kind, case in itertools.product(kinds, ("seen", "unseen")):
        rows = [row for row in points if row["case"] == case and row.get(kind.statistic) is not None]
        if rows:
            bounds = np.array([kind.bounds(row) or (np.nan, np.nan) for row in rows], dtype=float)
            tokens = np.array([row["tokens"] for row in rows], dtype=float)
            values = np.array([row[kind.statistic] for row in rows], dtype=float)
            found.append(Curve(kind, case, tokens, values, bounds[:, 0], bounds[:, 1]))
    return found


def token_scale(points: Iterable[Mapping[str, Any]]) -> Scale:
    """The scale on which the checkpoints lie more evenly: the one whose widest gap is the smaller part of its range."""
    positions = np.array(sorted({row["tokens"] for row in points}), dtype=float)
    if len(positions) < 3 or positions[0] <= 0:
        return "linear"
    widest = [np.diff(place).max() / (place[-1] - place[0]) for place in (positions, np.log(positions))]
    return "log" if widest[1] < widest[0] else "linear"


def value_scale(drawn: Sequence[Curve]) -> Scale:
    """Logarithmic where magnitudes differ so much that a linear axis would flatten some curves."""
    magnitudes = np.abs(np.concatenate([curve.values for curve in drawn])) if drawn else np.array([])
    magnitudes = magnitudes[magnitudes > 0]
    return "log" if magnitudes.size and magnitudes.max() / magnitudes.min() > _WIDE_RATIO else "linear"
