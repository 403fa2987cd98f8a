"""What README and docs show works: links lead somewhere, command lines parse, configurations are valid."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from snakemake.cli import get_argument_parser

from hvpflow.cli import make_parser
from hvpflow.pipeline.settings import config_from_mapping, load_config, set_dotted

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "config" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGETS = ("all", "inspected", "prepared", "trained")


FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n) {4}.*\n(?: {4}.*\n|\n(?= {4}))*")


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and content of each code block, fenced or indented; an indented one has the language ""."""
    for match in FENCED.finditer(text):
        yield match[1], match[2]
    for match in INDENTED.finditer(FENCED.sub("", text)):
        yield "", textwrap.dedent(match[0])


def prose(text: str) -> str:
    """The text without code blocks."""
    return INDENTED.sub("", FENCED.sub("", text))


def links(text: str) -> list[str]:
    """Targets of links and images that stay in the repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """Names by which GitHub's headings are linked."""
    names: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        names.add(slug if slug not in names else f"{slug}-1")
    return names


def commands(text: str, program: str) -> list[list[str]]:
    """Words of each line of a code block that runs ``program``; lines ending in a backslash go on."""
    found = []
    for language, content in blocks(text):
        if language not in ("", "sh", "bash", "console"):
            continue
        for line in content.replace("\\\n", " ").splitlines():
            for part in line.removeprefix("$ ").split("&&"):
                if part.split()[:1] == [program]:
                    found.append(shlex.split(part, comments=True)[1:])
    return found


def every(find: Callable[[str], list[Any]]) -> list[Any]:
    """One parameter set for each thing that ``find`` finds in a document."""
    parameters = []
    for document in DOCUMENTS:
        for item in find(document.read_text(encoding="utf-8")):
            shown = " ".join((item if isinstance(item, str) else " ".join(item)).split())
            parameters.append(pytest.param(document, item, id=f"{document.relative_to(ROOT)}: {shown[:80]}"))
    return parameters


def yaml_blocks(text: str) -> list[str]:
    return [content for language, content in blocks(text) if language in ("yaml", "yml")]


def mentioned(text: str) -> list[list[str]]:
    """Words of each piece of inline code that names a command of ours."""
    return [span.split()[1:] for span in re.findall(r"`(hvpflow [^`]+)`", prose(text))]


@pytest.mark.parametrize(("document", "target"), every(links))
def test_link_leads_somewhere(document: Path, target: str) -> None:
    name, _, anchor = target.partition("#")
    path = (document.parent / name).resolve() if name else document
    assert path.is_relative_to(ROOT), f"{target} leads out of the repository"
    assert path.exists(), f"{document.relative_to(ROOT)} links to {target}, which does not exist"
    if anchor:
        assert anchor in anchors(path.read_text(encoding="utf-8")), f"{name or document.name} has no heading #{anchor}"


@pytest.mark.parametrize(("document", "words"), every(lambda text: commands(text, "hvpflow")))
def test_command_line_parses(document: Path, words: list[str]) -> None:
    own = words[: words.index("--")] if "--" in words else words
    arguments, rest = make_parser().parse_known_args(own)
    assert not rest, f"unknown: {rest}"
    if "config" in arguments:
        if (ROOT / arguments.config).is_file():
            load_config(ROOT / arguments.config, arguments.overrides)
        else:
            # A file of the reader's; the settings must be known all the same.
            assert arguments.config.parts[0] != "config", f"{arguments.config} does not exist"
            mapping: dict[str, Any] = {"recipe": "demo"}
            for override in arguments.overrides:
                set_dotted(mapping, override)
            config_from_mapping(mapping)


@pytest.mark.parametrize(("document", "words"), every(mentioned))
def test_command_that_prose_mentions_exists(document: Path, words: list[str]) -> None:
    known = next(action.choices for action in make_parser()._actions if action.dest == "command")
    assert words[0].startswith("-") or words[0] in known
    options = [word.split("=")[0] for word in words if word.startswith("--") and word != "--"]
    usage = known[words[0]].format_help() if words[0] in known else make_parser().format_help()
    for option in options:
        assert option in re.findall(r"--[\w-]+", usage), option


@pytest.mark.parametrize(("document", "words"), every(lambda text: commands(text, "snakemake")))
def test_snakemake_reads_the_command_as_meant(document: Path, words: list[str]) -> None:
    # Some of its options take several values and would swallow a target that follows.
    arguments = get_argument_parser().parse_args(words)
    assert set(arguments.targets) <= set(TARGETS), f"unknown targets {arguments.targets}"
    for file in arguments.configfile or ():
        assert file.suffix in (".yaml", ".yml"), f"{file} is no configuration"
        if file.parts[0] == "config":
            load_config(ROOT / file)


@pytest.mark.parametrize(("document", "block"), every(yaml_blocks))
def test_configuration_is_valid(document: Path, block: str) -> None:
    mapping = yaml.safe_load(block)
    assert isinstance(mapping, dict)
    if {"run", "recipe"} & set(mapping):
        config_from_mapping(mapping)


def test_what_is_looked_for_is_found() -> None:
    text = "\n".join(
        [
            "# A title, twice",
            "See [there](there.md#part) and ![it](images/it.png), not [outside](https://example.org).",
            "# A title, twice",
            "",
            "    $ hvpflow status --output x && hvpflow clean \\",
            "        --output x   # goes on",
            "",
            "Run `hvpflow clean` and `make`.",
            "```yaml",
            "# no heading",
            "recipe: demo   # [no](link.md)",
            "```",
            "",
        ]
    )
    assert links(text) == ["there.md#part", "images/it.png"]
    assert anchors(text) == {"a-title-twice", "a-title-twice-1"}
    assert commands(text, "hvpflow") == [["status", "--output", "x"], ["clean", "--output", "x"]]
    assert mentioned(text) == [["clean"]]
    assert yaml_blocks(text) == ["# no heading\nrecipe: demo   # [no](link.md)\n"]
