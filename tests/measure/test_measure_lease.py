"""Workers on one machine with several (stand-in) GPUs get distinct devices."""

from __future__ import annotations

import threading
import types
from pathlib import Path

import pytest
import torch

from hvpflow.measure import lease
from hvpflow.measure.lease import lease_device


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=f"GPU-{index}"))
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.01)


@pytest.mark.usefixtures("two_devices")
def test_each_worker_has_a_device_of_its_own(tmp_path: Path) -> None:
    said: list[str] = []
    with lease_device("auto", said.append, tmp_path) as one:
        with lease_device("cuda", said.append, tmp_path) as two:
            assert {one, two} == {torch.device("cuda:0"), torch.device("cuda:1")}
        with lease_device(None, said.append, tmp_path) as again:
            assert again == two
    assert said == []


@pytest.mark.usefixtures("two_devices")
def test_a_worker_waits_until_one_is_free(tmp_path: Path) -> None:
    said: list[str] = []
    got: list[torch.device] = []

    def third() -> None:
        with lease_device("cuda", said.append, tmp_path) as device:
            got.append(device)

    with lease_device("cuda", said.append, tmp_path):
        with lease_device("cuda", said.append, tmp_path) as second:
            waiting = threading.Thread(target=third)
            waiting.start()
            while not said:
                waiting.join(0.01)
            assert got == []
        waiting.join(10)
        assert got == [second]
    assert said == ["waiting for one of 2 GPUs: other hvpflow workers have them all"]


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("wanted", ["cuda:1", "cpu"])
def test_a_named_device_needs_no_lease(tmp_path: Path, wanted: str) -> None:
    with lease_device(wanted, print, tmp_path) as one, lease_device(wanted, print, tmp_path) as two:
        assert one == two == torch.device(wanted)
    assert not list(tmp_path.iterdir())
