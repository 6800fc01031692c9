"""``DeviceSync``: loads wait until the device has finished with their pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvferry.core.endpoint.device_sync import DeviceSync
from kvferry.core.endpoint.load import Load
from kvferry.core.errors import (
    DeadlineError,
    EndpointClosedError,
    KVFerryError,
    TicketError,
)
from kvferry.core.lifecycle.holds import RequestId
from tests.core.endpoint.samples import sample_load, sample_ticket


class Device:
    """A ``DeviceSync`` with a clock of the test's, and the loads that it has begun."""

    def __init__(self) -> None:
        self.now = 0.0
        self.begun: list[tuple[str, KVFerryError | None]] = []
        self.device_sync = DeviceSync(self._begin, clock=lambda: self.now, patience=10.0)

    def _begin(self, load: Load, error: KVFerryError | None) -> None:
        self.begun.append((load.request, error))

    def add(self, request: str, passed: Callable[[], bool], **how: Any) -> None:
        self.device_sync.add(sample_load(request, **how), passed)


def test_loads_begin_in_order_as_the_device_finishes() -> None:
    device, passed = Device(), {"a": False, "b": True}
    for request in "ab":
        device.add(request, lambda request=request: passed[request])  # type: ignore[misc]
    assert not device.device_sync.progress()
    assert len(device.device_sync) == 2
    passed["a"] = True
    assert device.device_sync.progress()
    assert device.begun == [("a", None), ("b", None)]
    assert not device.device_sync.progress()


def test_a_load_fails_when_the_device_takes_longer_than_its_patience() -> None:
    device = Device()
    device.add("a", lambda: False)
    device.now = 5.0
    device.add("b", lambda: False)
    device.now = 9.9
    assert not device.device_sync.progress()
    device.now = 10.0
    assert device.device_sync.progress()
    [(request, error)] = device.begun
    assert request == "a"
    assert isinstance(error, DeadlineError)
    assert "after 10 s" in str(error)
    assert len(device.device_sync) == 1


def test_one_waiting_load_or_all_of_them_can_be_given_up() -> None:
    device = Device()
    for request in "abc":
        device.add(request, lambda: False)
    device.device_sync.give_up(RequestId("b"))
    assert [request for request, _ in device.begun] == ["b"]
    device.device_sync.give_up()
    assert [request for request, _ in device.begun] == ["b", "a", "c"]
    assert all(isinstance(error, EndpointClosedError) for _, error in device.begun)
    assert len(device.device_sync) == 0


@pytest.mark.parametrize("is_last", [False, True], ids=["part", "last part"])
def test_a_part_of_another_engine_fails_the_load_that_waits(is_last: bool) -> None:
    device = Device()
    for request in "ab":
        device.add(request, lambda: False, is_early=True)
    part = sample_ticket(engine="another")
    assert device.device_sync.extend(RequestId("b"), part, is_last=is_last)
    [(request, error)] = device.begun
    assert request == "b"
    assert isinstance(error, TicketError)
    assert not device.device_sync.extend(RequestId("b"), sample_ticket(), is_last=is_last)
    assert len(device.device_sync) == 1


def test_only_an_early_load_is_extended_until_its_last_part() -> None:
    device = Device()
    device.add("a", lambda: False)
    device.add("b", lambda: False, is_early=True)
    assert not device.device_sync.extend(RequestId("a"), sample_ticket(), is_last=False)
    assert device.device_sync.extend(RequestId("b"), sample_ticket(), is_last=False)
    assert device.device_sync.extend(RequestId("b"), sample_ticket(), is_last=True)
    assert not device.device_sync.extend(RequestId("b"), sample_ticket(), is_last=True)
