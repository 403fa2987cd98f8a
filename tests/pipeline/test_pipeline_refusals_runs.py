"""Bad run directories, token caches and output directories."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusal_cases import Refusal, analyze, edit_json, edit_yaml, in_turn, refused, write
from workflow_cases import tiny_mapping

from hvpflow.files import fingerprint, read_record, write_record
from hvpflow.pipeline.plan import settings_digest
from hvpflow.pipeline.settings import config_from_mapping


def remove_checkpoints(directory: Path) -> None:
    for path in (directory / "run").glob("*.*"):
        if path.suffix in (".pt", ".safetensors"):
            path.unlink()


def shrink_cache(directory: Path) -> None:
    """Keep the manifest consistent, but cut the training split to two shards."""
    path = directory / "cache" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    split = manifest["splits"]["train"]
    split["shards"] = split["shards"][:2]
    split["tokens"] = sum(shard["tokens"] for shard in split["shards"])
    del manifest["identity"]
    manifest["identity"] = fingerprint(manifest)
    path.write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def forge(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the token cache's manifest and give it a valid identity again, as a careful forger would."""

    def arrange(directory: Path) -> None:
        path = directory / "cache" / "manifest.json"
        manifest = json.loads(path.read_text(encoding="utf-8"))
        change(manifest)
        del manifest["identity"]
        manifest["identity"] = fingerprint(manifest)
        path.write_text(json.dumps(manifest), encoding="utf-8")

    return arrange


def name_shard(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["splits"]["train"]["shards"][0].update(file=name)


def alter_shard(directory: Path) -> None:
    path = directory / "cache" / "train-00003.bin"
    path.write_bytes(path.read_bytes()[::-1])


def forget_work(directory: Path) -> None:
    shutil.rmtree(directory / "results" / "store")


def damage(*patterns: str) -> Callable[[Path], None]:
    """Change one digit in each of the files."""

    def arrange(directory: Path) -> None:
        for path in [path for pattern in patterns for path in directory.glob(pattern)]:
            content = path.read_text(encoding="utf-8")
            place = next(place for place, letter in enumerate(content) if letter in "12345678")
            path.write_text(f"{content[:place]}9{content[place + 1 :]}", encoding="utf-8")

    return arrange


def name_samples_outside(directory: Path) -> None:
    path = directory / "results" / "manifest.json"
    manifest = read_record(path)
    manifest["checkpoints"][0]["samples"]["seen"] = "../run/result.json"
    write_record(path, manifest)


def measure() -> list[str]:
    return [
        *step("measure", "epoch-001.safetensors"),
        "--settings",
        settings_digest(config_from_mapping(tiny_mapping())),
    ]


def samples() -> list[str]:
    return step("samples", "epoch-004.pt")


def step(name: str, checkpoint: str) -> list[str]:
    return [name, "--config", "results/config.yaml", f"--checkpoint={checkpoint}", "--case", "seen"]


REFUSALS = [
    Refusal("run is missing", analyze(run="runs/none"), ["runs/none"]),
    Refusal("run is a file", analyze(run="config.yaml"), ["config.yaml"]),
    Refusal("run without recipe", analyze(run="text"), ["resolved.yaml"]),
    Refusal("no checkpoints kept", analyze(), ["checkpoint_policy", "final", "interval"], remove_checkpoints),
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
    Refusal("run is a link to itself", analyze(run="loop"), ["loop"], lambda d: (d / "loop").symlink_to("loop")),
    Refusal(
        "recipe that would run code",
        analyze(),
        ["resolved.yaml", "python/object"],
        write("run/resolved.yaml", "model: !!python/object/apply:os.system ['touch executed']\n"),
    ),
    Refusal(
        "recipe with aliases", analyze(), ["resolved.yaml", "alias"], write("run/resolved.yaml", "a: &a [1]\nb: [*a]\n")
    ),
    Refusal("recipe is empty", analyze(), ["resolved.yaml"], write("run/resolved.yaml", "")),
    Refusal(
        "workers are missing",
        analyze(),
        ["missing worker checkpoint", "node-000", "--no-consensus"],
        in_turn(
            edit_yaml("run/resolved.yaml", "decentralized", value={"num_models": 2}),
            edit_yaml("run/resolved.yaml", "training", "micro_batch_size", value=3),
        ),
    ),
    Refusal(
        "manifest is no JSON", analyze(), ["cache/manifest.json", "not valid JSON"], write("cache/manifest.json", "{")
    ),
    Refusal("manifest is a list", analyze(), ["no token cache manifest"], write("cache/manifest.json", "[]")),
    Refusal("manifest is binary", analyze(), ["manifest.json"], write("cache/manifest.json", b"\xff\x00")),
    Refusal("manifest nested without end", analyze(), ["manifest.json"], write("cache/manifest.json", "[" * 200_000)),
    Refusal("manifest of another version", analyze(), ["version", "2"], forge(lambda m: m.update(version=2))),
    Refusal("tokens of another type", analyze(), ["<u4"], forge(lambda m: m.update(dtype="<u4"))),
    Refusal("no training split", analyze(), ["no split 'train'"], forge(lambda m: m["splits"].pop("train"))),
    Refusal("splits are a list", analyze(), ["splits"], forge(lambda m: m.update(splits=[]))),
    Refusal("shard outside", analyze(), ["shard name", "../text"], forge(name_shard("../text/0.txt"))),
    Refusal("shard elsewhere", analyze(), ["shard name", "/etc/hosts"], forge(name_shard("/etc/hosts"))),
    Refusal("shard without a name", analyze(), ["shard name"], forge(name_shard(""))),
    Refusal(
        "fewer tokens than declared", analyze(), ["declared"], forge(lambda m: m["splits"]["train"].update(tokens=9))
    ),
    Refusal(
        "shard is a directory",
        analyze(),
        ["train-00000.bin"],
        in_turn(
            lambda d: (d / "cache" / "train-00000.bin").unlink(), lambda d: (d / "cache" / "train-00000.bin").mkdir()
        ),
    ),
    Refusal("shard altered", measure(), ["checksum mismatch", "train-00003.bin"], in_turn(alter_shard, forget_work)),
    Refusal("output below a file", analyze(output="config.yaml/out"), ["config.yaml"]),
    Refusal("output is the run", analyze(output="run"), ["holds other files"]),
    Refusal("owner is a list", analyze(output="results"), ["owner.json"], write("results/owner.json", "[]")),
    Refusal("owner is cut", analyze(output="results"), ["owner.json"], write("results/owner.json", '{"run"')),
    Refusal(
        "output's configuration is cut",
        ["status", "--output", "results"],
        ["results/config.yaml"],
        write("results/config.yaml", "run: [1"),
    ),
    Refusal(
        "measurement is damaged",
        samples(),
        ["damaged", "0.json"],
        damage("results/work/*/final.pt/seen/0.json", "results/work/*/epoch-004.pt/seen/0.json"),
    ),
    Refusal(
        "inspection is damaged",
        samples(),
        ["damaged", "epoch-004.pt.json"],
        damage("results/inspect/epoch-004.pt.json"),
    ),
    Refusal(
        "status of a damaged measurement",
        ["status", "--output", "results"],
        ["damaged"],
        damage("results/work/*/*/*/0.json"),
    ),
    Refusal(
        "samples are damaged",
        ["plot-analysis", "--output", "results"],
        ["damaged", "epoch-001.safetensors.seen.json"],
        damage("results/samples/epoch-001.safetensors.seen.json"),
    ),
    Refusal(
        "manifest of results is damaged",
        ["plot-analysis", "--output", "results"],
        ["damaged"],
        damage("results/manifest.json"),
    ),
    Refusal(
        "samples outside",
        ["plot-analysis", "--output", "results"],
        ["outside", "../run/result.json"],
        name_samples_outside,
    ),
    Refusal(
        "metrics are cut",
        ["plot-analysis", "--output", "results", "--training-norms"],
        ["metrics.jsonl"],
        write("run/metrics.jsonl", '{"event": "tra'),
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_run_cache_or_output(refusal, workplace, monkeypatch, capfd):
    refused(refusal, workplace, monkeypatch, capfd)
