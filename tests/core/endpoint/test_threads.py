"""Every thread of an endpoint chooses its device before it uses the transport or the memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial

import pytest

from kvferry.core.errors import EndpointClosedError
from kvferry.core.planner.unwritten import Spans, zero_cpu
from kvferry.core.transport import Copies, Notification, PeerId, Status, TransferId
from kvferry.drivers.loopback import LoopbackTransport
from tests.core.endpoint.engines import Engine, eventually
from tests.gpu.torch_module import StandInDevices


class DeviceTransport(LoopbackTransport):
    """Uses the device in every call, as a library does that moves the memory of GPUs."""

    def __init__(self, devices: StandInDevices) -> None:
        super().__init__(enter=partial(devices.set_device, 1))
        self._devices = devices

    def connect(self, address: bytes) -> PeerId:
        self._devices.use("connect")
        return super().connect(address)

    def disconnect(self, peer: PeerId) -> None:
        self._devices.use("disconnect")
        super().disconnect(peer)

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        self._devices.use("read")
        return super().read(peer, copies, notify)

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        self._devices.use("poll")
        return super().poll(transfers)

    def notifications(self) -> list[Notification]:
        self._devices.use("notifications")
        return super().notifications()


def test_no_thread_uses_a_device_that_it_has_not_chosen() -> None:
    devices = StandInDevices()
    devices.set_device(1)  # this thread, as the engine's, has chosen
    enter = partial(devices.set_device, 1)

    def zero(spans: list[Spans]) -> None:
        devices.use("zero")
        zero_cpu(spans)

    rank = partial(Engine, transport=partial(DeviceTransport, devices), enter=enter, zero=zero)
    with rank("prefill") as prefill, rank("decode") as decode:
        ticket = prefill.serve("p", [1, 2], 7)
        event = devices.Event()
        event.record()
        assert decode.load("d", ticket, [3, 4], passed=event.query) is None
        prefill.released("p")
    assert devices.strays == []
    assert set(devices.chosen.values()) == {1}
    assert {"kvferry-endpoint", "kvferry-driver-call"} <= set(devices.chosen)


def test_an_endpoint_that_cannot_choose_its_device_has_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = threading.Event()

    def fail() -> None:
        made.wait()
        raise RuntimeError("no such device: 7")

    with caplog.at_level(logging.CRITICAL), Engine("decode", enter=fail) as decode:
        endpoint = decode.endpoint
        made.set()
        eventually(lambda: not endpoint.healthy, "the endpoint has failed")
        assert "no such device: 7" in endpoint.problems[0]
        with pytest.raises(EndpointClosedError):
            endpoint.results()
