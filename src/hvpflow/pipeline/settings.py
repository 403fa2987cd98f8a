"""The configuration: which run, how it comes to be, and what is measured on it. Frozen, and validated once.

A configuration is one YAML file. Its top level holds ``run`` (an existing run directory) or ``recipe`` (a preset that
the workflow trains), any section of ``resolved.yaml`` as overrides of that preset, ``corpus`` (where text comes from),
``output`` and ``analysis``. A bare recipe file is a configuration too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hvpflow.data.corpus import CorpusSettings
from hvpflow.errors import HvpflowError, nearest
from hvpflow.measure.settings import MeasureSettings
from hvpflow.runs.recipe import SECTIONS, Recipe, recipe_from_mapping
from hvpflow.typed import build, to_mapping
from hvpflow.yaml_files import parse_yaml, read_yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalysisSettings(MeasureSettings):
    """What is measured, at which checkpoints, and where it runs."""

    checkpoints: Literal["all"] | tuple[str, ...] = "all"
    """File names of checkpoints in the run directory, or ``all``."""
    data_case: Literal["seen", "unseen", "both"] = "both"
    """``seen``: an exact replay of epoch 1; ``unseen``: one epoch past everything training could have drawn."""
    shards: int = 1
    """Jobs that each (checkpoint, case)'s directions are split over."""
    device: str = "auto"
    """``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:N``."""
    cpu_threads: Literal["auto"] | int = "auto"
    """Threads of a process that has the machine to itself (``-j1``); ``auto``: every CPU it may run on."""
    cache_dir: str | None = None
    """The token cache, where it is not the one that ``resolved.yaml`` names."""
    plots: bool = True
    """Draw the figures."""
    training_norms: bool = False
    """Draw the gradient norms logged in training beside the measured ones."""

    def __post_init__(self) -> None:
        MeasureSettings.__post_init__(self)
        if self.shards < 1:
            raise HvpflowError(f"analysis.shards is {self.shards}, expected at least 1")
        if self.cpu_threads != "auto" and self.cpu_threads < 1:
            raise HvpflowError(f"analysis.cpu_threads is {self.cpu_threads}, expected auto or at least 1")
        if not self.checkpoints:
            raise HvpflowError("analysis.checkpoints is an empty list; name at least one checkpoint, or say all")
        device, _, index = self.device.partition(":")
        if device not in ("auto", "cpu", "cuda") or (index and not (device == "cuda" and index.isdigit())):
            hint = nearest(self.device, ("auto", "cpu", "cuda"))
            raise HvpflowError(f"analysis.device is {self.device!r}, expected auto, cpu, cuda or cuda:N{hint}")

    @property
    def cases(self) -> tuple[Literal["seen", "unseen"], ...]:
        """The data cases, seen before unseen."""
        return ("seen", "unseen") if self.data_case == "both" else (self.data_case,)

    @property
    def measured(self) -> MeasureSettings:
        """The part that decides numbers."""
        names = [item.name for item in dataclasses.fields(MeasureSettings)]
        return MeasureSettings(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One validated configuration. Paths are as written: relative ones count from the current directory."""

    run: str | None = None
    """Run directory. Alone: an existing run. With a recipe: where to train, in place of runtime.output_dir."""
    recipe: str | None = None
    """A preset of config/recipes (demo, 20m, 50m, 90m, packed-…) or a YAML file of the sections below."""
    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    output: str = "results"
    """Directory of everything that an analysis writes."""
    analysis: AnalysisSettings = field(default_factory=AnalysisSettings)
    training_recipe: Recipe | None = None
    """The recipe that the workflow trains; None where it analyses an existing run."""

    @property
    def owned(self) -> bool:
        """Whether the workflow makes the run itself."""
        return self.training_recipe is not None

    @property
    def run_directory(self) -> Path:
        if self.run is not None:
            return Path(self.run)
        assert self.training_recipe is not None
        return Path(self.training_recipe.runtime.output_dir)

    def to_mapping(self) -> dict[str, Any]:
        """Plain YAML data that :func:`config_from_mapping` turns into an equal configuration, presets written out."""
        mapping: dict[str, Any] = {"run": str(self.run_directory), "output": self.output}
        if self.training_recipe is not None:
            mapping |= {"corpus": to_mapping(self.corpus), **self.training_recipe.to_mapping()}
        return mapping | {"analysis": to_mapping(self.analysis)}


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML configuration, or the preset of that name; apply ``dotted.key=value`` overrides, values being YAML.

    Raises:
        HvpflowError: unreadable file, unknown keys, values out of range.
    """
    mapping = read_yaml(path if path.is_file() else _preset(path) or path)
    for override in overrides:
        set_dotted(mapping, override)
    return config_from_mapping(mapping, base=path.parent)


def config_from_mapping(mapping: Mapping[str, Any], *, base: Path | None = None) -> Config:
    """Validate plain YAML data; a recipe file named in it is looked up beside ``base`` too."""
    own = [item.name for item in dataclasses.fields(Config) if item.name != "training_recipe"]
    for key in mapping:
        if key not in own and key not in SECTIONS:
            known = [*own, *SECTIONS]
            raise HvpflowError(f"unknown key {str(key)!r}{nearest(str(key), known)}; known: {', '.join(known)}")
    config = build(Config, {key: value for key, value in mapping.items() if key in own})
    sections = {key: value for key, value in mapping.items() if key in SECTIONS}
    if config.recipe is None and not sections:
        if config.run is None:
            raise HvpflowError("nothing to work on: give run (an existing run directory) or recipe (one to train)")
        if "corpus" in mapping:
            raise HvpflowError("corpus has no effect on an existing run; give a recipe too, or remove it")
        return config
    preset = read_yaml(find_recipe(config.recipe, base)) if config.recipe is not None else {}
    if "corpus" in preset:
        corpus = merge(preset.pop("corpus"), mapping.get("corpus") or {})
        config = dataclasses.replace(config, corpus=build(CorpusSettings, corpus, "corpus"))
    for key in preset:
        if key not in SECTIONS:
            raise HvpflowError(f"unknown section {str(key)!r} in recipe {config.recipe}{nearest(key, SECTIONS)}")
    recipe = recipe_from_mapping(merge(preset, sections))
    if config.run is not None:
        asked = (sections.get("runtime") or {}).get("output_dir", config.run)
        if asked != config.run:
            raise HvpflowError(f"run is {config.run!r} and runtime.output_dir {asked!r}: give the run directory once")
        recipe = dataclasses.replace(recipe, runtime=dataclasses.replace(recipe.runtime, output_dir=config.run))
    if recipe.generation == "old":
        raise HvpflowError(
            "the recipe has data.buffer_size_mib, the old order of sequences, which is analysed but no longer trained; "
            "replace it by data.shuffle_group_size"
        )
    return dataclasses.replace(config, training_recipe=recipe)


def find_recipe(name: str, base: Path | None = None) -> Path:
    """Path of a recipe: a shipped preset's name, or a YAML file (from the current directory, or beside the config)."""
    presets = _presets()
    if name in presets:
        return presets[name]
    for directory in (Path(), *([base] if base else [])):
        if (directory / name).is_file():
            return directory / name
    raise HvpflowError(
        f"recipe {name!r} is neither a preset nor a file{nearest(name, presets)}; presets: {', '.join(presets)}"
    )


def _presets() -> dict[str, Path]:
    return {path.stem: path for path in sorted((workflow_root() / "config" / "recipes").glob("*.yaml"))}


def _preset(path: Path) -> Path | None:
    return _presets().get(str(path))


def workflow_root() -> Path:
    """Directory that holds Snakefile, workflow/, config/ and profiles/: the checkout, or the installed package."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parents[1]
    return checkout if (checkout / "Snakefile").is_file() else package / "_workflow"


def merge(base: Mapping[str, Any], over: Any) -> dict[str, Any]:
    """``base`` with the values of ``over`` in their places, nested mappings merged key by key."""
    if not isinstance(over, Mapping):
        raise HvpflowError(f"expected a mapping of keys to values, found {over!r}")
    merged = dict(base)
    for key, value in over.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if nested else value
    return merged


def set_dotted(mapping: dict[str, Any], override: str) -> None:
    """Apply ``dotted.key=value`` in place."""
    name, equals, text = override.partition("=")
    keys = name.split(".")
    if not equals or not all(keys):
        raise HvpflowError(f"--set {override!r} is not of the form dotted.key=value")
    value = parse_yaml(text, f"--set {override!r}: the value")
    for key in keys[:-1]:
        inner = mapping.get(key)
        if inner is None:
            inner = mapping[key] = {}
        if not isinstance(inner, dict):
            raise HvpflowError(f"--set {override!r}: {key} holds a value, not a mapping of keys")
        mapping = inner
    mapping[keys[-1]] = value
