"""Hugging Face datasets: local directories through the optional package, and what is said in its absence."""

from __future__ import annotations

import builtins
import json
import types
from pathlib import Path
from typing import Any

import pytest

from hvpflow.data import corpus as corpus_module
from hvpflow.data.corpus import CorpusSettings, open_corpus
from hvpflow.data.prepare import PrepareRequest, prepare_cache
from hvpflow.errors import HvpflowError


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def absent(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(HvpflowError, match=r"pip install 'hvpflow\[huggingface\]'"):
        open_corpus(CorpusSettings(source="huggingface"), "someone/data", "main")


def test_a_name_on_the_hub_is_pinned_and_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    commit = "0123456789" * 4

    def load_dataset(*arguments: Any, **options: Any) -> list[dict[str, Any]]:
        calls.append((arguments, options))
        if options["split"] == "absent":
            raise ValueError('Unknown split "absent"\nmore')
        return [{"text": f"{options['split']} {number}"} for number in range(3)]

    import huggingface_hub

    info = types.SimpleNamespace(sha=commit)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name, revision: info)
    monkeypatch.setattr(corpus_module, "_import_datasets", lambda: types.SimpleNamespace(load_dataset=load_dataset))
    settings = CorpusSettings(source="huggingface", subset="en", split="train", validation_split="test")
    found = open_corpus(settings, "someone/data", "main")
    assert found.revision == commit
    assert list(found.documents()) == ["train 0", "train 1", "train 2"]
    assert found.validation_documents is not None
    assert list(found.validation_documents()) == ["test 0", "test 1", "test 2"]
    assert calls[0] == (("someone/data", "en"), {"split": "train", "streaming": True, "revision": commit})
    with pytest.raises(HvpflowError, match=r"cannot load .*'someone/data', split 'absent'.*Unknown split \"absent\"; "):
        next(open_corpus(CorpusSettings(source="huggingface", split="absent"), "someone/data", commit).documents())
    with pytest.raises(HvpflowError, match=r"no text in field 'txt' \(did you mean 'text'\?\)"):
        next(open_corpus(CorpusSettings(source="huggingface", text_field="txt"), "someone/data", commit).documents())


@pytest.fixture
def local_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("datasets", reason="needs the optional package: pip install 'hvpflow[huggingface]'")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf-cache"))
    directory = tmp_path / "dataset"
    directory.mkdir()
    for split, count in (("train", 120), ("test", 20)):
        rows = [{"text": f"{split} document {number}: " + "some words " * 5} for number in range(count)]
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_a_local_directory_becomes_a_cache(local_dataset: Path, tmp_path: Path) -> None:
    request = PrepareRequest(
        dataset=str(local_dataset),
        revision="main",
        tokenizer="train-bpe",
        tokenizer_revision="main",
        vocab_size=280,
        corpus=CorpusSettings(source="huggingface", validation_split="test"),
        shuffle_seed=1,
        shuffle_buffer=10,
        shard_tokens=500,
        tokenize_batch_size=7,
        train_tokens=1500,
        validation_tokens=100000,
    )
    cache = prepare_cache(request, tmp_path / "cache", num_workers=1)
    cache.verify()
    assert cache.manifest["dataset_revision"].startswith("sha256-")
    # The whole split is less than was asked for: it is taken whole, and says so.
    assert cache.manifest["validation_complete"] is True
    assert cache.split("train").tokens == 1500
    assert prepare_cache(request, tmp_path / "cache", num_workers=1).identity == cache.identity


def test_a_dataset_saved_to_disk(local_dataset: Path, tmp_path: Path) -> None:
    import datasets

    loaded = datasets.load_dataset(str(local_dataset), cache_dir=str(tmp_path / "hf-cache"))
    loaded.save_to_disk(str(tmp_path / "saved"))
    settings = CorpusSettings(source="huggingface", split="test")
    texts = list(open_corpus(settings, str(tmp_path / "saved"), "main").documents())
    assert texts == list(open_corpus(settings, str(local_dataset), "main").documents())
    assert len(texts) == 20
    with pytest.raises(HvpflowError, match="cannot load the Hugging Face dataset"):
        next(
            open_corpus(CorpusSettings(source="huggingface", split="nope"), str(tmp_path / "saved"), "main").documents()
        )
