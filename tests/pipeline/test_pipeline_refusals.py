"""Bad command lines and configurations."""

from __future__ import annotations

import pytest
from refusal_cases import Refusal, analyze, edit_yaml, refused, write


def train(setting: str) -> list[str]:
    return ["train", "--config", "config.yaml", "--set", setting]


REFUSALS = [
    Refusal("no command", [], ["command"]),
    Refusal("unknown command", ["analyse"], ["analyze"]),
    Refusal("unknown option", analyze("--noise-sample", "3"), ["--noise-samples"]),
    Refusal("snakemake options elsewhere", ["status", "--output", "results", "--", "-n"], ["only analyze"]),
    Refusal("unknown checkpoint", analyze(checkpoints=["epoch-003.pt"]), ["epoch-003.pt", "epoch-001.pt"]),
    Refusal("misspelt checkpoint", analyze(checkpoints=["finale.pt"]), ["did you mean 'final.pt'"]),
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
    Refusal("unknown engine", analyze("--engine", "dense"), ["dense", "taylor"]),
    Refusal("checkpoint by path", analyze(checkpoints=["../run/final.pt"]), ["no root checkpoint", "final.pt"]),
    Refusal("checkpoint of a worker", analyze(checkpoints=["node-000/final.pt"]), ["read with their root"]),
    Refusal("checkpoint without a name", analyze(checkpoints=[""]), ["''"]),
    Refusal("all and more", analyze(checkpoints=["all", "final.pt"]), ["'all'"]),
    Refusal("unknown profile", ["submit-analysis", *analyze()[1:], "--profile", "slrum"], ["did you mean 'slurm'"]),
    Refusal("no jobs", ["submit-analysis", *analyze()[1:], "--jobs", "0"], ["--jobs", "at least 1"]),
    Refusal("no name to set", train("=3"), ["dotted.key=value"]),
    Refusal("empty list of checkpoints", train("analysis.checkpoints=[]"), ["empty list"]),
    Refusal("shards true", train("analysis.shards=true"), ["analysis.shards is True", "whole number"]),
    Refusal("no threads", train("analysis.cpu_threads=0"), ["cpu_threads is 0"]),
    Refusal("seed of thirty digits", train(f"analysis.seed={10**30}"), ["seed is 1000"]),
    Refusal("negative rate", train("optimizer.lr=-1"), ["optimizer.lr is -1"]),
    Refusal("infinite rate", train("optimizer.lr=.inf"), ["optimizer.lr is inf", "finite"]),
    Refusal("no layers", train("model.layers=0"), ["model.layers is 0"]),
    Refusal("no context", train("model.context_length=0"), ["model.context_length is 0"]),
    Refusal("vocabulary beyond 16 bits", train("model.vocab_size=70000"), ["vocab_size", "70000"]),
    Refusal("schedule unknown", train("lr_schedule.name=cosin"), ["lr_schedule", "cosine"]),
    Refusal("device unknown", train("runtime.device=tpu"), ["runtime.device", "tpu"]),
    Refusal("no workers", train("decentralized.num_models=0"), ["num_models is 0"]),
    Refusal("section of no mapping", train("model=3"), ["model", "mapping"]),
    Refusal(
        "config that would run code",
        ["train", "--config", "evil.yaml"],
        ["evil.yaml", "python/object"],
        write("evil.yaml", "a: !!python/object/apply:os.system ['touch executed']\n"),
    ),
    Refusal(
        "set that would run code", train("model.width=!!python/object/apply:os.system ['touch executed']"), ["YAML"]
    ),
    Refusal(
        "config that unfolds to gigabytes",
        ["train", "--config", "laughs.yaml"],
        ["aliases"],
        write(
            "laughs.yaml", "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 99))
        ),
    ),
    Refusal("set that unfolds", train("model.width=[&a [1], *a]"), ["aliases"]),
    Refusal(
        "config of two documents",
        ["train", "--config", "two.yaml"],
        ["two.yaml"],
        write("two.yaml", "a: 1\n---\nb: 2\n"),
    ),
    Refusal("config with a NUL", ["train", "--config", "nul.yaml"], ["nul.yaml"], write("nul.yaml", b"a: \0\n")),
    Refusal("config of numbers", ["train", "--config", "number.yaml"], ["mapping"], write("number.yaml", "3\n")),
    Refusal("key that is a number", ["train", "--config", "key.yaml"], ["'3'"], write("key.yaml", "3: 4\n")),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_command_line_or_configuration(refusal, workplace, monkeypatch, capfd):
    refused(refusal, workplace, monkeypatch, capfd)
