"""What all tests of trainings share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from training_cases import make_cache, make_recipe

from hvpflow.data.cache import TokenCache
from hvpflow.training import train_run


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On models this small, more threads only wait for one another; and equal bits need equal threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    return make_cache(tmp_path_factory.mktemp("data") / "cache")


@pytest.fixture(scope="module")
def finished(cache: TokenCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the plain recipe, never interrupted; copy it before changing it."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    train_run(make_recipe(), cache, directory)
    return directory
