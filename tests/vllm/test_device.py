"""The device of the caches, with a stand-in for torch's module; zeroing through torch, as there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.memory import region_of
from kvferry.core.planner.unwritten import Spans, zero_cpu
from kvferry.core.transport import enter_nothing
from kvferry.integrations.vllm import device as module
from kvferry.integrations.vllm.config import ConfigError
from kvferry.integrations.vllm.device import (
    HighPriorityStream,
    check_has_streams,
    device_zero_function,
    platform_device,
    thread_setup,
    work_marker,
    zero_function,
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


# Zeroing.

NBYTES = 4099
POISON = 0xAB


def _memory() -> torch.Tensor:
    return torch.full((NBYTES,), POISON, dtype=torch.uint8)


def _spans(memories: list[torch.Tensor], cuts: list[list[int]], unit: int) -> list[Spans]:
    """Every other stretch between the cuts of each memory, in multiples of ``unit``."""
    spans: list[Spans] = []
    for memory, places in zip(memories, cuts, strict=True):
        edges = [place * unit for place in sorted(set(places))]
        if found := [(a, b - a) for a, b in list(pairwise(edges))[::2]]:
            table = np.array(found, dtype=np.int64)
            spans.append(Spans(region=region_of(memory), offsets=table[:, 0], nbytes=table[:, 1]))
    return spans


@given(data=st.data(), unit=st.sampled_from([1, 2, 48, 256]))
def test_torch_zeroes_what_the_cpu_does(data: st.DataObject, unit: int) -> None:
    places = st.lists(st.integers(0, NBYTES // unit), max_size=12)
    cuts = [data.draw(places), data.draw(places)]
    one, other = [_memory(), _memory()], [_memory(), _memory()]
    zero_cpu(_spans(one, cuts, unit))
    device_zero_function(other)(_spans(other, cuts, unit))
    for left, right in zip(one, other, strict=True):
        assert left.tolist() == right.tolist()


def test_views_of_one_buffer_are_one_memory() -> None:
    buffer = _memory()[:4096].view(4, 1024)
    spans = _spans([buffer], [[1, 3]], 1024)
    device_zero_function([buffer[0], buffer[2]])(spans)
    assert buffer.sum(dim=1).tolist() == [1024 * POISON, 0, 0, 1024 * POISON]


def test_cpu_memory_needs_no_torch() -> None:
    assert zero_function([_memory()]) is zero_cpu


def test_zeroing_is_enqueued_on_a_stream_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, seen = _memory(), []

    @contextmanager
    def awaited(stream: module.HighPriorityStream) -> Iterator[None]:
        yield
        seen.append(memory.tolist())

    monkeypatch.setattr(module.HighPriorityStream, "awaited", awaited)
    device_zero_function([memory])(_spans([memory], [[1, 2]], 256))
    assert seen == [memory.tolist()]  # nothing was enqueued elsewhere, or later
    assert memory[256:512].sum() == 0
