"""The three figures of an analysis, as PDF and PNG, drawn from the summary's rows.

Seen data solid, unseen dashed, on shared axes over training tokens; bands are ±2 standard errors, and for consensus
errors the workers' range. Drawn on Matplotlib's objects alone, so nothing is left behind in a caller's pyplot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hvpflow.errors import HvpflowError
from hvpflow.files import atomic_path
from hvpflow.report.curves import curves, distinct_points, token_scale, value_scale
from hvpflow.report.panels import draw_legend, draw_linear, draw_log, draw_training_norms, set_token_axis
from hvpflow.report.style import (
    ALIGNMENTS,
    COLUMN_WIDTH_INCHES,
    DOTS_PER_INCH,
    LEGEND_AND_LABEL_INCHES,
    NORMALIZED_ALIGNMENTS,
    NORMS,
    PANEL_HEIGHT_INCHES,
    RC,
    Kind,
)
from hvpflow.report.training_norms import TrainingNorms

FIGURE_NAMES = ("normalized-alignment", "noise-alignment", "gradient-norms")
FORMATS = ("pdf", "png")

# No dates and versions, so that equal results give equal files.
_METADATA: dict[str, dict[str, str | None]] = {
    "pdf": {"Creator": "hvpflow", "Producer": None, "CreationDate": None},
    "png": {"Software": None},
}


def draw_figures(
    points: Iterable[Mapping[str, Any]], directory: Path, training_norms: TrainingNorms | None = None
) -> list[Path]:
    """Draw every figure into ``directory`` and return the files' paths.

    Args:
        points: rows of the summary; aliases are drawn once.
        directory: where `<name>.pdf` and `<name>.png` go, atomically.
        training_norms: drawn into `gradient-norms` as a thin line.

    Raises:
        HvpflowError: there are no points, or a file cannot be written.
    """
    style: Any = dict(RC)
    paths = []
    figures = make_figures(points, training_norms)
    with matplotlib.rc_context(style):
        for name, figure in figures.items():
            for suffix in FORMATS:
                path = directory / f"{name}.{suffix}"
                with atomic_path(path) as temporary:
                    figure.savefig(temporary, format=suffix, dpi=DOTS_PER_INCH, metadata=_METADATA[suffix])
                paths.append(path)
    return paths


def make_figures(points: Iterable[Mapping[str, Any]], training_norms: TrainingNorms | None = None) -> dict[str, Figure]:
    """The figures by name, not yet saved; arguments and errors as for `draw_figures`."""
    rows = distinct_points(points)
    if not rows:
        raise HvpflowError("no measured checkpoints to draw: analyse at least one first")
    style: Any = dict(RC)
    with matplotlib.rc_context(style):
        figures = (
            _alignment_figure(rows, NORMALIZED_ALIGNMENTS, "normalized alignment", always_log=True),
            _alignment_figure(rows, ALIGNMENTS, "alignment", always_log=False),
            _norms_figure(rows, training_norms),
        )
    return dict(zip(FIGURE_NAMES, figures, strict=True))


def _alignment_figure(
    rows: list[Mapping[str, Any]], kinds: tuple[Kind, ...], label: str, *, always_log: bool
) -> Figure:
    """A linear panel and, where magnitudes differ widely or always, a logarithmic one of the same curves below."""
    drawn = curves(rows, kinds)
    with_log = bool(drawn) and (always_log or value_scale(drawn) == "log")
    figure = _figure(panels=1 + with_log)
    panels = figure.subplots(1 + with_log, 1, sharex=True, squeeze=False)[:, 0]
    draw_linear(panels[0], drawn, label)
    if with_log:
        draw_log(panels[-1], drawn, f"|{label}|")
    if drawn:
        draw_legend(figure, drawn, negative=with_log and any((curve.values < 0).any() for curve in drawn))
    set_token_axis(panels[-1], [row["tokens"] for row in rows], token_scale(rows))
    panels[-1].set_xlabel("training tokens")
    figure.align_ylabels()
    return figure


def _norms_figure(rows: list[Mapping[str, Any]], training_norms: TrainingNorms | None) -> Figure:
    """All norms in one panel: linear from 0 where they are alike, logarithmic where they differ widely."""
    drawn = curves(rows, NORMS)
    figure = _figure(panels=1)
    axes = figure.subplots()
    if value_scale(drawn) == "log":
        draw_log(axes, drawn, "norm")
    else:
        draw_linear(axes, drawn, "norm")
        axes.set_ylim(bottom=0.0)
    set_token_axis(axes, [row["tokens"] for row in rows], token_scale(rows))
    if training_norms is not None:
        draw_training_norms(axes, training_norms)
    if drawn:
        draw_legend(figure, drawn, logged=training_norms is not None)
    axes.set_xlabel("training tokens")
    return figure


def _figure(*, panels: int) -> Figure:
    height = panels * PANEL_HEIGHT_INCHES + LEGEND_AND_LABEL_INCHES
    figure = Figure(figsize=(COLUMN_WIDTH_INCHES, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
