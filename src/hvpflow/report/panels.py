"""One axes of a figure: curves with bands on a linear or a logarithmic scale, ticks, and the legend above."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from hvpflow.report.curves import Curve, Scale
from hvpflow.report.style import BAND_ALPHA, FAINT, LINE_STYLES, NEUTRAL
from hvpflow.report.training_norms import TrainingNorms

_LEGEND_COLUMNS = 3
_ROUND_STEPS = (1, 2, 5, 10)

# With more points than this, markers of full size would hide the lines.
_MANY_POINTS = 16


def draw_linear(axes: Axes, drawn: Sequence[Curve], label: str) -> None:
    """Signed values, with a faint line at zero."""
    axes.axhline(0.0, color=FAINT, linewidth=0.6, zorder=0)
    for curve, tokens in zip(drawn, _positions(drawn), strict=True):
        _band(axes, curve, tokens, curve.low, curve.high)
        _line(axes, curve, tokens, curve.values, filled=np.ones(len(curve.values), dtype=bool))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=_ROUND_STEPS))
    axes.set_ylabel(label)


def draw_log(axes: Axes, drawn: Sequence[Curve], label: str) -> None:
    """Magnitudes on a logarithmic scale: hollow markers where the value is negative, zeros left out."""
    axes.set_yscale("log")
    limits = _log_limits(drawn)
    for curve, tokens in zip(drawn, _positions(drawn), strict=True):
        negative = curve.values < 0
        low = np.where(negative, -curve.high, curve.low)
        high = np.where(negative, -curve.low, curve.high)
        # A band that reaches across zero runs out of the panel's foot.
        low = np.where(np.isnan(low), np.nan, np.maximum(low, limits[0] / 10))
        magnitudes = np.where(curve.values == 0, np.nan, np.abs(curve.values))
        _band(axes, curve, tokens, low, np.maximum(high, low))
        _line(axes, curve, tokens, magnitudes, filled=~negative)
    axes.set_ylim(*limits)
    if limits[1] / limits[0] > 50:
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=9))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(label)


def draw_training_norms(axes: Axes, norms: TrainingNorms) -> None:
    """The gradient norms that training logged, as a thin line behind everything else.

    The limits grow to hold nearly all of what is in view; single spikes may leave the panel.
    """
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    visible = [value for at, value in zip(norms.tokens, norms.values, strict=True) if left <= at <= right and value > 0]
    axes.plot(norms.tokens, norms.values, color=NEUTRAL, linewidth=0.4, alpha=0.5, zorder=0.5)
    if visible:
        low, high = np.quantile(visible, (0.005, 0.995))
        if axes.get_yscale() == "log":
            bottom = min(bottom, low / 1.1)
        top = max(top, high * 1.1)
    axes.set_ylim(bottom, top)


def set_token_axis(axes: Axes, tokens: Sequence[float], scale: Scale) -> None:
    """The shared x axis: limits a little beyond the points, ticks such as 10k and 1M."""
    low, high = min(tokens), max(tokens)
    if scale == "log":
        axes.set_xscale("log")
        margin = (high / low) ** 0.04
        axes.set_xlim(low / margin, high * margin)
        decades = np.log10(high / low)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if decades >= 1.7 else (1.0, 2.0, 5.0), numticks=9))
        axes.xaxis.set_minor_formatter(NullFormatter())
    elif high > low:
        margin = 0.04 * (high - low)
        axes.set_xlim(low - margin, high + margin)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=_ROUND_STEPS))
    else:
        axes.set_xlim(low - _lone_width(low), low + _lone_width(low))
        axes.xaxis.set_major_locator(FixedLocator([low]))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def draw_legend(figure: Figure, drawn: Sequence[Curve], *, negative: bool = False, logged: bool = False) -> None:
    """Kinds by colour and marker, then what line styles and hollow markers mean; above the panels, never over data."""
    kinds = {curve.kind.statistic: curve.kind for curve in drawn}
    entries = [
        Line2D([], [], color=kind.color, marker=kind.marker, label=kind.label, linestyle="-") for kind in kinds.values()
    ]
    cases = [case for case in LINE_STYLES if any(curve.case == case for curve in drawn)]
    styles = [Line2D([], [], color=NEUTRAL, linestyle=LINE_STYLES[case], label=f"{case} data") for case in cases]
    if negative:
        hollow: dict[str, Any] = {"markerfacecolor": "white", "color": NEUTRAL, "linestyle": ""}
        styles.append(Line2D([], [], marker="o", label="negative", **hollow))
    if logged:
        styles.append(Line2D([], [], color=NEUTRAL, linewidth=0.6, alpha=0.7, label="training log"))
    # Styles start a row of their own, unless a single kind is left in the last one.
    joined = _LEGEND_COLUMNS - 1 if len(entries) % _LEGEND_COLUMNS == 1 else 0
    parts = ([*entries, *styles[:joined]], styles[joined:])
    rows = [part[at : at + _LEGEND_COLUMNS] for part in parts for at in range(0, len(part), _LEGEND_COLUMNS)]
    figure.legend(
        handles=_column_major(rows),
        loc="outside upper left",
        ncols=max(len(row) for row in rows),
        frameon=False,
        handlelength=2.4,
        handletextpad=0.5,
        columnspacing=1.2,
        labelspacing=0.3,
        borderaxespad=0.6,
        borderpad=0.0,
    )


def _line(axes: Axes, curve: Curve, tokens: np.ndarray, values: np.ndarray, *, filled: np.ndarray) -> None:
    style: dict[str, Any] = {"color": curve.kind.color, "linestyle": LINE_STYLES[curve.case]}
    marks: dict[str, Any] = {"color": curve.kind.color, "marker": curve.kind.marker, "linestyle": "", "zorder": 4}
    if len(curve.tokens) > _MANY_POINTS:
        style["linewidth"], marks["markersize"], marks["markeredgewidth"] = 0.8, 1.6, 0.6
    if len(tokens) == 1:
        # One point has no line to be solid or dashed, so it gets a short level one.
        half = 0.1 * curve.tokens[0]
        axes.plot([tokens[0] - half, tokens[0] + half], [values[0], values[0]], zorder=3, **style)
    else:
        axes.plot(tokens, values, zorder=3, **style)
    axes.plot(tokens[filled], values[filled], **marks)
    axes.plot(tokens[~filled], values[~filled], markerfacecolor="white", **marks)


def _band(axes: Axes, curve: Curve, tokens: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    if not curve.has_band:
        return
    if len(tokens) == 1:
        # A band over one position has no width.
        axes.vlines(tokens, low, high, color=curve.kind.color, linewidth=0.8, zorder=2)
    else:
        axes.fill_between(tokens, low, high, color=curve.kind.color, alpha=BAND_ALPHA, linewidth=0, zorder=2)


def _positions(drawn: Sequence[Curve]) -> list[np.ndarray]:
    """Where each curve's points stand: at their tokens, but a lone checkpoint's seen ones left of its unseen ones."""
    if len({at for curve in drawn for at in curve.tokens}) > 1:
        return [curve.tokens for curve in drawn]
    shifts = {"seen": -0.15, "unseen": 0.15} if len({curve.case for curve in drawn}) > 1 else {}
    return [curve.tokens * (1 + shifts.get(curve.case, 0.0)) for curve in drawn]


def _lone_width(tokens: float) -> float:
    """Half the width of an axis that shows a single checkpoint."""
    return max(0.5 * tokens, 1.0)


def _log_limits(drawn: Sequence[Curve]) -> tuple[float, float]:
    """Limits that hold every magnitude, and of the bands what does not fall far below the smallest."""
    magnitudes = np.abs(np.concatenate([curve.values for curve in drawn]))
    magnitudes = magnitudes[magnitudes > 0]
    if not magnitudes.size:
        return 0.1, 1.0
    ends = np.abs(np.concatenate([[*curve.low, *curve.high] for curve in drawn]))
    ends = ends[np.isfinite(ends) & (ends > 0)]
    least, greatest = magnitudes.min(), max(magnitudes.max(), ends.max(initial=0.0))
    bottom = min(least, max(ends.min(initial=least), least / 3))
    return float(bottom / 1.4), float(greatest * 1.4)


def _column_major(rows: Sequence[Sequence[Line2D]]) -> list[Line2D]:
    """Handles in the order in which a legend fills its columns, so that each given row is a row."""
    width = max(len(row) for row in rows)
    blank = Line2D([], [], linestyle="", label=" ")
    return [row[column] if column < len(row) else blank for column in range(width) for row in rows]
