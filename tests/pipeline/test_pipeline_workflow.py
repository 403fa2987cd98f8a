"""The real Snakemake on the smallest useful run: what it makes, what it rebuilds, what it survives."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from workflow_cases import ROOT, environment, scalars

FIGURES = ("normalized-alignment", "noise-alignment", "gradient-norms")


def read_summary(directory: Path) -> list[dict[str, str]]:
    with (directory / "summary.csv").open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def test_dry_run_before_any_training_lists_every_job(fresh):
    jobs = fresh.pending()
    assert sorted(set(jobs)) == ["figures", "inspect", "measure", "samples", "summary", "token_cache", "train"]
    assert jobs.count("inspect") == 3
    # epoch-004.pt and final.pt are presumed to be one state: two states, two cases.
    assert jobs.count("measure") == jobs.count("samples") == 4
    assert not (fresh.directory / "results").exists()


def test_finished_analysis_is_published_and_nothing_is_pending(workplace):
    results = workplace.directory / "results"
    rows = read_summary(results)
    assert [(row["checkpoint"], row["case"]) for row in rows] == [
        (name, case) for name in ("epoch-001.safetensors", "epoch-004.pt", "final.pt") for case in ("seen", "unseen")
    ]
    assert rows[2]["weights_hash"] == rows[4]["weights_hash"] != rows[0]["weights_hash"]
    assert rows[2]["noise_alignment"] == rows[4]["noise_alignment"]
    assert all(float(row["noise_alignment_standard_error"]) > 0 for row in rows)
    for name in FIGURES:
        assert (results / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert (results / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    manifest = json.loads((results / "manifest.json").read_text(encoding="utf-8"))
    assert [entry["name"] for entry in manifest["checkpoints"]] == ["epoch-001.safetensors", "epoch-004.pt", "final.pt"]
    assert workplace.pending() == []


def test_deleted_sample_rebuilds_what_depends_on_it(workplace):
    results = workplace.directory / "results"
    sample = results / "samples" / "epoch-001.safetensors.seen.json"
    before = sample.read_bytes(), (results / "summary.csv").read_bytes()
    sample.unlink()
    assert sorted(workplace.pending()) == ["figures", "samples", "summary"]
    workplace.snakemake()
    assert (sample.read_bytes(), (results / "summary.csv").read_bytes()) == before


def test_one_more_checkpoint_costs_its_own_jobs(workplace):
    selection = workplace.read_config()["analysis"]["checkpoints"]
    workplace.change("analysis", checkpoints=[*selection, "epoch-002.safetensors"])
    jobs = workplace.pending()
    assert sorted(jobs) == ["figures", "inspect", "measure", "measure", "samples", "samples", "summary"]
    workplace.snakemake()
    assert [row["checkpoint"] for row in read_summary(workplace.directory / "results")][2:4] == [
        "epoch-002.safetensors"
    ] * 2


def test_more_random_directions_reuse_every_finished_one(workplace):
    samples = workplace.directory / "results" / "samples" / "epoch-001.safetensors.seen.json"
    before = json.loads(samples.read_text(encoding="utf-8"))
    workplace.change("analysis", random_samples=3)
    jobs = workplace.pending()
    assert jobs.count("measure") == 4
    assert "train" not in jobs and "inspect" not in jobs
    workplace.snakemake()
    after = json.loads(samples.read_text(encoding="utf-8"))
    assert len(after["random"]) == 3
    assert after["random"][:2] == before["random"], "times included, so these were not measured again"
    assert after["noise"] == before["noise"]
    assert after["statistics"]["noise_alignment"] == before["statistics"]["noise_alignment"]


def test_changed_seed_is_measured_beside_and_going_back_costs_nothing(workplace):
    results = workplace.directory / "results"
    before = (results / "summary.csv").read_bytes()
    workplace.change("analysis", seed=43, checkpoints=["epoch-001.safetensors"], data_case="seen")
    workplace.snakemake()
    assert len(list((results / "work").iterdir())) == 2
    assert (results / "summary.csv").read_bytes() != before
    workplace.change(
        "analysis", seed=42, checkpoints=["epoch-001.safetensors", "epoch-004.pt", "final.pt"], data_case="both"
    )
    assert "measure" not in workplace.pending()
    workplace.snakemake()
    assert (results / "summary.csv").read_bytes() == before


def test_shards_join_to_the_same_numbers(workplace):
    samples = workplace.directory / "results" / "samples" / "epoch-001.safetensors.seen.json"
    whole = scalars(samples)
    shutil.rmtree(workplace.directory / "results" / "store")
    workplace.change("analysis", shards=2, checkpoints=["epoch-001.safetensors"], data_case="seen")
    assert workplace.pending().count("measure") == 2
    workplace.snakemake()
    joined = scalars(samples)
    for kind in ("noise", "random"):
        for one, two in zip(whole[kind], joined[kind], strict=True):
            assert two["quadratic"] == pytest.approx(one["quadratic"], rel=1e-5)
    assert joined["statistics"]["mean_gradient_norm"] == whole["statistics"]["mean_gradient_norm"]


def test_wrong_alias_presumption_stops_and_the_next_call_measures_both(workplace):
    """epoch-004.pt comes to hold other weights: the presumption that it equals final.pt is now wrong."""
    path = workplace.directory / "run" / "epoch-004.pt"
    state = torch.load(path, weights_only=True)
    state["model"]["norm.weight"] += 0.25
    shutil.rmtree(workplace.directory / "results")
    mapping = workplace.read_config()
    analysis = {"run": "run", "output": "results", "analysis": mapping["analysis"] | {"data_case": "seen"}}
    workplace.write_config(analysis)
    torch.save(state, path)
    first = workplace.snakemake(check=False)
    assert first.returncode != 0
    assert "was presumed from its name to hold the same state" in first.stdout + first.stderr
    assert not (workplace.directory / "results" / "summary.csv").exists()
    workplace.snakemake()
    rows = read_summary(workplace.directory / "results")
    assert len({row["weights_hash"] for row in rows}) == 3
    assert workplace.pending() == []


def test_lost_snakemake_metadata_loses_no_result(workplace):
    results = workplace.directory / "results"
    before = (results / "summary.csv").read_bytes()
    shutil.rmtree(workplace.directory / ".snakemake")
    assert "measure" not in workplace.pending()
    workplace.snakemake()
    assert (results / "summary.csv").read_bytes() == before


def test_touched_checkpoint_costs_a_hash_and_no_measurement(workplace):
    os.utime(workplace.directory / "run" / "epoch-001.safetensors")
    workplace.snakemake("inspected")
    assert "measure" not in workplace.pending()


def test_killed_workflow_continues_to_the_undisturbed_result(finished, fresh):
    """SIGKILL to the whole process group while training and again while measuring."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--configfile"]
    command += [str(fresh.config), "--directory", str(fresh.directory), "-j1", "--rerun-incomplete"]
    for awaited in (fresh.directory / "run" / ".training", fresh.directory / "results" / "inspect"):
        process = subprocess.Popen(
            command,
            cwd=fresh.directory,
            env=environment(fresh.directory),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        while not awaited.exists():
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        fresh.snakemake("--unlock")
    fresh.snakemake("--rerun-incomplete")
    for path in sorted((finished / "results" / "samples").iterdir()):
        assert scalars(fresh.directory / "results" / "samples" / path.name) == scalars(path)
