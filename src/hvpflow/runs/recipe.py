"""The recipe of a run: ``resolved.yaml``, typed and checked. Imports no torch: planning reads it in every job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from hvpflow.errors import HvpflowError, nearest
from hvpflow.files import fingerprint
from hvpflow.models.config import LlamaConfig
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

if TYPE_CHECKING:
    from hvpflow.data.cache import TokenCache
    from hvpflow.data.epochs import Sampling

Generation = Literal["old", "new"]

SECTIONS = ("model", "data", "optimizer", "lr_schedule", "training", "evaluation", "runtime", "decentralized")

# Keys that one generation of the format has and the other has not, with the defaults they take in their own.
_ONLY_OLD: dict[str, dict[str, Any]] = {
    "data": {"buffer_size_mib": 64.0},
    "optimizer": {"warmup_fraction": 0.05, "min_lr_ratio": 0.1},
}
_ONLY_NEW: dict[str, dict[str, Any]] = {"data": {"prepare_workers": 8, "shuffle_group_size": 2}}
_OLD_DEFAULTS: dict[str, dict[str, Any]] = {"data": {"shuffle_buffer": 10000}}

# Keys of schemas before both generations, and what says the same thing now.
_RENAMED = {
    "training.tokens_per_parameter": "training.tokens_per_parameters",
    "training.epoch_tokens_per_parameter": "training.epoch_tokens_per_parameters",
    "training.max_tokens": "training.tokens_per_parameters (tokens divided by the parameter count)",
    "training.epoch_tokens": "training.epoch_tokens_per_parameters (tokens divided by the parameter count)",
    "training.checkpoint_every": "training.checkpoint_policy: interval with training.checkpoint_epochs: [K]",
}
# Keys of experimental optimisers. They never influence an analysis, so runs that carry them can be read.
_IGNORED_OPTIMIZER_KEYS = ("name", "accumulation_steps", "accum_iter")

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
        context, batch = self.model.context_length, self.training.batch_tokens
        micro = self.training.micro_batch_size
        if batch % context:
            raise HvpflowError(
                f"training.batch_tokens {batch} is no multiple of model.context_length {context}: "
                f"take {max(batch // context, 1) * context} or {(batch // context + 1) * context}"
            )
        if self.decentralized is None:
            if micro > batch // context:
                raise HvpflowError(
                    f"training.micro_batch_size {micro} exceeds the {batch // context} sequences of a batch "
                    f"(training.batch_tokens {batch} / model.context_length {context}): lower it"
                )
        else:
            self._check_packed(self.decentralized)
        self._check_epochs()

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

    def _check_epochs(self) -> None:
        beyond = [epoch for epoch in self.training.checkpoint_epochs if epoch > self.num_epochs]
        if self.training.checkpoint_policy == "explicit" and beyond:
            raise HvpflowError(
                f"training.checkpoint_epochs holds {beyond}, but the run has {self.num_epochs} epochs: remove them"
            )
        ratio, batch = self.training.epoch_tokens_per_parameters, self.training.batch_tokens
        per_epoch = ratio * self.num_parameters / batch
        if per_epoch < 0.5:
            raise HvpflowError(
                f"an epoch has {per_epoch:.3g} batches (training.epoch_tokens_per_parameters {ratio} × "
                f"{self.num_parameters} parameters / training.batch_tokens {batch}), expected at least one: raise the "
                "first or lower the last"
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
        return self.training.num_epochs

    @property
    def num_workers(self) -> int:
        """Models trained together; 1 for an ordinary run."""
        return 1 if self.decentralized is None else self.decentralized.num_models

    def sampling(self) -> Sampling:
        """All that the order of sequences depends on."""
        # Imported late so that reading a recipe does not load the data room.
        from hvpflow.data.epochs import Sampling

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
        for section, keys in (_ONLY_NEW if self.generation == "old" else _ONLY_OLD).items():
            for key in keys:
                del mapping[section][key]
        if self.generation == "old":
            del mapping["lr_schedule"]
        return mapping

    def to_yaml(self) -> str:
        """The text of ``resolved.yaml``."""
        return yaml.safe_dump(self.to_mapping(), sort_keys=False)


class _PlainLoader(yaml.SafeLoader):
    """Refuses repeated keys, of which YAML would silently keep the last, and aliases, which can grow without bound."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.constructor.ConstructorError(None, None, "aliases are not used in recipes", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                problem = f"key {key_node.value!r} appears twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if isinstance(key_node.value, str):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def load_recipe(path: Path) -> Recipe:
    """Read a recipe or a run's ``resolved.yaml``.

    Raises:
        HvpflowError: the file cannot be read, is no YAML, or a setting is refused; the text names the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
        # _PlainLoader extends the safe loader.
        mapping = yaml.load(text, Loader=_PlainLoader)
    except OSError as error:
        raise HvpflowError(f"cannot read the recipe {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise HvpflowError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    try:
        return recipe_from_mapping(mapping)
    except HvpflowError as error:
        raise HvpflowError(f"{path}: {error}") from error


def recipe_from_mapping(mapping: Any) -> Recipe:
    """Build a recipe of either generation from plain data; missing keys take their generation's defaults.

    Raises:
        HvpflowError: unknown keys, wrong types, values out of range, or settings that contradict each other.
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
    own, defaults = (_ONLY_OLD, _OLD_DEFAULTS) if generation == "old" else (_ONLY_NEW, {})
    for section, keys in own.items():
        for key in keys:
            if given[section].get(key, 0) is None:
                raise HvpflowError(f"{section}.{key} is null, expected a number")
        given[section] = keys | defaults.get(section, {}) | given[section]
    return Recipe(
        model=build(LlamaConfig, given["model"], "model"),
        data=build(DataSettings, given["data"], "data"),
        optimizer=build(OptimizerSettings, given["optimizer"], "optimizer"),
        lr_schedule=None if generation == "old" else _build_schedule(given["lr_schedule"]),
        training=build(TrainingSettings, given["training"], "training"),
        evaluation=build(EvaluationSettings, given["evaluation"], "evaluation"),
        runtime=build(RuntimeSettings, given["runtime"], "runtime"),
        decentralized=(
            None
            if mapping.get("decentralized") is None
            else build(DecentralizedSettings, given["decentralized"], "decentralized")
        ),
        warnings=tuple(f"optimizer.{key} is not known here and was ignored" for key in ignored),
    )


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

    old, new = present(_ONLY_OLD), present(_ONLY_NEW)
    if given["lr_schedule"]:
        new.append("lr_schedule")
    if old and new:
        raise HvpflowError(
            f"{', '.join(old)} and {', '.join(new)} belong to different generations of the format: "
            "remove the former for the new generation (preferred), the latter for the old one"
        )
    return "old" if old else "new"


def _build_schedule(given: Mapping[str, Any]) -> CosineSchedule | WsdSchedule:
    name = given.get("name", "cosine")
    if name not in SCHEDULES:
        hint = nearest(str(name), SCHEDULES)
        raise HvpflowError(f"lr_schedule.name is {name!r}{hint}, expected one of {', '.join(SCHEDULES)}")
    return build(SCHEDULES[name], given, "lr_schedule")


def recipe_identity(recipe: Recipe, cache_identity: str) -> str:
    """Digest of what makes two trainings the same: the settings without retention and machine, and the data.

    The composition is that of ``run-format``: the recipe's mapping less those keys, plus ``cache_identity`` and
    ``loader_version``, so identities of runs made by other programs that follow it can be compared.
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
