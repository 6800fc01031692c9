"""Threads of an endpoint: each chooses its device first; a load does without those that fail."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

import pytest

from kvferry.core.errors import EndpointClosedError, HandshakeError, KVFerryError
from kvferry.core.planner.unwritten import zero_cpu
from kvferry.drivers.loopback import LoopbackTransport
from tests.core.endpoint.engines import Engine, eventually, load
from tests.core.resource_limits import no_threads
from tests.gpu.torch_module import StandInDevices


def test_no_thread_uses_a_device_that_it_has_not_chosen() -> None:
    devices = StandInDevices()
    enter = partial(devices.set_device, 1)
    enter()  # as the engine's thread has

    def using(owner: Any, method: str) -> Any:
        def call(*args: Any) -> Any:
            devices.use(method)
            return getattr(owner, method)(*args)

        return call

    def transport() -> LoopbackTransport:
        """Return one that uses the device in every call, as a library does for memory of GPUs."""
        made = LoopbackTransport(enter=enter)
        for method in ("connect", "disconnect", "read", "poll", "notifications"):
            setattr(made, method, using(super(LoopbackTransport, made), method))
        return made

    zero: Any = using(zero_cpu, "__call__")
    rank = partial(Engine, transport=transport, enter=enter, zero=zero)
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


@pytest.mark.parametrize(
    ("name", "error_type"),
    [
        ("kvferry-handshake", None),
        ("kvferry-resolve", HandshakeError),
        ("kvferry-driver-call", None),
    ],
)
def test_a_load_that_gets_no_thread_fails_or_does_without_and_the_next_succeeds(
    decode: Engine, name: str, error_type: type[KVFerryError] | None
) -> None:
    with Engine("prefill", host="localhost") as prefill:
        with no_threads(name) as refused:
            error = load(prefill, decode, 1)
        assert refused
        if error_type is None:
            assert error is None
        else:
            assert isinstance(error, error_type)
            assert "ulimit" in str(error)
        assert load(prefill, decode, 2) is None
        assert decode.endpoint.healthy
