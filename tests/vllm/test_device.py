"""The device of the caches, with a stand-in for torch's module of its kind."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from kvferry.core.transport import enter_nothing
from kvferry.integrations.vllm.config import ConfigError
from kvferry.integrations.vllm.device import (
    HighPriorityStream,
    check_has_streams,
    platform_device,
    thread_setup,
    work_marker,
)
from tests.gpu.torch_module import StandInDevices


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> StandInDevices:
    from vllm.platforms import current_platform

    stand_in = StandInDevices()
    monkeypatch.setattr(torch, "get_device_module", lambda device: stand_in)
    monkeypatch.setattr(type(current_platform), "set_device", staticmethod(stand_in.set_device))
    return stand_in


def test_each_thread_chooses_the_device_of_the_caches(devices: StandInDevices) -> None:
    enter = thread_setup(torch.device("cuda", 1))
    thread = threading.Thread(target=enter, name="one of ours")
    thread.start()
    thread.join()
    assert devices.chosen == {"one of ours": 1}


def test_cpus_need_no_device() -> None:
    assert thread_setup(torch.device("cpu")) is enter_nothing
    assert platform_device() == torch.device("cpu")
    assert work_marker(torch.device("cpu"))() is None
    with HighPriorityStream(torch.device("cpu")).awaited():
        pass


def test_a_rank_without_caches_has_the_device_of_its_thread(
    devices: StandInDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    devices.set_device(1)
    assert platform_device() == torch.device("cuda", 1)


def test_a_device_without_streams_is_refused(
    devices: StandInDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_has_streams(torch.device("cpu"))
    check_has_streams(torch.device("cuda", 1))
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    with pytest.raises(
        ConfigError, match=r"no streams and events for 'xla'.*use a device that has them"
    ):
        check_has_streams(torch.device("xla"))


def test_a_mark_is_passed_when_the_work_before_it_is_done(devices: StandInDevices) -> None:
    devices.set_device(1)
    mark = work_marker(torch.device("cuda", 1))
    devices.enqueue(0.1)
    passed = mark()
    devices.enqueue(60.0)
    assert passed is not None
    assert not passed()
    time.sleep(0.11)
    assert passed()
