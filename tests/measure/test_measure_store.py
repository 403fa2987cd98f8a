"""Entries of the store: found by content, and never believed when damaged."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvpflow.errors import HvpflowError
from hvpflow.measure.records import check_record
from hvpflow.measure.store import Store
from hvpflow.measure.vectors import load_vector, save_vector

IDENTITY, KEY, VALUE = {"weights": "w", "version": 1}, {"direction": 3}, {"quadratic": 0.1 + 0.2, "policy": {"k": 8}}


def test_entries_come_back_bit_for_bit_and_only_for_their_own_identity(tmp_path: Path) -> None:
    context = Store(tmp_path).context(IDENTITY)
    assert context.get("entry", KEY) is None
    context.put("entry", KEY, VALUE)
    assert Store(tmp_path).context(dict(reversed(IDENTITY.items()))).get("entry", KEY) == VALUE
    assert context.get("entry", {"direction": 4}) is None
    assert Store(tmp_path).context(IDENTITY | {"version": 2}).get("entry", KEY) is None
    context.remove("entry")
    assert context.get("entry", KEY) is None


def test_an_entry_moved_to_another_context_is_not_believed(tmp_path: Path) -> None:
    one, other = (Store(tmp_path).context({"weights": name}) for name in "ab")
    one.put("entry", KEY, VALUE)
    one.directory.rename(other.directory)
    assert other.get("entry", KEY) is None


@settings(deadline=None)
@given(data=st.data())
def test_no_damage_yields_another_value(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        reported: list[str] = []
        store = Store(Path(directory), reported.append)
        context = store.context(IDENTITY)
        context.put("entry", KEY, VALUE)
        (path,) = context.files("*.json")
        content = path.read_bytes()
        position = data.draw(st.integers(0, len(content) - 1))
        damaged = data.draw(
            st.one_of(
                st.integers(1, 255).map(
                    lambda flip: content[:position] + bytes([content[position] ^ flip]) + content[position + 1 :]
                ),
                st.just(content[:position]),
                st.just(bytes(len(content))),
            )
        )
        path.write_bytes(damaged)
        found = context.get("entry", KEY)
        # White space may change without changing what the entry says.
        assert found is None or (found == VALUE and json.loads(damaged) == json.loads(content))
        if found is None and not reported:
            assert json.loads(damaged)["checksum"] == json.loads(content)["checksum"]
        context.get("entry", KEY)
        assert len(reported) <= 1


@pytest.mark.parametrize("content", ["[]", "1", '{"value": 1}', "null", "", "{", '{"schema_version": 1}'])
def test_foreign_json_is_reported_and_not_used(tmp_path: Path, content: str) -> None:
    reported: list[str] = []
    context = Store(tmp_path, reported.append).context(IDENTITY)
    context.put("entry", KEY, VALUE)
    (path,) = context.files("*.json")
    path.write_text(content)
    assert context.get("entry", KEY) is None
    assert len(reported) == 1
    assert "entry.json" in reported[0]


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HvpflowError, match="cannot write"):
        Store(tmp_path / "file").context(IDENTITY).put("entry", KEY, VALUE)


def test_vectors_come_back_or_are_refused(tmp_path: Path) -> None:
    vector = {"b": torch.randn(3, dtype=torch.float64), "a": torch.randn(2, 2, dtype=torch.float64)}
    path = tmp_path / "vector.safetensors"
    assert load_vector(path, vector) is None
    save_vector(path, vector, {"next": "3"})
    loaded = load_vector(path, vector)
    assert loaded is not None
    assert list(loaded[0]) == list(vector)
    assert all(torch.equal(loaded[0][name], vector[name]) for name in vector)
    assert loaded[1]["next"] == "3"
    with pytest.raises(ValueError, match="other tensors"):
        load_vector(path, {"a": vector["a"]})
    content = path.read_bytes()
    for damaged in (
        content[:-1],
        content[:-1] + bytes([content[-1] ^ 1]),
        content[: len(content) // 2],
        b"",
        b"\xff" * 9,
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"vector\.safetensors"):
            load_vector(path, vector)


def test_records_are_checked_field_by_field() -> None:
    row = {"index": 0, "quadratic": 1.0, "gauss_newton": 1.0, "hvp_seconds": 0.0}
    record: dict[str, Any] = {
        **{"schema_version": 1, "identity": "", "settings": {}, "checkpoint": "", "weights_hash": "", "result_key": ""},
        **{"case": "seen", "data": {}, "shard": 0, "num_shards": 1, "dimension": 1, "mean_gradient": None, "noise": []},
        **{"random": [row], "consensus": None, "policy": {}, "other_policies": [], "engine_check": {}, "timing": {}},
    }
    check_record(record)
    for change, message in (
        ({"schema_version": 2}, "schema version 2, expected 1"),
        ({"random": [row | {"quadratic": float("nan")}]}, r"random\[0\].quadratic holds nan"),
        ({"random": [{"index": 0}]}, r"random\[0\] lacks quadratic"),
        ({"noise": [{}]}, "mean_gradient lacks norm"),
    ):
        with pytest.raises(HvpflowError, match=message):
            check_record(record | change)
    del record["dimension"]
    with pytest.raises(HvpflowError, match="lacks dimension"):
        check_record(record)
    with pytest.raises(HvpflowError, match="not a measure record"):
        check_record([])
