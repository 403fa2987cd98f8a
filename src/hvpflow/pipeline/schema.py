"""The JSON Schema of the configuration, made from the settings themselves: names, types, defaults and descriptions.

``python -m hvpflow.pipeline.schema`` prints it; ``workflow/schemas/config.schema.yaml`` is its output, and
``--markdown`` prints the tables of ``config/README.md``.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
import types
import typing
from typing import Any

import yaml

from hvpflow.pipeline.settings import Config
from hvpflow.runs.recipe import SECTIONS, Recipe
from hvpflow.runs.recipe_sections import SCHEDULES
from hvpflow.typed import to_mapping

SIMPLE_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def config_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a configuration file."""
    own = object_schema(Config)["properties"]
    del own["training_recipe"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hvpflow configuration",
        "description": "Give run (an existing run directory) or recipe (one that the workflow trains).",
        "type": "object",
        "additionalProperties": False,
        "properties": own | recipe_properties(),
    }


def recipe_properties() -> dict[str, Any]:
    """Schemas of the recipe's sections; two kinds of learning-rate schedule are alternatives."""
    hints = typing.get_type_hints(Recipe)
    properties = {name: type_schema(hints[name]) for name in SECTIONS}
    properties["lr_schedule"] = {"oneOf": [object_schema(kind) for kind in SCHEDULES.values()] + [{"type": "null"}]}
    return properties


def object_schema(cls: type) -> dict[str, Any]:
    """Schema of a settings dataclass; nothing is required, and nothing unknown is allowed."""
    hints, texts = typing.get_type_hints(cls), field_texts(cls)
    properties = {}
    for field in dataclasses.fields(cls):
        schema = type_schema(hints[field.name])
        if field.name in texts:
            schema["description"] = texts[field.name]
        if field.default is not dataclasses.MISSING:
            schema["default"] = to_mapping(field.default)
        properties[field.name] = schema
    description = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    return {"type": "object", "description": description, "additionalProperties": False, "properties": properties}


def type_schema(kind: Any) -> dict[str, Any]:
    """Schema of an annotated type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        options = [type_schema(option) for option in arguments]
        if all(set(option) == {"type"} and isinstance(option["type"], str) for option in options):
            return {"type": [option["type"] for option in options]}
        return {"anyOf": options}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": type_schema(arguments[0])}
    if dataclasses.is_dataclass(kind):
        return object_schema(typing.cast(type, kind))
    return {"type": SIMPLE_TYPES[kind]}


def field_texts(cls: type) -> dict[str, str]:
    """The string that stands under each field of a dataclass and of its bases."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, text in zip(body.body, body.body[1:]):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                value = text.value if isinstance(text, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    texts[statement.target.id] = " ".join(value.value.replace("``", "").split())
    return texts


def markdown_tables() -> str:
    """A table a section: key, default, meaning."""
    schema = config_schema()["properties"]
    sections: dict[str, dict[str, Any]] = {"top level": {k: v for k, v in schema.items() if "default" in v}}
    for name, section in schema.items():
        for option in section.get("anyOf", section.get("oneOf", [section])):
            if option.get("properties"):
                kind = option["properties"].get("name", {}).get("default")
                sections[f"{name}" if name != "lr_schedule" else f"{name}, name: {kind}"] = option["properties"]
    lines = []
    for name, properties in sections.items():
        lines += [f"### {name}", "", "| key | default | meaning |", "|---|---|---|"]
        for key, schema in properties.items():
            choices = "; one of " + ", ".join(map(str, schema["enum"])) if "enum" in schema else ""
            default = "null" if schema.get("default") is None else schema["default"]
            lines.append(f"| `{key}` | {default} | {schema.get('description', '').rstrip('.')}{choices} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["--markdown"]:
        print(markdown_tables())
    else:
        print("# Made by `python -m hvpflow.pipeline.schema` from the settings classes; a test compares the two.")
        print(yaml.safe_dump(config_schema(), sort_keys=False, width=120), end="")
