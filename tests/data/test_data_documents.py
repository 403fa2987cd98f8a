"""Documents out of text, JSONL and Parquet files, plain and compressed; the standard library; the shuffle buffer."""

from __future__ import annotations

import gzip
import json
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from hvpflow.data.corpus import CorpusSettings, local_fingerprint, open_corpus, shuffled
from hvpflow.data.documents import find_files, read_documents, well_formed
from hvpflow.errors import HvpflowError

TEXTS = ["first\r\ntext", "zweiter Täxt", "третий"]


def write_rows(path: Path, texts: list[str], field: str = "text") -> None:
    """Write documents in the format that the path's suffixes name."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if name.endswith(".parquet"):
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.table({"other": list(range(len(texts))), field: texts}), sink)
        content = sink.getvalue().to_pybytes()
    elif name.endswith(".jsonl"):
        content = "\n\n".join(json.dumps({"other": 1, field: text}) for text in texts).encode()
    else:
        content = texts[0].encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    if path.suffix == ".zst":
        # Two frames: a reader that stops behind the first loses text.
        half = len(content) // 2
        content = b"".join(zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:]))
    path.write_bytes(content)


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".parquet"])
def test_every_format(tmp_path: Path, kind: str, compression: str) -> None:
    path = tmp_path / f"data{kind}{compression}"
    write_rows(path, TEXTS)
    assert list(read_documents(path, "text")) == (TEXTS[:1] if kind == ".txt" else TEXTS)


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_a_missing_field_gets_the_nearest(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"data{kind}"
    write_rows(path, TEXTS, field="content")
    assert list(read_documents(path, "content")) == TEXTS
    with pytest.raises(HvpflowError, match=r"no field 'contents' \(did you mean 'content'\?\).*text_field"):
        list(read_documents(path, "contents"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe\x00", "no UTF-8 text"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2: not valid JSON"),
        ("a.jsonl", b'["x"]', "line 1: expected an object"),
        ("a.jsonl", b'{"text": null}', "holds NoneType, expected text"),
        ("a.txt.gz", gzip.compress(b"x" * 1000, mtime=0)[:-9], "damaged or cut short"),
        ("a.txt.gz", b"plain", "damaged or cut short"),
        ("a.txt.zst", b"plain", "damaged or cut short"),
        ("a.parquet", b"PAR1 no", "no readable Parquet file"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(HvpflowError, match=message) as caught:
        list(read_documents(path, "text"))
    assert str(path) in str(caught.value)


def test_a_cut_zstandard_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.zst"
    lines = "".join(json.dumps({"text": f"document {number} {number**5}"}) + "\n" for number in range(20000))
    path.write_bytes(zstandard.ZstdCompressor().compress(lines.encode())[:-20])
    with pytest.raises(HvpflowError, match="damaged or cut short"):
        list(read_documents(path, "text"))


def test_lone_surrogates_become_encodable() -> None:
    assert well_formed("a\ud800b") == "a\ufffdb"
    assert well_formed("pair 😀") == "pair 😀"


def test_files_are_found_once_and_in_the_order_of_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/deep/d.txt", "skip.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    monkeypatch.chdir(tmp_path)
    found = find_files(["**/*.txt", str(tmp_path / "b.txt")])
    assert list(found) == ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"]
    with pytest.raises(HvpflowError, match=r"no file matches 'no\*'"):
        find_files(["*.txt", "no*"])


def test_revision_and_fingerprint_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    settings = CorpusSettings(source="files", files=(str(tmp_path / "*.txt"),))
    first = open_corpus(settings, "mine", "main")
    assert first.revision == f"sha256-{first.fingerprint[:12]}"
    assert open_corpus(settings, "mine", "v1").revision == "v1"
    (tmp_path / "b.txt").write_text("two")
    assert local_fingerprint(settings, "mine") != first.fingerprint
    assert list(open_corpus(settings, "mine", "main").documents()) == ["one", "two"]


def test_settings_that_cannot_be_meant() -> None:
    with pytest.raises(HvpflowError, match=r"files names none"):
        CorpusSettings(source="files")
    with pytest.raises(HvpflowError, match="validation_split is 'train'"):
        CorpusSettings(source="huggingface", validation_split="train")


def test_standard_library_without_tests_and_undecodable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *("os.py", "json/decoder.py", "Json.py", "test/test_os.py", "json/tests/test_json.py", "site-packages/x.py"),
        *("idlelib/idle_test/test_x.py", "_sysconfigdata__linux_x.py", "config-3.11-x/python-config.py", "empty.py"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.py" else name)
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    corpus = open_corpus(CorpusSettings(), "python-stdlib", "main")
    assert list(corpus.documents()) == ["Json.py", "json/decoder.py", "os.py"]
    assert corpus.revision.startswith("cpython-3.")
    assert open_corpus(CorpusSettings(), "python-stdlib", corpus.revision).fingerprint == corpus.fingerprint
    with pytest.raises(HvpflowError, match=r"'cpython-2\.7', but the running interpreter's"):
        open_corpus(CorpusSettings(), "python-stdlib", "cpython-2.7")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "absent"))
    with pytest.raises(HvpflowError, match="ships no sources of its standard library"):
        open_corpus(CorpusSettings(), "python-stdlib", "main")


def test_the_shuffle_buffer_loses_and_doubles_nothing() -> None:
    documents = [str(number) for number in range(200)]
    for size in (1, 7, 199, 200, 5000):
        order = list(shuffled(iter(documents), size, np.random.default_rng(1)))
        assert Counter(order) == Counter(documents)
        assert order == list(shuffled(iter(documents), size, np.random.default_rng(1)))
        # A document can come early by the size of the buffer at most.
        assert all(int(document) < place + size for place, document in enumerate(order))
    assert order != list(shuffled(iter(documents), size, np.random.default_rng(2)))


def test_the_shuffle_buffer_reads_no_further_than_it_must() -> None:
    source = iter(range(1000))
    stream = shuffled(map(str, source), 10, np.random.default_rng(0))
    for _ in range(5):
        next(stream)
    assert next(source) <= 16
