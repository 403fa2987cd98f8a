"""Tokenizers: trained here, loaded from files, fetched from the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvpflow.data.tokenizer import END_OF_TEXT, load_tokenizer, parallelism, train_bpe
from hvpflow.errors import HvpflowError
from hvpflow.files import sha256_file

TEXTS = ["the cat sat on the mat", "the dog sat on the log " * 20, "ünïcödé ☃ 雪", "\ttabs\nand lines\r\n"]


def test_training_is_byte_level_and_ends_documents_with_token_0(tmp_path: Path) -> None:
    tokenizer = train_bpe(TEXTS, 300)
    assert tokenizer.eos_token_id == 0
    encoded = tokenizer.encode([*TEXTS, "never seen: ƿ 🦉", ""])
    assert all(tokens.dtype == np.uint16 and tokens[-1] == 0 and 0 not in tokens[:-1] for tokens in encoded)
    for text, tokens in zip([*TEXTS, "never seen: ƿ 🦉", ""], encoded):
        assert tokenizer.tokenizer.decode(tokens[:-1].tolist()) == text
    assert len(encoded[1]) < len(TEXTS[1]) / 2
    tokenizer.save(tmp_path)
    assert tokenizer.fingerprint == sha256_file(tmp_path / "tokenizer.json")
    assert tokenizer.revision == f"sha256-{tokenizer.fingerprint[:12]}"
    again = load_tokenizer(str(tmp_path / "tokenizer.json"), "main", 300)
    assert (again.revision, again.eos_token_id) == (tokenizer.revision, 0)
    assert [a.tolist() for a in again.encode(TEXTS)] == [a.tolist() for a in tokenizer.encode(TEXTS)]
    assert load_tokenizer(str(tmp_path), "mine", 300).revision == "mine"


def test_a_document_cannot_spell_the_end_of_text() -> None:
    tokenizer = train_bpe(TEXTS, 300)
    tokens = tokenizer.encode([f"before {END_OF_TEXT} behind"])[0]
    assert tokens[:-1].min() > 0
    assert tokenizer.tokenizer.decode(tokens[:-1].tolist()) == f"before {END_OF_TEXT} behind"


def test_training_is_the_same_in_every_process_and_with_every_number_of_threads() -> None:
    program = (
        "import sys; from hvpflow.data.tokenizer import *\n"
        "texts = [' '.join(f'word{n * m % 97}' for n in range(200)) for m in range(60)]\n"
        "with parallelism(int(sys.argv[1])): print(train_bpe(texts, 400).fingerprint)"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", program, threads],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads, seed in (("1", "1"), ("3", "2"))
    }
    assert len(prints) == 1


def test_truncation_in_a_file_does_not_shorten_documents(tmp_path: Path) -> None:
    tokenizer = train_bpe(TEXTS, 300)
    tokenizer.tokenizer.enable_truncation(4)
    tokenizer.tokenizer.enable_padding(length=9)
    tokenizer.tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"), "main", 300)
    lengths = [len(tokens) for tokens in loaded.encode(TEXTS)]
    tokenizer.tokenizer.no_truncation()
    tokenizer.tokenizer.no_padding()
    assert lengths == [len(tokens) for tokens in tokenizer.encode(TEXTS)]
    assert max(lengths) > 9


def test_end_of_text_is_found_or_asked_for(tmp_path: Path) -> None:
    tokenizer = train_bpe(TEXTS, 300)
    text = tokenizer.tokenizer.to_str().replace(END_OF_TEXT, "[FIN]")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(HvpflowError, match=r"no end-of-text token .*eos_token"):
        load_tokenizer(str(tmp_path), "main", 300)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "[FIN]"}}))
    assert load_tokenizer(str(tmp_path), "main", 300).eos_token_id == 0


def test_sizes_that_do_not_fit(tmp_path: Path) -> None:
    train_bpe(TEXTS, 300).save(tmp_path)
    with pytest.raises(
        HvpflowError, match=r"token ids up to \d+, but model\.vocab_size is 270: set model\.vocab_size="
    ):
        load_tokenizer(str(tmp_path), "main", 270)
    with pytest.raises(HvpflowError, match="at least 257"):
        train_bpe(TEXTS, 256)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(HvpflowError, match="no such file"):
        load_tokenizer(str(tmp_path / "tokenizer.json"), "main", 300)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(HvpflowError, match="cannot load the tokenizer"):
        load_tokenizer(str(tmp_path), "main", 300)


def test_hub_names_are_pinned_to_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    snapshot = tmp_path / "snapshots" / "0123abcd"
    train_bpe(TEXTS, 300).save(snapshot)
    asked = []

    def download(name: str, file: str, *, revision: str) -> str:
        asked.append((name, file, revision))
        if not (snapshot / file).exists():
            raise FileNotFoundError(file)
        return str(snapshot / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    tokenizer = load_tokenizer("someone/tokenizer", "v2", 300)
    assert tokenizer.revision == "0123abcd"
    assert asked[0] == ("someone/tokenizer", "tokenizer.json", "v2")
    (snapshot / "tokenizer.json").unlink()
    with pytest.raises(HvpflowError, match=r"cannot fetch .*'someone/tokenizer', revision 'v2'.*network"):
        load_tokenizer("someone/tokenizer", "v2", 300)


def test_parallelism_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "maybe")
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    with parallelism(3):
        assert (os.environ["TOKENIZERS_PARALLELISM"], os.environ["RAYON_NUM_THREADS"]) == ("true", "3")
    assert os.environ["TOKENIZERS_PARALLELISM"] == "maybe"
    assert "RAYON_NUM_THREADS" not in os.environ
