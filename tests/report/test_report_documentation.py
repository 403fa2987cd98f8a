"""Every published column and key is documented, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_report_samples import make_inspect, make_shards

from hvpflow.report.figures import FIGURE_NAMES
from hvpflow.report.samples import merge_shards
from hvpflow.report.summary import TINY_LLM_COLUMNS

ROOT = Path(__file__).resolve().parents[2]


def documented(heading: str) -> list[str]:
    """The code-quoted names in the first column of a section's table."""
    text = (ROOT / "docs" / "columns.md").read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [
        name for row in re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE) for name in re.findall("`([^`]+)`", row)
    ]


def test_every_column_is_documented_and_no_other():
    merged = merge_shards(make_shards(2), make_inspect())
    names = dict.fromkeys([*TINY_LLM_COLUMNS[:7], *merged["statistics"]])
    assert sorted(documented("Columns of `summary.csv`")) == sorted(names)
    assert documented("Columns of `summary.csv`")[: len(TINY_LLM_COLUMNS)] == list(TINY_LLM_COLUMNS)


def test_every_samples_key_is_documented_in_order():
    assert documented("Keys of a samples file") == [*merge_shards(make_shards(2), make_inspect()), "checksum"]


def test_every_row_key_is_named():
    text = (ROOT / "docs" / "columns.md").read_text(encoding="utf-8")
    merged = merge_shards(make_shards(2), make_inspect())
    for kind in ("noise", "random", "consensus", "shards"):
        for key in merged[kind][0]:
            assert f"`{key}`" in text, f"{key} of {kind}"
    for key in merged["timing"] | merged["mean_gradient"]:
        assert f"`{key}`" in text, key


@pytest.mark.parametrize("name", [*FIGURE_NAMES, "summary", "manifest"])
def test_every_publication_has_a_caption(name: str):
    caption = (ROOT / "workflow" / "report" / f"{name}.rst").read_text(encoding="utf-8")
    assert 50 < len(caption) < 800
    # Captions are templates: a brace would be taken for one.
    assert "{" not in caption
