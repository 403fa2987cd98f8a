"""A run directory: its recipe, its checkpoints by name, its token cache. Imports no torch and opens no weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvpflow.errors import HvpflowError, nearest
from hvpflow.runs.recipe import Recipe, load_recipe
from hvpflow.runs.recipe_sections import POLICIES_HELP

RECIPE_NAME = "resolved.yaml"
_EPOCH_NAME = re.compile(r"epoch-(\d{3,})\.(?:safetensors|pt)")


@dataclass(frozen=True, slots=True)
class Run:
    """A trained (or yet to be trained) run."""

    directory: Path
    recipe: Recipe

    def checkpoints(self) -> list[str]:
        """Names of the root checkpoints on disk, sorted: ``epoch-NNN.safetensors``, ``epoch-NNN.pt``, ``final.pt``."""
        try:
            names = [path.name for path in self.directory.iterdir() if path.is_file()]
        except OSError as error:
            raise HvpflowError(f"cannot list the run directory {self.directory}: {error.strerror}") from error
        return sorted(name for name in names if name == "final.pt" or checkpoint_epoch(name) is not None)


def open_run(directory: Path) -> Run:
    """Open a run directory.

    Raises:
        HvpflowError: no such directory, no ``resolved.yaml`` in it, or a recipe that is refused.
    """
    if not directory.is_dir():
        raise HvpflowError(
            f"no run directory {directory}: give the directory that holds {RECIPE_NAME} and the checkpoints"
        )
    if not (directory / RECIPE_NAME).is_file():
        raise HvpflowError(
            f"{directory} is no run: it holds no {RECIPE_NAME}, which training writes beside the checkpoints"
        )
    return Run(directory, load_recipe(directory / RECIPE_NAME))


def checkpoint_epoch(name: str) -> int | None:
    """Epoch (from 1) in a checkpoint's name, or None where the name has none."""
    match = _EPOCH_NAME.fullmatch(name)
    if not match:
        return None
    epoch = int(match[1])
    return epoch if epoch >= 1 and match[1] == f"{epoch:03d}" else None


def select_checkpoints(available: Sequence[str], wanted: Literal["all"] | Sequence[str]) -> list[str]:
    """Choose root checkpoints by name; sorted, each once.

    Args:
        available: names that the run has, or will have (see ``retained_files``).
        wanted: "all", or names.

    Raises:
        HvpflowError: the run keeps no checkpoint; a name is unknown; nothing was selected.
    """
    roots = sorted({name for name in available if "/" not in name})
    if not roots:
        raise HvpflowError(
            "the run holds no checkpoint (epoch-NNN.safetensors, epoch-NNN.pt or final.pt): train it with "
            f"training.checkpoint_policy {POLICIES_HELP}"
        )
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    if names == ["all"]:
        return roots
    if not names:
        raise HvpflowError(f"no checkpoints selected: name some of {_listed(roots)}, or all")
    for name in names:
        if name in roots:
            continue
        if "/" in name:
            raise HvpflowError(
                f"{name} is no root checkpoint: give the name of a file directly in the run directory"
                f"{nearest(name.rsplit('/', 1)[1], roots)}; node files are read with their root"
            )
        raise HvpflowError(f"the run has no checkpoint {name!r}{nearest(name, roots)}; it has {_listed(roots)}")
    return sorted(set(names))


def find_cache(run: Run, override: Path | None = None) -> Path:
    """Directory of the run's token cache.

    ``override`` is taken as it is. A relative ``data.cache_dir`` is looked up from the current directory, then from
    the run directory and each of its parents.

    Raises:
        HvpflowError: none of the places holds a ``manifest.json``; the text lists them.
    """
    if override is not None:
        places = [override]
    else:
        cache_dir = Path(run.recipe.data.cache_dir)
        if cache_dir.is_absolute():
            places = [cache_dir]
        else:
            home = run.directory.resolve()
            places = list(dict.fromkeys(base / cache_dir for base in (Path.cwd(), home, *home.parents)))
    for place in places:
        if (place / "manifest.json").is_file():
            return place
    raise HvpflowError(
        f"no token cache (a directory with manifest.json) for {run.directory}: looked in "
        f"{', '.join(str(place) for place in places)}; prepare it with `hvpflow prepare`, or name it with --cache-dir"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:10])}, … ({len(names)} in all)"
