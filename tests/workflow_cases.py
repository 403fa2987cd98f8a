"""A run small enough to be prepared, trained and analysed by the real workflow within a minute."""

from __future__ import annotations

import fcntl
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
TEXT = (
    "the gradient of a loss points where curvature bends and noise wanders along sharp valleys while flat directions "
    "stay quiet until training ends and every token has been seen once or never before by this small model"
)


def tiny_mapping() -> dict[str, Any]:
    """A configuration of the smallest useful size; paths are relative to the working directory."""
    return {
        "output": "results",
        "corpus": {"source": "files", "files": ["text/*.txt"]},
        "model": {
            "vocab_size": 300,
            "layers": 1,
            "width": 16,
            "heads": 2,
            "ffn_width": 24,
            "context_length": 16,
        },
        "data": {
            "cache_dir": "cache",
            "dataset": "local/words",
            "tokenizer": "train-bpe",
            "shard_tokens": 512,
            "shuffle_group_size": 1,
            "shuffle_buffer": 16,
            "tokenize_batch_size": 8,
        },
        "optimizer": {"lr": 0.01},
        "lr_schedule": {"name": "cosine", "warmup_steps": 2},
        "training": {
            "tokens_per_parameters": 0.6,
            "epoch_tokens_per_parameters": 0.15,
            "batch_tokens": 96,
            "micro_batch_size": 4,
            "checkpoint_policy": "explicit",
            "checkpoint_epochs": [1, 2, 4],
            "save_epoch_training_state": True,
            "log_every": 5,
        },
        "evaluation": {"subset_blocks": 8, "batch_size": 8},
        "runtime": {"output_dir": "run", "device": "cpu"},
        "analysis": {
            "checkpoints": ["epoch-001.safetensors", "epoch-004.pt", "final.pt"],
            "noise_samples": 3,
            "random_samples": 2,
            "device": "cpu",
            "cpu_threads": 1,
            "directions_per_pass": 4,
        },
    }


def write_text_files(directory: Path) -> None:
    """Eight files of made-up sentences, the same ones every time."""
    draw = random.Random(7)
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(8):
        lines = [" ".join(draw.choices(TEXT.split(), k=12)) + "." for _ in range(120)]
        (directory / f"{number}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


class Workplace:
    """A working directory in which the real Snakemake is run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = directory / "config.yaml"

    def write_config(self, mapping: dict[str, Any]) -> None:
        self.config.write_text(yaml.safe_dump(mapping, sort_keys=False), encoding="utf-8")

    def read_config(self) -> dict[str, Any]:
        return yaml.safe_load(self.config.read_text(encoding="utf-8"))

    def change(self, section: str, **values: Any) -> None:
        mapping = self.read_config()
        mapping[section] |= values
        self.write_config(mapping)

    def snakemake(self, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [
            *(sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--configfile"),
            *(str(self.config), "--directory", str(self.directory), "-j1", *options),
        ]
        return run(command, self.directory, check=check)

    def pending(self, *options: str) -> list[str]:
        """Names of the jobs that a dry run lists, one for each job."""
        shown = self.snakemake("-n", *options)
        text = shown.stdout + shown.stderr
        return [
            line.split()[1].rstrip(":")
            for line in text.splitlines()
            if line.startswith(("rule ", "localrule ")) and not line.startswith("rule all")
        ]

    def hvpflow(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run([sys.executable, "-m", "hvpflow.cli", *words], self.directory, check=check)


def finished_workflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory where the whole workflow ran once; processes that test side by side share it."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    place = Workplace(base / "finished-workflow")
    with (base / "finished-workflow.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place.directory / "results" / "summary.csv").is_file():
            write_text_files(place.directory / "text")
            place.write_config(tiny_mapping())
            place.snakemake()
    return place.directory


def environment(directory: Path) -> dict[str, str]:
    """Environment variables of a command whose working directory is ``directory``."""
    return os.environ | {"PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(directory / ".cache-home")}


def run(command: Sequence[str], directory: Path, *, check: bool) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=directory, env=environment(directory), capture_output=True, text=True, timeout=600
    )
    if check and done.returncode:
        raise AssertionError(f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def scalars(path: Path) -> Any:
    """A samples file without what differs between two equal measurements: times."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: strip(v) for k, v in value.items() if not k.endswith("seconds") and k not in ("timing", "checksum")
            }
        return [strip(item) for item in value] if isinstance(value, list) else value

    return strip(json.loads(path.read_text(encoding="utf-8")))
