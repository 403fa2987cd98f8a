"""How bad input is refused: one clear message as the last line of stderr, a status other than 0, no changed file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from workflow_cases import Workplace

from hvpflow import cli
from hvpflow.pipeline import steps


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


STEP_WORDS = ("inspect", "measure", "samples", "summary")


def write(name: str, content: str | bytes) -> Callable[[Path], object]:
    """Write a file, in place of what bears its name."""

    def arrange(directory: Path) -> None:
        path = directory / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return arrange


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


def refused(
    refusal: Refusal, workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Check that the words of ``refusal`` are refused as they should."""
    monkeypatch.chdir(workplace.directory)
    refusal.arrange(workplace.directory)
    before = tree(workplace.directory)
    main = steps.main if refusal.words and refusal.words[0] in STEP_WORDS else cli.main
    try:
        status = main(list(refusal.words))
    except SystemExit as stop:
        status = stop.code
    output = capfd.readouterr()
    assert status not in (0, None)
    assert "Traceback" not in output.err + output.out
    last = output.err.rstrip().splitlines()[-1]
    assert "error: " in last
    assert len(last) < 1000
    for words in refusal.says:
        assert words in last
    assert tree(workplace.directory) == before
    assert not (workplace.directory / "executed").exists()
