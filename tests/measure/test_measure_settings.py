"""Settings that are refused, what identifies numbers, and devices that are not there."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from hvpflow.devices import choose_device
from hvpflow.errors import HvpflowError
from hvpflow.measure.device import configure
from hvpflow.measure.settings import MeasureSettings
from hvpflow.typed import build, to_mapping


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_samples": 0}, "noise_samples is 0, expected at least 1"),
        ({"random_samples": -1}, "random_samples is -1, expected at least 1"),
        ({"seed": -1}, "seed is -1, expected 0 to 4294967295"),
        ({"seed": 2**32}, "seed is 4294967296, expected 0 to 4294967295"),
        ({"hvp_batch_size": 0}, "hvp_batch_size is 0"),
        ({"directions_per_pass": 0}, "directions_per_pass is 0"),
        ({"amp": True, "dtype": "float64"}, "turn amp off, or use float32"),
        ({"dtype": "float16"}, "expected one of float32, float64"),
        ({"noise_samples": "many"}, "noise_samples is 'many'"),
        ({"engine": "tailor"}, "did you mean 'taylor'"),
        ({"sede": 1}, "did you mean 'seed'"),
    ],
)
def test_refused_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(HvpflowError, match=message):
        build(MeasureSettings, options)


@pytest.mark.parametrize("options", [{"noise_samples": "all"}, {"seed": 2**32 - 1}, {"hvp_batch_size": None}])
def test_accepted_settings_survive_a_round_trip(options: dict[str, Any]) -> None:
    settings = build(MeasureSettings, options)
    assert build(MeasureSettings, to_mapping(settings)) == settings


def test_numerical_identity_names_what_changes_numbers() -> None:
    base = MeasureSettings().numerical_identity()
    for change in ({"dtype": "float64"}, {"tf32": False}, {"amp": True}, {"hvp_batch_size": 3}, {"compile_hvp": False}):
        assert MeasureSettings(**change).numerical_identity() != base
    for same in ({"seed": 1}, {"noise_samples": 2}, {"random_samples": 3}, {"directions_per_pass": 4}):
        assert MeasureSettings(**same).numerical_identity() == base


def test_planning_modules_need_no_torch() -> None:
    code = (
        "import sys, hvpflow.measure.settings, hvpflow.measure.records, hvpflow.measure.stacks, hvpflow.measure.store;"
        "print(sorted({'torch', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(None) == choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    for name in ("cuda", "cuda:1"):
        with pytest.raises(HvpflowError, match=f"device {name} was asked for, but .*; use --device cpu"):
            choose_device(name)
    with pytest.raises(HvpflowError, match="did you mean 'cuda'"):
        choose_device("cuba")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(HvpflowError, match=r"cuda:2 was asked for, but there are 2 CUDA device\(s\)"):
        choose_device("cuda:2")


def test_policy_on_a_cpu_says_that_tf32_has_no_effect() -> None:
    policy = configure(torch.device("cpu"), MeasureSettings(tf32=True))
    assert (policy["tf32_requested"], policy["tf32_supported"], policy["tf32_effective"]) == (True, False, False)
    assert policy["matmul_precision"] == "ieee"
    assert torch.get_float32_matmul_precision() == "highest"
