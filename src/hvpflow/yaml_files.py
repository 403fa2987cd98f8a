"""YAML files read as plain data: no tags, no aliases, no repeated keys, no depth without end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hvpflow.errors import HvpflowError

MAX_DEPTH = 40


class _PlainLoader(yaml.SafeLoader):
    """Refuses repeated keys, of which YAML would silently keep the last, and aliases, which can grow without bound."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.constructor.ConstructorError(None, None, "aliases are not read: write it out", event.start_mark)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            event = self.peek_event()
            raise yaml.constructor.ConstructorError(None, None, f"nested over {MAX_DEPTH} deep", event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = key_node.value
            if isinstance(key, str):
                if key in seen:
                    problem = f"key {key!r} appears twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, where: str) -> Any:
    """Plain data of a YAML text.

    Raises:
        HvpflowError: anything refused (with line and column).
    """
    try:
        return yaml.load(text, Loader=_PlainLoader)  # extends yaml's safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: scalars such as an impossible date.
        raise HvpflowError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; an empty file is an empty mapping.

    Raises:
        HvpflowError: missing or unreadable file, no mapping, anything refused (with line and column).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise HvpflowError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise HvpflowError(f"{path} is not valid YAML: it is not UTF-8 text ({error})") from error
    mapping = parse_yaml(text, str(path))
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise HvpflowError(f"{path} must hold a mapping of keys to values, not a {type(mapping).__name__}")
    return mapping
