"""Frozen settings built from plain mappings: every key known, every value of the declared type."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from hvpflow.errors import HvpflowError, nearest

T = TypeVar("T")


def build(cls: type[T], mapping: Any, where: str = "") -> T:
    """Build the dataclass ``cls`` from ``mapping``; nested dataclasses from nested mappings.

    Args:
        cls: a dataclass; annotations: bool, int, float, str, None, Literal, tuple[X, ...], unions and dataclasses.
        mapping: plain YAML data.
        where: dotted name of the mapping, for messages.

    Raises:
        HvpflowError: an unknown or missing key, a value of another type, NaN or an infinity, or a refusal by
            ``__post_init__``.
    """
    if not isinstance(mapping, Mapping):
        raise HvpflowError(f"{where or 'the configuration'} must be a mapping of keys to values, not {_shown(mapping)}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values = {}
    for key, value in mapping.items():
        if key not in fields:
            place = f" in {where}" if where else ""
            raise HvpflowError(
                f"unknown key {str(key)!r}{place}{nearest(str(key), fields)}; known: {', '.join(fields)}"
            )
        values[key] = convert(hints[key], value, f"{where}.{key}" if where else str(key))
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise HvpflowError(f"missing key {name!r}" + (f" in {where}" if where else ""))
    return cls(**values)


def convert(kind: Any, value: Any, where: str) -> Any:
    """Return ``value`` as the annotated type ``kind``.

    An int is taken where a float is asked for; text such as ``1e-5``, which YAML 1.1 leaves a string, is too.

    Raises:
        HvpflowError: the value is of another type, NaN or infinite.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            if _fits(option, value):
                return convert(option, value, where)
        raise HvpflowError(f"{where} is {_shown(value)}, expected {_named(kind)}")
    if origin is typing.Literal:
        for option in arguments:
            if value == option and type(value) is type(option):
                return option
        hint = nearest(value, [str(option) for option in arguments]) if isinstance(value, str) else ""
        raise HvpflowError(f"{where} is {_shown(value)}, expected {_named(kind)}{hint}")
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise HvpflowError(f"{where} is {_shown(value)}, expected a list")
        return tuple(convert(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else build(kind, value, where)  # type: ignore[arg-type]
    if not _fits(kind, value):
        raise HvpflowError(f"{where} is {_shown(value)}, expected {_named(kind)}")
    if kind is float:
        number = float(value)
        if not math.isfinite(number):
            raise HvpflowError(f"{where} is {number}, expected a finite number")
        return number
    return value


def to_mapping(settings: Any) -> Any:
    """Plain YAML/JSON data of a settings dataclass: mappings in field order, tuples as lists."""
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return {field.name: to_mapping(getattr(settings, field.name)) for field in dataclasses.fields(settings)}
    if isinstance(settings, tuple):
        return [to_mapping(item) for item in settings]
    return settings


def _fits(kind: Any, value: Any) -> bool:
    origin = typing.get_origin(kind)
    if kind is None or kind is type(None):
        return value is None
    if origin is typing.Literal:
        return any(value == option and type(value) is type(option) for option in typing.get_args(kind))
    if origin is tuple:
        return isinstance(value, (list, tuple))
    if dataclasses.is_dataclass(kind):
        return isinstance(value, (Mapping, kind))  # type: ignore[arg-type]
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return (isinstance(value, (int, float)) and not isinstance(value, bool)) or _is_number_text(value)
    return isinstance(value, kind)


def _is_number_text(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return False
    return value.strip()[:1].isdigit() or value.strip()[:1] in "+-."


def _named(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return "one of " + ", ".join(str(option) for option in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_named(option) for option in arguments)
    if origin is tuple:
        return "a list"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return names.get(kind, "a mapping")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
