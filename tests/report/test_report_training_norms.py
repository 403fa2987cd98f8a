"""Gradient norms from a training's log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvpflow.errors import HvpflowError
from hvpflow.report.training_norms import read_training_norms


def write_log(directory: Path, *rows, tail: str = ""):
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)


def test_train_rows_by_tokens_the_last_of_a_position_counting(tmp_path: Path):
    write_log(
        tmp_path,
        {"event": "train", "tokens": 1024, "grad_norm": 2.0},
        {"event": "train", "tokens": 512, "grad_norm": 9.0},
        {"event": "validation", "tokens": 512, "loss": 4.0},
        {"event": "train", "tokens": 512, "grad_norm": 1.0},
        {"event": "train", "tokens": 2048, "grad_norm": None},
        {"event": "train", "tokens": 4096, "grad_norm": float("nan")},
        tail='{"event": "train", "tok',
    )
    norms = read_training_norms(tmp_path)
    assert (norms.tokens, norms.values, norms.num_workers) == ([512, 1024], [1.0, 2.0], 1)


def test_packed_runs_give_the_mean_over_workers(tmp_path: Path):
    write_log(tmp_path, {"event": "train", "tokens": 768, "grad_norm": 3.0, "local_grad_norms": [1.0, 3.0, 2.0, 2.0]})
    norms = read_training_norms(tmp_path)
    assert (norms.values, norms.num_workers) == ([2.0], 4)


def test_what_cannot_be_read_is_refused(tmp_path: Path):
    with pytest.raises(HvpflowError, match=r"cannot read .*metrics\.jsonl"):
        read_training_norms(tmp_path)
    write_log(tmp_path, {"event": "validation", "tokens": 1})
    with pytest.raises(HvpflowError, match="logs no gradient norms"):
        read_training_norms(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"event"\n{"event": "train", "tokens": 1, "grad_norm": 1.0}\n')
    with pytest.raises(HvpflowError, match="line 1 of"):
        read_training_norms(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(HvpflowError, match="not UTF-8"):
        read_training_norms(tmp_path)
