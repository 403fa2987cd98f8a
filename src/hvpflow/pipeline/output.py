"""The output directory: whose it is, the configuration it was last worked with, and what lies in it for the user."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from hvpflow.errors import HvpflowError
from hvpflow.files import fingerprint, read_json, write_json, write_text
from hvpflow.pipeline.plan import Plan
from hvpflow.pipeline.settings import Config, config_from_mapping
from hvpflow.runs.recipe import Recipe
from hvpflow.yaml_files import read_yaml

CONFIG_NAME = "config.yaml"
OWNER_NAME = "owner.json"
ANALYSED_SECTIONS = ("model", "data", "training", "decentralized")


def claim_output(plan: Plan) -> None:
    """Mark the output directory as this run's and write the merged configuration into it.

    Raises:
        HvpflowError: the directory belongs to another run, or the run's recipe changed under the analysis.
    """
    check_owner(plan)
    write_json(plan.output / OWNER_NAME, owner_of(plan))
    write_text(plan.output / CONFIG_NAME, yaml.safe_dump(plan.config.to_mapping(), sort_keys=False))


def check_owner(plan: Plan) -> None:
    """Refuse an output directory that holds the results of something else; writes nothing.

    A run that moved is recognised by its recipe, and a workflow's own run by its directory: its recipe may change, and
    then everything downstream is made again.

    Raises:
        HvpflowError: another run, a changed recipe, or a directory of foreign files.
    """
    path = plan.output / OWNER_NAME
    if not path.is_file():
        strangers = [entry.name for entry in _entries(plan.output) if not entry.name.startswith(".")]
        if strangers and not {"work", "inspect", "store", "logs"} & set(strangers):
            raise HvpflowError(
                f"the output directory {plan.output} holds other files ({', '.join(sorted(strangers)[:3])}…); "
                "choose a new or empty one"
            )
        return
    owner, here = read_json(path), owner_of(plan)
    if not isinstance(owner, dict):
        raise HvpflowError(f"{path} is not what an analysis writes there; delete it if the results are this run's")
    same_place = owner.get("run") == here["run"]
    if owner.get("recipe") == here["recipe"] or (same_place and plan.config.owned):
        return
    if same_place:
        raise HvpflowError(
            f"{plan.run_directory / 'resolved.yaml'} changed since {plan.output} was begun: its model, data or "
            "training section differs. Restore it, or choose a new output directory"
        )
    raise HvpflowError(
        f"{plan.output} holds the analysis of another run, {owner.get('run')}; choose a new output directory for "
        f"{plan.run_directory}"
    )


def owner_of(plan: Plan) -> dict[str, Any]:
    """What an output directory remembers of its run."""
    return {"run": os.path.abspath(plan.run_directory), "recipe": analysed_identity(plan.recipe)}


def analysed_identity(recipe: Recipe) -> str:
    """Digest of what an analysis reads of a recipe: where it lies and how it is stored are no part of it."""
    mapping = recipe.to_mapping()
    content = {name: mapping.get(name) for name in ANALYSED_SECTIONS}
    content["data"] = {key: value for key, value in mapping["data"].items() if key not in ("cache_dir", "prefetch")}
    content["training"] = {
        key: value
        for key, value in mapping["training"].items()
        if key not in ("checkpoint_policy", "checkpoint_epochs", "save_epoch_training_state", "log_every")
    }
    return fingerprint({**content, "seed": recipe.runtime.seed})


def open_output(directory: Path) -> Config:
    """The configuration that an output directory was last worked with.

    Raises:
        HvpflowError: the directory was not made by an analysis.
    """
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise HvpflowError(f"{directory} is no output directory of an analysis: it has no {CONFIG_NAME}")
    return config_from_mapping(read_yaml(path))


def closing_words(plan: Plan) -> str:
    """The files to look at, as the last lines of a finished analysis; "" where it is not finished."""
    figures = [path for path in plan.figure_paths if path.suffix == ".png" and plan.config.analysis.plots]
    files = [plan.output / "summary.csv", *figures]
    return "\n".join(["", "Look at:", *(f"  {path}" for path in files)]) if all(map(Path.is_file, files)) else ""


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []
