"""Bad input: one clear message as the last line of stderr, a status other than 0, no traceback, no changed file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from hvpflow import cli


def tree(directory: Path) -> dict[str, str]:
    """Digest of every file, without Python's and Snakemake's own caches."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and not name.startswith((".snakemake", ".cache-home")) and "/.snakemake/" not in name:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@dataclasses.dataclass(frozen=True)
class Refusal:
    """What is done to a finished run's directory, what is then asked, and what must be said."""

    name: str
    words: Sequence[str]
    says: Sequence[str]
    arrange: Callable[[Path], object] = lambda directory: None


def analyze(*options: str, run: str = "run", checkpoints: Sequence[str] = ("all",), output: str = "out") -> list[str]:
    return ["analyze", "--run", run, "--checkpoints", *checkpoints, "--output", output, *options]


def edit_yaml(name: str, *keys: str, value: object) -> Callable[[Path], object]:
    def arrange(directory: Path) -> None:
        path = directory / name
        mapping = yaml.safe_load(path.read_text(encoding="utf-8"))
        inner = mapping
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
        path.write_text(yaml.safe_dump(mapping), encoding="utf-8")

    return arrange


def edit_json(name: str, key: str, value: Callable[[Path], object]) -> Callable[[Path], None]:
    def arrange(directory: Path) -> None:
        path = directory / name
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(content | {key: value(directory)}), encoding="utf-8")

    return arrange


def in_turn(*arrangements: Callable[[Path], object]) -> Callable[[Path], None]:
    def arrange(directory: Path) -> None:
        for each in arrangements:
            each(directory)

    return arrange


def remove_checkpoints(directory: Path) -> None:
    for path in (directory / "run").glob("*.*"):
        if path.suffix in (".pt", ".safetensors"):
            path.unlink()


def shrink_cache(directory: Path) -> None:
    """Keep the manifest consistent, but cut the training split to two shards."""
    from hvpflow.files import fingerprint

    path = directory / "cache" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    split = manifest["splits"]["train"]
    split["shards"] = split["shards"][:2]
    split["tokens"] = sum(shard["tokens"] for shard in split["shards"])
    del manifest["identity"]
    manifest["identity"] = fingerprint(manifest)
    path.write_text(json.dumps(manifest, indent=2), encoding="utf-8")


REFUSALS = [
    Refusal("no command", [], ["command"]),
    Refusal("unknown command", ["analyse"], ["analyze"]),
    Refusal("unknown option", analyze("--noise-sample", "3"), ["--noise-samples"]),
    Refusal("snakemake options elsewhere", ["status", "--output", "results", "--", "-n"], ["only analyze"]),
    Refusal("run is missing", analyze(run="runs/none"), ["runs/none"]),
    Refusal("run is a file", analyze(run="config.yaml"), ["config.yaml"]),
    Refusal("run without recipe", analyze(run="text"), ["resolved.yaml"]),
    Refusal("unknown checkpoint", analyze(checkpoints=["epoch-003.pt"]), ["epoch-003.pt", "epoch-001.pt"]),
    Refusal("misspelt checkpoint", analyze(checkpoints=["finale.pt"]), ["did you mean 'final.pt'"]),
    Refusal("no checkpoints kept", analyze(), ["checkpoint_policy", "final", "interval"], remove_checkpoints),
    Refusal("noise samples 0", analyze("--noise-samples", "0"), ["noise_samples is 0", "at least 1"]),
    Refusal("noise samples negative", analyze("--noise-samples", "-4"), ["noise_samples is -4"]),
    Refusal("noise samples no number", analyze("--noise-samples", "many"), ["many", "whole number or all"]),
    Refusal("random samples 0", analyze("--random-samples", "0"), ["random_samples is 0"]),
    Refusal("random samples no number", analyze("--random-samples", "x"), ["--random-samples", "x"]),
    Refusal("seed negative", analyze("--seed", "-1"), ["seed is -1", "4294967295"]),
    Refusal("seed too large", analyze("--seed", "4294967296"), ["seed is 4294967296"]),
    Refusal("AMP with float64", analyze("--amp", "--dtype", "float64"), ["amp", "float64"]),
    Refusal("unknown dtype", analyze("--dtype", "float16"), ["float16", "float32"]),
    Refusal("unknown case", analyze("--data-case", "later"), ["later", "unseen"]),
    Refusal("unknown device", analyze("--device", "gpu"), ["gpu", "cuda"]),
    Refusal("HVP batch 0", analyze("--hvp-batch-size", "0"), ["hvp_batch_size is 0"]),
    Refusal("no direction per pass", analyze("--directions-per-pass", "0"), ["directions_per_pass is 0"]),
    Refusal("no shards", analyze("--shards", "0"), ["shards is 0"]),
    Refusal("no cores", analyze("--cores", "0"), ["--cores", "at least 1"]),
    Refusal("cache is elsewhere", analyze("--cache-dir", "caches"), ["caches"]),
    Refusal("cache is gone", analyze(), ["no token cache", "--cache-dir"], lambda d: shutil.rmtree(d / "cache")),
    Refusal("cache too small", analyze(), ["hvpflow prepare", "prepare_train_tokens"], shrink_cache),
    Refusal(
        "manifest was edited", analyze(), ["identity"], edit_json("cache/manifest.json", "dataset", lambda _: "local/x")
    ),
    Refusal(
        "shard truncated",
        analyze(),
        ["train-00000.bin"],
        lambda d: os.truncate(d / "cache" / "train-00000.bin", 100),
    ),
    Refusal("shard missing", analyze(), ["train-00001.bin"], lambda d: (d / "cache" / "train-00001.bin").unlink()),
    Refusal(
        "vocabulary differs", analyze(), ["vocab"], edit_yaml("run/resolved.yaml", "model", "vocab_size", value=301)
    ),
    Refusal("dataset differs", analyze(), ["dataset"], edit_yaml("run/resolved.yaml", "data", "dataset", value="x")),
    Refusal(
        "shuffle seed differs",
        analyze(),
        ["shuffle_seed"],
        edit_yaml("run/resolved.yaml", "data", "shuffle_seed", value=1),
    ),
    Refusal(
        "unknown recipe key",
        analyze(),
        ["'widht'", "did you mean 'width'"],
        edit_yaml("run/resolved.yaml", "model", "widht", value=16),
    ),
    Refusal(
        "unknown recipe section",
        analyze(),
        ["'trainning'", "did you mean 'training'"],
        edit_yaml("run/resolved.yaml", "trainning", value={}),
    ),
    Refusal(
        "recipe key of an older format",
        analyze(),
        ["epoch_tokens_per_parameters"],
        edit_yaml("run/resolved.yaml", "training", "epoch_tokens_per_parameter", value=0.1),
    ),
    Refusal(
        "epochs do not divide",
        analyze(),
        ["epoch_tokens_per_parameters"],
        edit_yaml("run/resolved.yaml", "training", "tokens_per_parameters", value=0.61),
    ),
    Refusal("heads do not divide", analyze(), ["heads"], edit_yaml("run/resolved.yaml", "model", "heads", value=3)),
    Refusal("not a number", analyze(), ["nan"], edit_yaml("run/resolved.yaml", "optimizer", "lr", value=float("nan"))),
    Refusal(
        "recipe is no YAML", analyze(), ["resolved.yaml"], lambda d: (d / "run" / "resolved.yaml").write_text("a: [1")
    ),
    Refusal(
        "recipe is a list", analyze(), ["resolved.yaml"], lambda d: (d / "run" / "resolved.yaml").write_text("- 1\n")
    ),
    Refusal(
        "recipe is binary",
        analyze(),
        ["resolved.yaml"],
        lambda d: (d / "run" / "resolved.yaml").write_bytes(b"\xff\xfe\x00"),
    ),
    Refusal(
        "output of another run",
        analyze(output="results", run="other"),
        ["another run"],
        in_turn(
            lambda directory: shutil.copytree(directory / "run", directory / "other"),
            edit_yaml("other/resolved.yaml", "runtime", "seed", value=5),
        ),
    ),
    Refusal(
        "recipe changed under the analysis",
        analyze(output="results"),
        ["resolved.yaml changed"],
        in_turn(
            edit_json("results/owner.json", "run", lambda directory: str(directory / "run")),
            edit_yaml("run/resolved.yaml", "runtime", "seed", value=5),
        ),
    ),
    Refusal("output holds other files", analyze(output="text"), ["holds other files"]),
    Refusal("output is a file", analyze(output="config.yaml"), ["config.yaml"]),
    Refusal("output with a brace", analyze(output="a{b}"), ["brace"]),
    Refusal("status of no output", ["status", "--output", "run"], ["no output directory"]),
    Refusal("plot of no output", ["plot-analysis", "--output", "text"], ["no output directory"]),
    Refusal("clean of no output", ["clean", "--output", "cache"], ["no output directory"]),
    Refusal(
        "plot before the end",
        ["plot-analysis", "--output", "results"],
        ["finish the analysis"],
        lambda d: (d / "results" / "manifest.json").unlink(),
    ),
    Refusal(
        "training norms without metrics",
        ["plot-analysis", "--output", "results", "--training-norms"],
        ["metrics.jsonl"],
        lambda d: (d / "run" / "metrics.jsonl").unlink(),
    ),
    Refusal("config is missing", ["prepare", "--config", "none.yaml"], ["none.yaml"]),
    Refusal("config is a directory", ["prepare", "--config", "text"], ["text"]),
    Refusal("config is empty", ["train", "--config", "empty.yaml"], ["recipe"], lambda d: (d / "empty.yaml").touch()),
    Refusal(
        "config with aliases",
        ["train", "--config", "bomb.yaml"],
        ["aliases"],
        lambda d: (d / "bomb.yaml").write_text("a: &a [1]\nb: [*a, *a]\n"),
    ),
    Refusal(
        "config nested without end",
        ["train", "--config", "deep.yaml"],
        ["deep.yaml"],
        lambda d: (d / "deep.yaml").write_text("[" * 100_000),
    ),
    Refusal(
        "unknown config key",
        ["train", "--config", "config.yaml"],
        ["'analisis'", "did you mean 'analysis'"],
        edit_yaml("config.yaml", "analisis", value={}),
    ),
    Refusal(
        "unknown analysis key",
        ["train", "--config", "config.yaml"],
        ["'noise_sample'", "did you mean 'noise_samples'"],
        edit_yaml("config.yaml", "analysis", "noise_sample", value=3),
    ),
    Refusal(
        "unknown corpus source",
        ["prepare", "--config", "config.yaml"],
        ["python-stdlib"],
        edit_yaml("config.yaml", "corpus", "source", value="stdlib"),
    ),
    Refusal(
        "corpus finds no file",
        ["prepare", "--config", "config.yaml", "--set", "data.cache_dir=new"],
        ["nothing/*.txt"],
        edit_yaml("config.yaml", "corpus", "files", value=["nothing/*.txt"]),
    ),
    Refusal(
        "too little text",
        ["prepare", "--config", "config.yaml", "--set", "data.cache_dir=new"],
        ["tokens"],
        edit_yaml("config.yaml", "data", "prepare_train_tokens", value=10_000_000),
    ),
    Refusal(
        "fewer tokens asked for than needed",
        ["prepare", "--config", "config.yaml", "--set", "data.prepare_train_tokens=100"],
        ["prepare_train_tokens is 100", "need"],
    ),
    Refusal("set without a value", ["train", "--config", "config.yaml", "--set", "training"], ["dotted.key=value"]),
    Refusal("set through a value", ["train", "--config", "config.yaml", "--set", "output.x=1"], ["output"]),
    Refusal("set of no key", ["train", "--config", "config.yaml", "--set", "model.with=3"], ["did you mean 'width'"]),
    Refusal("set to no number", ["train", "--config", "config.yaml", "--set", "model.width=wide"], ["model.width"]),
    Refusal("set to bad YAML", ["train", "--config", "config.yaml", "--set", "model.width=["], ["not valid YAML"]),
    Refusal("unknown recipe", ["train", "--config", "config.yaml", "--set", "recipe=20n"], ["did you mean '20m'"]),
    Refusal(
        "recipe of the old order",
        ["train", "--config", "config.yaml", "--set", "data.buffer_size_mib=0.1"],
        ["buffer_size_mib"],
    ),
    Refusal(
        "batch no multiple of the context",
        ["train", "--config", "config.yaml", "--set", "training.batch_tokens=100"],
        ["batch_tokens"],
    ),
    Refusal(
        "microbatch above the batch",
        ["train", "--config", "config.yaml", "--set", "training.micro_batch_size=7"],
        ["micro_batch_size is 7"],
    ),
    Refusal(
        "policy unknown", ["train", "--config", "config.yaml", "--set", "training.checkpoint_policy=al"], ["final"]
    ),
    Refusal(
        "an epoch that never comes",
        ["train", "--config", "config.yaml", "--set", "training.checkpoint_epochs=[9]"],
        ["9"],
    ),
    Refusal(
        "cache of another recipe",
        ["train", "--config", "config.yaml", "--set", "data.dataset=local/other"],
        ["dataset"],
    ),
    Refusal(
        "evaluate what is not there", ["evaluate", "--config", "config.yaml", "--checkpoint", "epoch-9.pt"], ["epoch"]
    ),
    Refusal("threads 0", ["train", "--config", "config.yaml", "--threads", "0"], ["at least 1"]),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_command_line_refuses(refusal, workplace, monkeypatch, capfd):
    monkeypatch.chdir(workplace.directory)
    refusal.arrange(workplace.directory)
    before = tree(workplace.directory)
    try:
        status = cli.main(list(refusal.words))
    except SystemExit as stop:
        status = stop.code
    output = capfd.readouterr()
    assert status not in (0, None)
    assert "Traceback" not in output.err + output.out
    last = output.err.rstrip().splitlines()[-1]
    assert "error: " in last
    for words in refusal.says:
        assert words in last
    assert tree(workplace.directory) == before
