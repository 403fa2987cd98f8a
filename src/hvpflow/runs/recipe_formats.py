"""The two generations of the recipe format, and older keys: plain mappings in, complete plain mappings out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from hvpflow.errors import HvpflowError, nearest

Generation = Literal["old", "new"]

SECTIONS = ("model", "data", "optimizer", "lr_schedule", "training", "evaluation", "runtime", "decentralized")

ONLY_OLD: dict[str, dict[str, Any]] = {
    "data": {"buffer_size_mib": 64.0},
    "optimizer": {"warmup_fraction": 0.05, "min_lr_ratio": 0.1},
}
"""Keys that only the old generation has, with their defaults."""
ONLY_NEW: dict[str, dict[str, Any]] = {"data": {"prepare_workers": 8, "shuffle_group_size": 2}}
"""Keys, beside the section ``lr_schedule``, that only the new generation has, with their defaults."""
_OLD_DEFAULTS: dict[str, dict[str, Any]] = {"data": {"shuffle_buffer": 10000}}

_RENAMED = {
    "training.tokens_per_parameter": "training.tokens_per_parameters",
    "training.epoch_tokens_per_parameter": "training.epoch_tokens_per_parameters",
    "training.max_tokens": "training.tokens_per_parameters (the tokens divided by the parameter count)",
    "training.epoch_tokens": "training.epoch_tokens_per_parameters (the tokens divided by the parameter count)",
    "training.checkpoint_every": "training.checkpoint_policy: interval with training.checkpoint_epochs: [K]",
}
# Keys of experimental optimisers. They never influence an analysis, so runs that carry them can be read.
_IGNORED_OPTIMIZER_KEYS = ("name", "accumulation_steps", "accum_iter")


def complete(mapping: Any) -> tuple[Generation, dict[str, dict[str, Any]], list[str]]:
    """Find a recipe's generation and fill in what only that generation has.

    Returns:
        The generation; every section as a new mapping (empty where it is absent); the dotted keys that were ignored.

    Raises:
        HvpflowError: no mapping, an unknown section, a key of an older format, or keys of both generations.
    """
    if not isinstance(mapping, Mapping):
        raise HvpflowError(f"a recipe must be a mapping with the sections {', '.join(SECTIONS)}")
    for section in mapping:
        if section not in SECTIONS:
            hint = nearest(str(section), SECTIONS)
            raise HvpflowError(f"unknown section {str(section)!r}{hint}; known: {', '.join(SECTIONS)}")
    given = {name: _section(mapping, name) for name in SECTIONS}
    _refuse_renamed(given)
    ignored = [key for key in _IGNORED_OPTIMIZER_KEYS if key in given["optimizer"]]
    for key in ignored:
        del given["optimizer"][key]
    generation = _find_generation(given)
    own, defaults = (ONLY_OLD, _OLD_DEFAULTS) if generation == "old" else (ONLY_NEW, {})
    for section, keys in own.items():
        for key in keys:
            if given[section].get(key, 0) is None:
                raise HvpflowError(f"{section}.{key} is null, expected a number")
        given[section] = keys | defaults.get(section, {}) | given[section]
    return generation, given, [f"optimizer.{key}" for key in ignored]


def _section(mapping: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = mapping.get(name)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise HvpflowError(f"{name} must be a mapping of keys to values")
    return dict(section)


def _refuse_renamed(given: Mapping[str, Mapping[str, Any]]) -> None:
    for section, keys in given.items():
        for key in keys:
            successor = _RENAMED.get(f"{section}.{key}")
            if successor:
                raise HvpflowError(f"{section}.{key} belongs to an older format: write {successor}")
    if given["training"].get("checkpoint_policy") == "all":
        raise HvpflowError(
            "training.checkpoint_policy all belongs to an older format: write checkpoint_policy: interval with "
            "checkpoint_epochs: [1]"
        )


def _find_generation(given: Mapping[str, Mapping[str, Any]]) -> Generation:
    def present(table: Mapping[str, Mapping[str, Any]]) -> list[str]:
        return [
            f"{section}.{key}" for section, keys in table.items() for key in keys if given[section].get(key) is not None
        ]

    old, new = present(ONLY_OLD), present(ONLY_NEW)
    if given["lr_schedule"]:
        new.append("lr_schedule")
    if old and new:
        raise HvpflowError(
            f"{', '.join(old)} and {', '.join(new)} belong to different generations of the format: "
            "remove the former for the new generation (preferred), the latter for the old one"
        )
    return "old" if old else "new"
