"""The recipe of a run: ``resolved.yaml``, typed and checked. Imports no torch: planning reads it in every job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hvpflow.data.cache import TokenCache
from hvpflow.data.epochs import Sampling
from hvpflow.errors import HvpflowError, nearest
from hvpflow.files import fingerprint
from hvpflow.models.config import LlamaConfig
from hvpflow.runs.recipe_formats import ONLY_NEW, ONLY_OLD, SECTIONS, Generation, complete
from hvpflow.runs.recipe_sections import (
    SCHEDULES,
    CosineSchedule,
    DataSettings,
    DecentralizedSettings,
    EvaluationSettings,
    OptimizerSettings,
    RuntimeSettings,
    TrainingSettings,
    WsdSchedule,
)
from hvpflow.typed import build, to_mapping
from hvpflow.yaml_files import read_yaml

__all__ = [
    "SECTIONS",
    "Recipe",
    "check_cache_matches",
    "load_recipe",
    "recipe_from_mapping",
    "recipe_identity",
    "retained_epochs",
    "retained_files",
]

# What may change without making another training: retention and the machine.
_NOT_IDENTITY = {
    "data": ("cache_dir", "prefetch"),
    "training": ("checkpoint_policy", "checkpoint_epochs", "save_epoch_training_state"),
    "runtime": ("output_dir", "device", "cpu_threads"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All settings of a training run. Build it with :func:`load_recipe` or :func:`recipe_from_mapping`."""

    model: LlamaConfig
    data: DataSettings
    optimizer: OptimizerSettings
    lr_schedule: CosineSchedule | WsdSchedule | None
    """null in the old generation, whose optimizer section has ``warmup_fraction`` and ``min_lr_ratio`` instead."""
    training: TrainingSettings
    evaluation: EvaluationSettings
    runtime: RuntimeSettings
    decentralized: DecentralizedSettings | None
    warnings: tuple[str, ...] = ()
    """What was ignored on reading."""

    def __post_init__(self) -> None:
        if self.decentralized is not None:
            self._check_packed(self.decentralized)
        # Sampling checks that batches divide into sequences and epochs into batches.
        self.sampling()
        beyond = [epoch for epoch in self.training.checkpoint_epochs if epoch > self.num_epochs]
        if self.training.checkpoint_policy == "explicit" and beyond:
            raise HvpflowError(
                f"training.checkpoint_epochs holds {beyond}, but the run has {self.num_epochs} epochs: remove them"
            )

    def _check_packed(self, packed: DecentralizedSettings) -> None:
        workers, context, micro = packed.num_models, self.model.context_length, self.training.micro_batch_size
        if self.training.batch_tokens != workers * micro * context:
            raise HvpflowError(
                f"training.batch_tokens {self.training.batch_tokens} is not decentralized.num_models {workers} × "
                f"training.micro_batch_size {micro} × model.context_length {context} = {workers * micro * context}: "
                "packed runs take each batch in one pass, so the two must be equal"
            )
        if self.generation == "old":
            return
        if packed.topology == "one_peer_ring" and workers % 2:
            raise HvpflowError(f"decentralized.num_models is {workers}; topology one_peer_ring needs an even number")
        if packed.topology == "one_peer_exponential" and workers & (workers - 1):
            raise HvpflowError(
                f"decentralized.num_models is {workers}; topology one_peer_exponential needs a power of two"
            )

    @property
    def generation(self) -> Generation:
        """Which of the two formats, and so which order of sequences, the run has."""
        return "old" if self.data.buffer_size_mib is not None else "new"

    @property
    def num_parameters(self) -> int:
        """Trainable parameters of one model."""
        return self.model.num_parameters

    @property
    def num_epochs(self) -> int:
        """Epochs of the whole training."""
        return self.training.num_epochs

    @property
    def num_workers(self) -> int:
        """Models trained together; 1 for an ordinary run."""
        return 1 if self.decentralized is None else self.decentralized.num_models

    def sampling(self) -> Sampling:
        """All that the order of sequences depends on."""
        return Sampling(
            context_length=self.model.context_length,
            batch_tokens=self.training.batch_tokens,
            microbatch_size=self.training.micro_batch_size,
            num_workers=self.num_workers,
            num_parameters=self.num_parameters,
            tokens_per_parameters=self.training.tokens_per_parameters,
            epoch_tokens_per_parameters=self.training.epoch_tokens_per_parameters,
            seed=self.runtime.seed,
            loader_version=1 if self.generation == "old" else 2,
            buffer_size_mib=self.data.buffer_size_mib,
            shuffle_group_size=self.data.shuffle_group_size,
        )

    def to_mapping(self) -> dict[str, Any]:
        """Plain data in file order, with exactly the keys of this recipe's generation."""
        mapping = {section: to_mapping(getattr(self, section)) for section in SECTIONS}
        for section, keys in (ONLY_NEW if self.generation == "old" else ONLY_OLD).items():
            for key in keys:
                del mapping[section][key]
        if self.generation == "old":
            del mapping["lr_schedule"]
        return mapping

    def to_yaml(self) -> str:
        """The text of ``resolved.yaml``."""
        return yaml.safe_dump(self.to_mapping(), sort_keys=False, allow_unicode=True)


def load_recipe(path: Path) -> Recipe:
    """Read a recipe or a run's ``resolved.yaml``.

    Raises:
        HvpflowError: the file cannot be read, is no YAML, or a setting is refused; the text names the file.
    """
    mapping = read_yaml(path)
    mapping.pop("corpus", None)  # a preset says where its text comes from, which is no part of a run
    if not mapping:
        raise HvpflowError(f"{path} is empty: it must be a mapping of a recipe's sections")
    try:
        return recipe_from_mapping(mapping)
    except HvpflowError as error:
        raise HvpflowError(f"{path}: {error}") from error


def recipe_from_mapping(mapping: Any) -> Recipe:
    """Build a recipe of either generation from plain data; missing keys take their generation's defaults.

    Raises:
        HvpflowError: unknown keys, wrong types, values out of range, or settings that contradict each other.
    """
    generation, given, ignored = complete(mapping)
    packed = mapping.get("decentralized") is not None
    return Recipe(
        model=build(LlamaConfig, given["model"], "model"),
        data=build(DataSettings, given["data"], "data"),
        optimizer=build(OptimizerSettings, given["optimizer"], "optimizer"),
        lr_schedule=None if generation == "old" else _build_schedule(given["lr_schedule"]),
        training=build(TrainingSettings, given["training"], "training"),
        evaluation=build(EvaluationSettings, given["evaluation"], "evaluation"),
        runtime=build(RuntimeSettings, given["runtime"], "runtime"),
        decentralized=build(DecentralizedSettings, given["decentralized"], "decentralized") if packed else None,
        warnings=tuple(f"{key} is not known here and was ignored" for key in ignored),
    )


def _build_schedule(given: Mapping[str, Any]) -> CosineSchedule | WsdSchedule:
    name = given.get("name", "cosine")
    if name not in SCHEDULES:
        hint = nearest(str(name), SCHEDULES)
        raise HvpflowError(f"lr_schedule.name is {name!r}{hint}, expected one of {', '.join(SCHEDULES)}")
    return build(SCHEDULES[name], given, "lr_schedule")


def recipe_identity(recipe: Recipe, cache_identity: str) -> str:
    """Digest of what makes two trainings the same: the settings without retention and machine, and the data.

    The recipe's mapping without those keys, plus ``cache_identity`` and ``loader_version``. Foreign runs of the same
    layout record the same digest in ``result.json`` and in their training states.
    """
    content = recipe.to_mapping()
    for section, keys in _NOT_IDENTITY.items():
        for key in keys:
            del content[section][key]
    loader_version = 1 if recipe.generation == "old" else 2
    return fingerprint(content | {"cache_identity": cache_identity, "loader_version": loader_version})


def check_cache_matches(recipe: Recipe, cache: TokenCache) -> None:
    """Refuse a token cache that holds other data than the recipe names.

    Raises:
        HvpflowError: the first item that differs, with both values.
    """
    data, manifest = recipe.data, cache.manifest
    preprocessing = manifest.get("preprocessing", {})
    items = [
        ("model.vocab_size", recipe.model.vocab_size, cache.vocab_size),
        ("data.dataset", data.dataset, manifest.get("dataset")),
        ("data.tokenizer", data.tokenizer, manifest.get("tokenizer")),
        ("data.revision", data.revision, manifest.get("dataset_revision")),
        ("data.tokenizer_revision", data.tokenizer_revision, manifest.get("tokenizer_revision")),
        ("data.shuffle_seed", data.shuffle_seed, preprocessing.get("shuffle_seed")),
        ("data.shuffle_buffer", data.shuffle_buffer, preprocessing.get("shuffle_buffer")),
    ]
    for name, wanted, found in items:
        # "main" means "whichever revision was prepared".
        if name.endswith("revision") and wanted == "main":
            continue
        if wanted != found:
            raise HvpflowError(
                f"the token cache {cache.directory} does not match the recipe: {name} is {wanted!r} in the recipe, "
                f"{found!r} in the cache: name the cache that this run was trained on, or prepare it with this recipe"
            )


def retained_epochs(recipe: Recipe) -> list[int]:
    """Epochs whose weights the checkpoint policy keeps, ascending."""
    training, last = recipe.training, recipe.num_epochs
    if training.checkpoint_policy == "interval":
        step = training.checkpoint_epochs[0]
        return list(range(step, last + 1, step))
    if training.checkpoint_policy == "explicit":
        return sorted(training.checkpoint_epochs)
    return []


def retained_files(recipe: Recipe) -> list[str]:
    """Checkpoint files that a finished run of this recipe holds, relative to it; in packed runs node files too."""
    suffixes = ("safetensors", "pt") if recipe.training.save_epoch_training_state else ("safetensors",)
    nodes = [f"node-{worker:03d}/" for worker in range(recipe.num_workers)] if recipe.decentralized else []
    files = []
    for epoch in retained_epochs(recipe):
        for suffix in suffixes:
            files += [f"{place}epoch-{epoch:03d}.{suffix}" for place in ("", *nodes)]
    if recipe.training.checkpoint_policy != "none":
        files.append("final.pt")
    return files
