"""How the figures look: one column wide, colours and markers that tell kinds apart for every reader, fixed fonts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

COLUMN_WIDTH_INCHES = 3.4
PANEL_HEIGHT_INCHES = 1.65
LEGEND_AND_LABEL_INCHES = 0.75
DOTS_PER_INCH = 300

# DejaVu Sans comes with Matplotlib, so figures are the same on every machine. Type 42 keeps text as text in PDFs.
RC: Mapping[str, Any] = MappingProxyType(
    {
        **{"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 7.5, "pdf.fonttype": 42},
        **{"axes.labelsize": 7.5, "xtick.labelsize": 7, "ytick.labelsize": 7, "legend.fontsize": 7},
        **{"axes.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False, "axes.labelpad": 3.0},
        **{"xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.minor.width": 0.4, "ytick.minor.width": 0.4},
        **{"xtick.major.size": 3.0, "ytick.major.size": 3.0, "xtick.minor.size": 1.6, "ytick.minor.size": 1.6},
        **{"lines.linewidth": 1.1, "lines.markersize": 3.4, "lines.markeredgewidth": 0.9},
    }
)

LINE_STYLES: Mapping[str, Any] = MappingProxyType({"seen": "-", "unseen": (0, (3.0, 1.6))})
BAND_ALPHA = 0.16
NEUTRAL = "0.35"
FAINT = "0.72"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One statistic as it is drawn: the same colour, marker and name in every figure."""

    statistic: str
    label: str
    color: str
    marker: str
    over_workers: bool = False
    """The band is the workers' range, not ±2 standard errors."""

    def bounds(self, row: Mapping[str, Any]) -> tuple[float, float] | None:
        """Lower and upper end of the band at one row; null where there is none."""
        if self.over_workers:
            low, high = row.get(f"{self.statistic}_worker_min"), row.get(f"{self.statistic}_worker_max")
            return None if low is None or high is None else (low, high)
        value, error = row.get(self.statistic), row.get(f"{self.statistic}_standard_error")
        return None if value is None or error is None else (value - 2 * error, value + 2 * error)


# Colours of M. Okabe and K. Ito, Color Universal Design (2008).
_BLUE, _VERMILION, _GREEN, _PURPLE, _ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"

_NOISE: dict[str, Any] = {"label": "gradient noise", "color": _BLUE, "marker": "o"}
_RANDOM: dict[str, Any] = {"label": "random", "color": _VERMILION, "marker": "s"}
_CONSENSUS: dict[str, Any] = {"label": "consensus error", "color": _GREEN, "marker": "^", "over_workers": True}

NORMALIZED_ALIGNMENTS = (
    Kind(statistic="normalized_noise_alignment", **_NOISE),
    Kind(statistic="normalized_random_alignment", **_RANDOM),
    Kind(statistic="normalized_consensus_alignment", **_CONSENSUS),
)
ALIGNMENTS = (Kind(statistic="noise_alignment", **_NOISE), Kind(statistic="consensus_alignment", **_CONSENSUS))
NORMS = (
    Kind(statistic="average_batch_gradient_norm", label="batch gradient", color=_ORANGE, marker="D"),
    Kind(statistic="average_noise_norm", **_NOISE),
    Kind(statistic="mean_gradient_norm", label="mean gradient", color=_PURPLE, marker="v"),
    Kind(statistic="average_consensus_norm", **_CONSENSUS),
)
