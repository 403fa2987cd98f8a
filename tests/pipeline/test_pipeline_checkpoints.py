"""Damaged checkpoints and raw Snakemake: the message appears, nothing is measured, nothing is written over."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from hvpflow import cli
from hvpflow.files import read_json
from hvpflow.pipeline import steps
from hvpflow.pipeline.plan import make_plan
from hvpflow.pipeline.settings import config_from_mapping


class Unsafe:
    def __reduce__(self):
        return os.system, ("touch executed",)


def damage_safetensors(path):
    path.write_bytes(path.read_bytes()[:-100])


def damage_pt(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def poison(path):
    torch.save({"model": Unsafe()}, path)


@pytest.mark.parametrize(
    ("checkpoint", "damage"),
    [
        ("epoch-001.safetensors", damage_safetensors),
        ("epoch-001.pt", damage_pt),
        ("epoch-001.pt", poison),
        ("final.pt", lambda path: path.write_bytes(b"")),
    ],
    ids=["truncated safetensors", "flipped bits", "foreign pickled object", "empty file"],
)
def test_damaged_checkpoint_stops_its_inspection(workplace, monkeypatch, capfd, checkpoint, damage):
    monkeypatch.chdir(workplace.directory)
    damage(workplace.directory / "run" / checkpoint)
    record = workplace.directory / "results" / "inspect" / f"{checkpoint}.json"
    before = record.read_bytes() if record.exists() else None
    status = steps.main(["inspect", "--config", "results/config.yaml", f"--checkpoint={checkpoint}"])
    last = capfd.readouterr().err.rstrip().splitlines()[-1]
    assert status == 1
    assert last.startswith("hvpflow: error: ")
    assert checkpoint in last
    assert (record.read_bytes() if record.exists() else None) == before
    assert not (workplace.directory / "executed").exists()


def test_analyze_checks_every_checkpoint_before_the_first_measurement(workplace):
    """One damaged file among several: the last line names it, and no record of any checkpoint was made."""
    damage_safetensors(workplace.directory / "run" / "epoch-002.safetensors")
    words = ["analyze", "--run", "run", "--checkpoints", "epoch-001.safetensors", "epoch-002.safetensors"]
    done = workplace.hvpflow(*words, "--output", "out put", "--device", "cpu", check=False)
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("hvpflow: error: ")
    assert "epoch-002.safetensors" in last
    assert not (workplace.directory / "out put" / "work").exists()
    assert "Traceback" not in done.stdout + done.stderr


def test_analyze_status_plot_and_clean(workplace):
    """The commands on one finished analysis, in a directory whose name has a blank."""
    words = ["analyze", "--run", "run", "--checkpoints", "final.pt", "--output", "out put", "--device", "cpu"]
    words += ["--noise-samples", "2", "--random-samples", "1", "--data-case", "seen"]
    dry = workplace.hvpflow(*words, "--dry-run")
    assert "measure" in dry.stdout + dry.stderr
    assert not (workplace.directory / "out put").exists()
    done = workplace.hvpflow(*words)
    assert "summary.csv" in done.stderr.rstrip().splitlines()[-4]
    assert "gradient-norms.png" in done.stderr.rstrip().splitlines()[-1]
    again = workplace.hvpflow(*words)
    assert "Nothing to be done" in again.stdout + again.stderr

    status = workplace.hvpflow("status", "--output", "out put").stdout
    assert "1 done, 0 pending" in status
    assert "none" in status
    figure = workplace.directory / "out put" / "gradient-norms.png"
    plain = figure.read_bytes()
    workplace.hvpflow("plot-analysis", "--output", "out put", "--training-norms")
    assert figure.read_bytes() != plain
    workplace.hvpflow("plot-analysis", "--output", "out put")
    assert figure.read_bytes() == plain
    assert "would remove" in workplace.hvpflow("clean", "--output", "out put", "--dry-run").stdout
    assert "removed" in workplace.hvpflow("clean", "--output", "out put").stdout
    assert not (workplace.directory / "out put" / "store").exists()
    assert "nothing to remove" in workplace.hvpflow("clean", "--output", "out put").stdout
    last = workplace.hvpflow(*words)
    assert "Nothing to be done" in last.stdout + last.stderr


@pytest.mark.parametrize(
    ("analysis", "says"),
    [
        ({"noise_sampels": 3}, "unknown key 'noise_sampels' in analysis (did you mean 'noise_samples'?)"),
        ({"checkpoints": ["epoch-003.pt"]}, "epoch-003.pt"),
        ({"device": "cuda:x"}, "analysis.device is 'cuda:x'"),
    ],
    ids=["unknown key", "unknown checkpoint", "unknown device"],
)
def test_raw_snakemake_says_the_message(workplace, analysis, says):
    workplace.change("analysis", **analysis)
    done = workplace.snakemake(check=False)
    assert done.returncode != 0
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_cuda_asked_for_but_absent(workplace, monkeypatch, capfd):
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    monkeypatch.chdir(workplace.directory)
    words = ["analyze", "--run", "run", "--checkpoints", "final.pt", "--output", "out", "--device", "cuda"]
    done = workplace.hvpflow(*words, check=False)
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("hvpflow: error: ")
    assert "--device cpu" in last


def test_settings_that_changed_under_a_planned_job_are_refused(workplace, monkeypatch, capfd):
    monkeypatch.chdir(workplace.directory)
    words = ["measure", "--config", "results/config.yaml", "--checkpoint=final.pt", "--case", "seen", "--settings", "0"]
    assert steps.main(words) == 1
    assert "changed since this job was planned" in capfd.readouterr().err


def test_a_record_of_other_settings_is_refused(workplace, monkeypatch, capfd):
    """A measure record that was copied to another settings' place never becomes samples."""
    monkeypatch.chdir(workplace.directory)
    config = config_from_mapping(workplace.read_config())
    old = make_plan(config)
    workplace.change("analysis", seed=7)
    mapping = workplace.read_config()
    new = make_plan(config_from_mapping(mapping))
    source = old.measure_path("epoch-001.safetensors", "seen", 0)
    target = new.measure_path("epoch-001.safetensors", "seen", 0)
    target.parent.mkdir(parents=True)
    shutil.copy2(source, target)
    published = workplace.directory / "results" / "samples" / "epoch-001.safetensors.seen.json"
    before = published.read_bytes()
    words = ["samples", "--config", str(workplace.config), "--checkpoint=epoch-001.safetensors", "--case", "seen"]
    assert steps.main(words) == 1
    assert "other weights, data or settings" in capfd.readouterr().err
    assert published.read_bytes() == before


def test_log_repeats_what_was_said(workplace):
    log = workplace.directory / "results" / "logs" / "inspect" / "final.pt.log"
    record = read_json(workplace.directory / "results" / "inspect" / "final.pt.json")
    assert record["weights_hash"][:12] in log.read_text(encoding="utf-8")


def test_command_line_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for command in ("prepare", "train", "evaluate", "analyze", "plot-analysis", "status", "clean"):
        assert command in shown
