"""The manifest and the table: the peer's own rebuilt from its samples, and refusals."""

from __future__ import annotations

import copy
import csv
import json
from pathlib import Path

import pytest

from hvpflow.errors import HvpflowError
from hvpflow.files import write_record
from hvpflow.report.manifest import build_manifest
from hvpflow.report.summary import TINY_LLM_COLUMNS, columns, read_rows, summary_rows, write_summary

RESULTS = ("ordinary-new-float64", "ordinary-old-float64", "ordinary-old-float32", "packed-old-float64")


def from_reference(directory: Path):
    """A peer's manifest and samples, as the arguments that would make them here."""
    manifest = json.loads((directory / "manifest.json").read_text())
    samples = {path.name: json.loads(path.read_text()) for path in sorted(directory.glob("*seen.json"))}
    run = manifest["run"]
    inspect_records = [
        {
            **{"checkpoint": entry["name"], "result_key": entry.get("result_key", entry["weights_hash"])},
            **{key: entry[key] for key in ("weights_hash", "tokens", "step", "epoch")},
            "workers": [
                worker | {"path": str(Path(worker["path"]).relative_to(run))} for worker in entry.get("workers", ())
            ]
            or None,
        }
        for entry in manifest["checkpoints"]
    ]
    arguments = {
        **{key: manifest[key] for key in ("run", "options", "micro_batch_size", "hvp_batch_size")},
        "effective_batch_tokens": manifest["effective_batch_tokens"],
        **{"settings_digest": "0123456789ab", "inspect_records": inspect_records[::-1], "samples": samples},
        "environment": {"python": "3.12"},
    }
    return manifest, arguments


@pytest.mark.parametrize("result", RESULTS)
def test_the_peers_table_is_reproduced(reference: Path, result: str, tmp_path: Path):
    directory = reference / "results" / result
    _, arguments = from_reference(directory)
    rows = summary_rows(build_manifest(**arguments), arguments["samples"])
    write_summary(rows, tmp_path / "summary.csv")
    # The peer writes CRLF; a copy of its files may have lost them on the way.
    expected = (directory / "summary.csv").read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
    assert (tmp_path / "summary.csv").read_bytes() == expected


@pytest.mark.parametrize("result", RESULTS)
def test_the_peers_manifest_entries_are_reproduced_but_for_its_identity(reference: Path, result: str):
    expected, arguments = from_reference(reference / "results" / result)
    manifest = build_manifest(**arguments)
    for key in set(expected) - {"identity", "policy", "checkpoints", "environment"}:
        assert manifest[key] == expected[key], key
    assert len(manifest["checkpoints"]) == len(expected["checkpoints"]) == 9
    for ours, theirs in zip(manifest["checkpoints"], expected["checkpoints"], strict=True):
        assert {key: ours[key] for key in theirs} == theirs
        assert ours["samples"] == {case: f"{ours['result_key']}-{case}.json" for case in ("seen", "unseen")}


def make_analysis():
    """Two aliases and a later checkpoint, seen only, one statistic of ours."""
    records = [
        {"checkpoint": name, "weights_hash": key * 64, "result_key": key * 64, "tokens": tokens, "step": 1, "epoch": 1}
        for name, key, tokens in [
            ("final.pt", "b", 200),
            ("epoch-001.safetensors", "a", 100),
            ("epoch-001.pt", "a", 100),
        ]
    ]
    samples = {
        f"samples/{key}.json": {
            **{"result_key": key * 64, "case": "seen", "data": {"case": "seen"}, "settings": {"seed": 1}},
            **{
                "policy": {"device": "cpu"},
                "statistics": {"noise_samples": 2, "noise_alignment": 0.1, "epoch_loss": None},
            },
        }
        for key in "ab"
    }
    return {
        **{"run": "runs/demo", "options": {"seed": 1}, "settings_digest": "d1", "inspect_records": records},
        **{"samples": samples, "environment": {}, "micro_batch_size": 4, "hvp_batch_size": 8},
        "effective_batch_tokens": 512,
    }


def test_every_alias_has_an_entry_and_a_row_that_share_samples(tmp_path: Path):
    arguments = make_analysis()
    manifest = build_manifest(**arguments)
    assert [(entry["name"], entry["samples"]["seen"]) for entry in manifest["checkpoints"]] == [
        ("epoch-001.pt", "samples/a.json"),
        ("epoch-001.safetensors", "samples/a.json"),
        ("final.pt", "samples/b.json"),
    ]
    for name, record in arguments["samples"].items():
        write_record(tmp_path / name, record)
    write_record(tmp_path / "manifest.json", manifest)
    rows = read_rows(tmp_path / "manifest.json")
    assert rows == summary_rows(manifest, arguments["samples"])
    write_summary(rows, tmp_path / "summary.csv")
    text = (tmp_path / "summary.csv").read_bytes().decode()
    assert text.splitlines()[1] == f"epoch-001.pt,100,1,1,seen,{'a' * 64},{'a' * 64},2,0.1,"
    assert text.count("\r\n") == text.count("\n") == 4
    with (tmp_path / "summary.csv").open(newline="") as handle:
        assert [row["checkpoint"] for row in csv.DictReader(handle)] == [row["checkpoint"] for row in rows]


def test_the_manifest_depends_on_its_arguments_alone():
    arguments = make_analysis()
    shuffled = arguments | {
        "inspect_records": arguments["inspect_records"][::-1],
        "samples": dict(reversed(arguments["samples"].items())),
    }
    assert json.dumps(build_manifest(**arguments)) == json.dumps(build_manifest(**shuffled))
    other = build_manifest(**arguments | {"settings_digest": "d2"})
    assert other["identity"] != build_manifest(**arguments)["identity"]


def test_the_header_is_the_union_of_the_rows_with_the_peers_columns_first():
    rows = [{"checkpoint": "a", "ours": 1}, {"checkpoint": "b", "consensus_alignment": 0.5, "noise_alignment": 1.0}]
    assert columns(rows) == ["checkpoint", "noise_alignment", "consensus_alignment", "ours"]
    assert columns([dict.fromkeys(reversed(TINY_LLM_COLUMNS))]) == list(TINY_LLM_COLUMNS)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("settings", {"seed": 2}, "different settings"),
        ("data", {"case": "seen", "blocks": 1}, "different data"),
        ("result_key", "c" * 64, r"final\.pt has no seen samples"),
        ("case", "hidden", "data case 'hidden'"),
        ("case", "unseen", "has no .*seen samples"),
    ],
)
def test_samples_that_cannot_stand_in_one_table_are_refused(key, value, message):
    arguments = copy.deepcopy(make_analysis())
    arguments["samples"]["samples/b.json"][key] = value
    with pytest.raises(HvpflowError, match=message):
        build_manifest(**arguments)


def test_damaged_publications_are_refused(tmp_path: Path):
    arguments = make_analysis()
    manifest = build_manifest(**arguments)
    path = tmp_path / "results" / "manifest.json"
    write_record(path, manifest)
    with pytest.raises(HvpflowError, match=r"cannot read .*a\.json"):
        read_rows(path)
    for name, record in arguments["samples"].items():
        write_record(path.parent / name, record | {"result_key": "a" * 64})
    with pytest.raises(HvpflowError, match=r"samples/b\.json holds the seen samples of aaa"):
        read_rows(path)
    manifest["checkpoints"][0]["samples"]["seen"] = "../elsewhere.json"
    write_record(path, manifest)
    with pytest.raises(HvpflowError, match="outside its directory"):
        read_rows(path)
    write_record(path, {"version": 2})
    with pytest.raises(HvpflowError, match="no analysis manifest of version 1"):
        read_rows(path)
