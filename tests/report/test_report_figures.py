"""The figures: what they show, that it is legible, and that equal results give equal files."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from hvpflow.errors import HvpflowError
from hvpflow.report.curves import curves, distinct_points, token_scale, value_scale
from hvpflow.report.figures import FIGURE_NAMES, draw_figures, make_figures
from hvpflow.report.style import COLUMN_WIDTH_INCHES, NORMALIZED_ALIGNMENTS, NORMS
from hvpflow.report.training_norms import TrainingNorms

NOISE, RANDOM, CONSENSUS = NORMALIZED_ALIGNMENTS
EPOCHS = (1, 8, 32, 120)


def make_rows(epochs=EPOCHS, cases=("seen", "unseen"), *, packed=False, errors=True, negative=False):
    """Rows as an analysis of a small run gives them."""
    rows = []
    for number, (epoch, case) in enumerate(itertools.product(epochs, cases)):
        shift = 1.0 if case == "seen" else 1.2
        row = {
            "checkpoint": f"epoch-{epoch:03d}.pt",
            "tokens": 8192 * epoch,
            "case": case,
            "result_key": f"{epoch:064d}",
        }
        values = {
            "noise_alignment": 0.8 * shift,
            "normalized_noise_alignment": 1.4 * shift,
            "normalized_random_alignment": 0.005 * shift * (-1 if negative and number < 2 else 1),
            "average_noise_norm": 0.7 * shift,
            "average_batch_gradient_norm": 0.9 * shift,
        }
        for name, value in values.items():
            row |= {name: value, f"{name}_standard_error": abs(value) / 10 if errors else None}
        row["mean_gradient_norm"] = 0.5 * shift
        if packed:
            for name, value in {
                "consensus_alignment": 0.01 / epoch,
                "normalized_consensus_alignment": 0.3,
                "average_consensus_norm": 0.3 / epoch,
            }.items():
                row |= {name: value, f"{name}_worker_min": value / 2, f"{name}_worker_max": value * 2}
        rows.append(row)
    return rows


def make_norms(last=120):
    tokens = np.arange(512.0, 8192.0 * last, 4096.0)
    return TrainingNorms(tokens.tolist(), (1 + np.random.default_rng(0).random(len(tokens))).tolist())


SITUATIONS = {
    "ordinary": (make_rows(), None),
    "packed": (make_rows(packed=True, negative=True), make_norms()),
    "training norms": (make_rows(), make_norms()),
    "even spacing": (make_rows(epochs=range(1, 41), packed=True), None),
    "half a decade": (make_rows(epochs=(1, 2, 4, 8)), make_norms()),
    "one checkpoint": (make_rows(epochs=(3,), packed=True), make_norms()),
    "one case": (make_rows(cases=("unseen",)), make_norms()),
    "no standard errors": (make_rows(errors=False), None),
    "hundreds of millions": (make_rows(epochs=range(1000, 50000, 1200)), None),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_figure_is_legible(situation: str):
    rows, norms = SITUATIONS[situation]
    for name, figure in make_figures(rows, norms).items():
        assert figure.get_figwidth() == COLUMN_WIDTH_INCHES
        figure.canvas.draw()
        (legend,) = figure.legends
        legend_box, page = legend.get_window_extent(), figure.bbox
        assert page.x0 <= legend_box.x0, name
        assert legend_box.x1 <= page.x1, name
        assert legend_box.y1 <= page.y1, name
        for axes in figure.axes:
            assert axes.bbox.height > 0.9 * figure.dpi
            assert axes.get_tightbbox().y1 <= legend_box.y0 + 1, f"{name}: the legend covers a panel"
            for axis in (axes.xaxis, axes.yaxis):
                labels = [label for label in axis.get_ticklabels() if label.get_visible() and label.get_text()]
                boxes = [label.get_window_extent() for label in labels]
                assert not any(one.overlaps(two) for one, two in itertools.combinations(boxes, 2)), name
            shown = [
                tick
                for tick in axes.xaxis.get_major_ticks()
                if axes.get_xlim()[0] <= tick.get_loc() <= axes.get_xlim()[1]
            ]
            assert shown, f"{name}: no label on the axis of tokens"
        for text in figure.findobj(Text):
            assert text.get_fontsize() >= 7


def lines_of(axes, kind):
    """The connecting lines of a kind, by line style, and its marks as (x, y, hollow)."""
    color = kind.color.lower()
    lines, marks = {}, []
    for line in axes.lines:
        if to_hex(line.get_color()) != color:
            continue
        if line.get_marker() in ("", "None"):
            lines["solid" if line.get_linestyle() == "-" else "dashed"] = line
        else:
            hollow = to_hex(line.get_markerfacecolor()) == "#ffffff"
            marks += [(x, y, hollow) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]
    return lines, marks


def test_seen_is_solid_and_unseen_dashed_on_shared_axes():
    figure = make_figures(make_rows())["normalized-alignment"]
    linear, log = figure.axes
    for axes in (linear, log):
        lines, marks = lines_of(axes, NOISE)
        assert lines["solid"].get_xdata() == pytest.approx([8192 * epoch for epoch in EPOCHS])
        assert lines["solid"].get_ydata() == pytest.approx([1.4] * 4)
        assert lines["dashed"].get_ydata() == pytest.approx([1.68] * 4)
        assert len(marks) == 8
    assert linear.get_xscale() == log.get_xscale() == "log"
    assert linear.get_xlim() == log.get_xlim()
    assert (linear.get_yscale(), log.get_yscale()) == ("linear", "log")


def test_bands_are_two_standard_errors_and_the_workers_range():
    rows = make_rows(packed=True)
    noise = curves(rows, [NOISE])[0]
    assert noise.low == pytest.approx(noise.values * 0.8)
    assert noise.high == pytest.approx(noise.values * 1.2)
    consensus = curves(rows, [CONSENSUS])[0]
    assert consensus.low == pytest.approx(consensus.values / 2)
    assert consensus.high == pytest.approx(consensus.values * 2)
    linear = make_figures(rows)["normalized-alignment"].axes[0]
    assert len(linear.collections) == 6
    assert len(make_figures(make_rows(errors=False))["normalized-alignment"].axes[0].collections) == 0


def test_negative_values_are_hollow_in_the_log_panel_alone():
    linear, log = make_figures(make_rows(negative=True))["normalized-alignment"].axes
    _, marks = lines_of(log, RANDOM)
    assert sorted(hollow for _, _, hollow in marks) == [False] * 6 + [True] * 2
    assert all(y > 0 for _, y, _ in marks)
    assert all(x == pytest.approx(8192) for x, _, hollow in marks if hollow)
    _, marks = lines_of(linear, RANDOM)
    assert sum(y < 0 for _, y, _ in marks) == 2
    assert not any(hollow for _, _, hollow in marks)

    def legend_texts(figure):
        return [text.get_text() for text in figure.legends[0].get_texts()]

    assert "negative" in legend_texts(linear.figure)
    assert "negative" not in legend_texts(make_figures(make_rows())["normalized-alignment"])


def test_a_lone_checkpoint_tells_its_cases_apart():
    axes = make_figures(make_rows(epochs=(3,)))["noise-alignment"].axes[0]
    lines, marks = lines_of(axes, NOISE)
    assert set(lines) == {"solid", "dashed"}
    (seen_x, _, _), (unseen_x, _, _) = sorted(marks)
    assert seen_x < 3 * 8192 < unseen_x
    assert [label.get_text() for label in axes.get_xticklabels()] == ["24.576k"]


def test_nulls_are_left_out():
    rows = make_rows(packed=True)
    for row in rows[:2]:
        row["normalized_noise_alignment"] = row["normalized_noise_alignment_standard_error"] = None
    for row in rows:
        row["normalized_consensus_alignment"] = None
    seen = curves(rows, NORMALIZED_ALIGNMENTS)
    assert [(curve.kind.statistic, len(curve.values)) for curve in seen] == [
        *[("normalized_noise_alignment", 3)] * 2,
        *[("normalized_random_alignment", 4)] * 2,
    ]
    make_figures(rows)
    nothing = [{"tokens": 100, "case": "seen", "result_key": "a"}]
    assert set(make_figures(nothing)) == set(FIGURE_NAMES)


def test_aliases_are_one_point_but_states_with_other_workers_are_not():
    rows = make_rows(epochs=(1, 2))
    aliases = [row | {"checkpoint": "final.pt"} for row in rows if row["tokens"] == 16384]
    assert len(distinct_points([*rows, *aliases])) == len(rows)
    assert len(distinct_points([*rows, aliases[0] | {"result_key": "f" * 64}])) == len(rows) + 1
    assert [row["tokens"] for row in distinct_points(rows[::-1])] == [8192, 8192, 16384, 16384]


def test_scales_follow_the_data():
    assert token_scale(make_rows(epochs=EPOCHS)) == "log"
    assert token_scale(make_rows(epochs=range(1, 41))) == "linear"
    assert token_scale(make_rows(epochs=(1, 100))) == "linear"
    assert value_scale(curves(make_rows(), NORMS)) == "linear"
    assert value_scale(curves(make_rows(packed=True), NORMS)) == "log"
    figures = make_figures(make_rows())
    assert len(figures["noise-alignment"].axes) == 1
    assert figures["gradient-norms"].axes[0].get_ylim()[0] == 0
    packed = make_figures(make_rows(packed=True))
    assert [axes.get_yscale() for axes in packed["noise-alignment"].axes] == ["linear", "log"]


def test_training_norms_join_the_gradient_norms_as_a_thin_line():
    norms = make_norms()
    figures = make_figures(make_rows(), norms)
    (line,) = [line for line in figures["gradient-norms"].axes[0].lines if len(line.get_xdata()) == len(norms.tokens)]
    assert line.get_linewidth() < 0.6
    assert list(line.get_ydata()) == norms.values
    bare = make_figures(make_rows())["gradient-norms"].axes[0]
    assert figures["gradient-norms"].axes[0].get_xlim() == bare.get_xlim()
    texts = [text.get_text() for text in figures["gradient-norms"].legends[0].get_texts()]
    assert "training log" in texts


def test_equal_results_give_equal_files(tmp_path: Path):
    before = dict(matplotlib.rcParams)
    first = draw_figures(make_rows(packed=True), tmp_path / "one", make_norms())
    second = draw_figures(make_rows(packed=True)[::-1], tmp_path / "two", make_norms())
    assert [path.name for path in first] == [f"{name}.{suffix}" for name in FIGURE_NAMES for suffix in ("pdf", "png")]
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes()
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(path.name for path in first)
    assert dict(matplotlib.rcParams) == before


def test_pdfs_keep_their_text_and_carry_no_date(tmp_path: Path):
    for path in draw_figures(make_rows(), tmp_path):
        content = path.read_bytes()
        if path.suffix == ".pdf":
            assert b"/CreationDate" not in content
            assert b"/FontFile2" in content
            assert b"/Subtype /Type3" not in content
        else:
            assert int.from_bytes(content[16:20], "big") == COLUMN_WIDTH_INCHES * 300


def test_without_points_nothing_is_drawn(tmp_path: Path):
    with pytest.raises(HvpflowError, match="no measured checkpoints"):
        draw_figures([], tmp_path)
    assert not list(tmp_path.iterdir())


def test_reports_load_neither_torch_nor_pyplot():
    program = (
        "import sys, hvpflow.report.figures, hvpflow.report.samples, hvpflow.report.summary\n"
        "print([name for name in ('torch', 'pandas', 'matplotlib.pyplot') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
