"""Shards joined into one samples record, and everything that must not be joined."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest

from hvpflow.errors import HvpflowError
from hvpflow.report.samples import merge_shards
from hvpflow.report.statistics import statistics

WORKERS = 4


def make_shards(num_shards=3, *, noise_samples=5, population=8, consensus=True):
    """Records of one packed checkpoint: 5 noise, 4 random, 4 consensus directions, dealt out in slices."""
    chosen = [0, 1, 4, 6, 7] if noise_samples == 5 else list(range(population))
    rows = [
        (
            "noise",
            {
                "batch_index": index,
                "gauss_newton": 0.75 + index,
                "batch": {"cursor": index // WORKERS * 12, "blocks": 12, "worker": index % WORKERS, "workers": WORKERS},
                "quadratic": 1.0 + index,
                "noise_norm_squared": 2.0,
                "gradient_norm": 1.5,
                "gradient_seconds": 0.01,
                "hvp_seconds": 0.1,
            },
        )
        for index in chosen
    ]
    rows += [("random", {"index": i, "quadratic": 0.5 - i, "gauss_newton": 0.5, "hvp_seconds": 0.1}) for i in range(4)]
    if consensus:
        rows += [
            (
                "consensus",
                {
                    **{"worker": w, "norm_squared": 4.0, "norm": 2.0, "quadratic": 1.0 + w, "gauss_newton": 1.0},
                    **{"normalized_alignment": (1.0 + w) / 4, "hvp_seconds": 0.1, "total_seconds": 0.2},
                },
            )
            for w in range(WORKERS)
        ]
    shards = []
    for shard in range(num_shards):
        own = rows[len(rows) * shard // num_shards : len(rows) * (shard + 1) // num_shards]
        shards.append(
            {
                "schema_version": 1,
                "identity": f"shard-{shard}-of-{num_shards}",
                "settings": {
                    **{"seed": 42, "noise_samples": noise_samples, "random_samples": 4, "dtype": "float32"},
                    "consensus": consensus,
                },
                "checkpoint": "epoch-001.safetensors",
                "weights_hash": "a" * 64,
                "result_key": ("b" if consensus else "a") * 64,
                "case": "seen",
                "data": {"case": "seen", "blocks": 24, "tokens": 1536, "available_noise_batches": population},
                "shard": shard,
                "num_shards": num_shards,
                "dimension": 11,
                "mean_gradient": {"norm": 0.5, "loss": 4.0, "sha256": "c" * 64, "seconds": 1.0},
                **{kind: [row for name, row in own if name == kind] for kind in ("noise", "random", "consensus")},
                "policy": {"device": "cpu", "threads": 2},
                "engine_check": {"relative_difference": 1e-7},
                "timing": {"mean_gradient_seconds": 1.0, "total_seconds": 10.0, "process_seconds": 12.0},
            }
        )
    return shards


def make_inspect(consensus=True):
    return {
        **{"checkpoint": "epoch-001.pt", "weights_hash": "a" * 64, "result_key": ("b" if consensus else "a") * 64},
        "workers": [
            {"worker": w, "path": f"node-00{w}/epoch-001.pt", "weights_hash": str(w) * 64} for w in range(WORKERS)
        ]
        if consensus
        else None,
    }


def test_shards_in_any_number_and_order_give_one_and_the_same_record():
    def comparable(record):
        return {key: value for key, value in record.items() if key not in ("shards", "timing")}

    whole = merge_shards(make_shards(1), make_inspect())
    for count in (2, 3, 5, 13):
        shards = make_shards(count)
        random.Random(count).shuffle(shards)
        merged = merge_shards(shards, make_inspect())
        assert comparable(merged) == comparable(whole)
        assert [entry["shard"] for entry in merged["shards"]] == list(range(count))
        # The mean gradient, 1 s of each shard's 10 s, is shared.
        assert merged["timing"] == {
            **{"mean_gradient_seconds": 1.0, "total_seconds": 1.0 + 9.0 * count, "process_seconds": 12.0 * count}
        }
    assert whole["statistics"] == statistics(whole)
    assert whole["statistics"]["noise_alignment"] == pytest.approx(1 + 18 / 5)
    assert "5 noise samples of 8" in whole["warnings"][0]


def test_keys_stand_in_the_peers_order_before_ours(reference: Path):
    path = next((reference / "results/packed-old-float64").glob("*-seen.json"))
    expected = json.loads(path.read_text())
    merged = merge_shards(make_shards(2), make_inspect())
    assert list(merged)[: len(expected)] == list(expected)
    for kind in ("noise", "random", "consensus"):
        peer = list(expected[kind][0])
        assert list(merged[kind][0])[: len(peer)] == peer
    assert list(merged["statistics"])[: len(expected["statistics"])] == list(expected["statistics"])
    ordinary = merge_shards(make_shards(2, consensus=False), make_inspect(consensus=False))
    assert "consensus" not in ordinary


def test_all_noise_samples():
    assert merge_shards(make_shards(2, noise_samples="all"))["statistics"]["noise_alignment_standard_error"] == 0


def test_a_shard_without_noise_needs_no_mean_gradient():
    shards = make_shards(13)
    shards[-1]["mean_gradient"] = None
    assert merge_shards(shards)["mean_gradient"]["norm"] == 0.5


def test_rounding_of_the_mean_gradient_and_unlike_devices_are_noted():
    shards = make_shards(2)
    shards[1]["mean_gradient"] |= {"norm": 0.5000001, "sha256": "d" * 64}
    shards[1]["policy"] |= {"device": "cuda:0", "directions_per_pass": 3}
    shards[1]["other_policies"] = [shards[0]["policy"] | {"threads": 1}]
    warnings = " ".join(merge_shards(shards)["warnings"])
    assert "differ in rounding" in warnings
    assert "policy.device is 'cpu' for some and 'cuda:0' for others" in warnings
    assert "policy.threads is 2 for some and 1 for others" in warnings
    assert "directions_per_pass" not in warnings


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("settings", "dtype"), "float64", "settings.dtype is 'float32' in one and 'float64'"),
        (("weights_hash",), "f" * 64, "weights_hash"),
        (("result_key",), "f" * 64, "result_key"),
        (("case",), "unseen", "do not belong together: case"),
        (("data", "blocks"), 25, "data.blocks is 24 in one and 25"),
        (("dimension",), 12, "dimension"),
        (("mean_gradient", "norm"), 0.6, "disagree on the mean gradient's norm"),
        (("schema_version",), 2, "schema version 2, expected 1"),
        (("shard",), 0, "1 missing"),
        (("shard",), 7, "1 missing"),
        (("noise", 0, "quadratic"), float("nan"), "quadratic of noise direction 7"),
        (("noise", 0, "batch_index"), 0, "noise direction 0 .* is there twice"),
        (("noise", 0, "batch_index"), 8, "not among them: 8"),
    ],
)
def test_what_does_not_belong_together_is_refused(path, value, message):
    shards = make_shards(3)
    place = shards[1]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(HvpflowError, match=message):
        merge_shards(shards)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("noise", "has 4 noise directions, expected 5"),
        ("random", "expected 4 from 0"),
        ("consensus", "expected 4 from 0"),
    ],
)
def test_missing_directions_are_refused(kind, message):
    (shard,) = make_shards(1)
    shard[kind] = shard[kind][:-1]
    with pytest.raises(HvpflowError, match=message):
        merge_shards([shard], make_inspect())


def test_missing_shards_and_keys_are_refused():
    shards = make_shards(3)
    with pytest.raises(HvpflowError, match="0 missing; expected each of 0 to 2 once"):
        merge_shards(shards[1:])
    with pytest.raises(HvpflowError, match="1 there twice"):
        merge_shards([*shards, copy.deepcopy(shards[1])])
    with pytest.raises(HvpflowError, match="at least one"):
        merge_shards([])
    del shards[0]["timing"]
    with pytest.raises(HvpflowError, match="lacks timing"):
        merge_shards(shards)


def test_an_alias_that_proves_wrong_stops_with_what_to_do():
    other = make_inspect() | {"weights_hash": "e" * 64}
    with pytest.raises(HvpflowError, match=r"epoch-001\.pt holds other weights .* repeat the command"):
        merge_shards(make_shards(2), other)
    with pytest.raises(HvpflowError, match="other workers"):
        merge_shards(make_shards(2), make_inspect() | {"result_key": "e" * 64})
