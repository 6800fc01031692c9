"""Problems of an engine, from the driver to the health probe."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvferry.core.driver_calls.connections import STUCK_SECONDS
from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import HandshakeError, TransportError
from kvferry.core.side_channel.connection import health
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.transport import PeerId, TransferId
from kvferry.core.transport.copies import Copies
from tests.core.endpoint.engines import Clock, Engine, RecordingTransport, eventually
from tests.core.endpoint.transports import ScriptedTransport

LONG = 20.0


def test_a_failed_disconnect_is_a_problem_until_it_succeeds(
    prefill: Engine, driver: ScriptedTransport
) -> None:
    driver.raises["disconnect"] = ZeroDivisionError("a bug")
    options = EndpointOptions(liveness_interval=5.0)
    with Engine("decode", options=options, transport=lambda: driver) as decode:
        endpoint = decode.endpoint
        assert decode.load("d-1", prefill.serve("p-1", [1], 4), [2]) is None
        assert endpoint.healthy
        prefill.server.close()
        eventually(lambda: not endpoint.healthy, "the problem is known")
        with prefill.side_channel(port=prefill.server.port):
            error = decode.load("d-2", prefill.serve("p-2", [1], 4), [2])
            assert "does not fall silent" in str(error)
        assert "1 connections did not fall silent" in endpoint.problems[0]
        driver.raises.clear()
        eventually(lambda: endpoint.healthy, "the connection is closed after all")
    assert endpoint.problems == ("the endpoint is closed",)


def test_a_failing_driver_is_a_problem_until_it_works_again(
    prefill: Engine, driver: ScriptedTransport
) -> None:
    """Loads that do not need the failing method go on meanwhile."""
    with Engine("decode", transport=lambda: driver) as decode:
        endpoint = decode.endpoint
        assert endpoint.healthy
        driver.raises["notifications"] = TransportError("the library has gone")
        eventually(lambda: not endpoint.healthy, "the problem is known without any load")
        assert endpoint.problems == (
            "the driver's notifications failed, again and again, with TransportError: the "
            "library has gone; restart the engine if that lasts",
        )
        assert decode.load("d-1", prefill.serve("p-1", [1], 4), [2]) is None
        driver.raises.clear()
        eventually(lambda: endpoint.healthy, "the driver works again")


class StuckReadTransport(RecordingTransport):
    """A transport whose ``read`` does not return until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reading = threading.Event()
        self.may_return = threading.Event()

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        self.is_reading.set()
        self.may_return.wait()
        return super().read(peer, copies, notify)


def test_a_driver_call_that_does_not_return_is_a_problem_until_it_does(
    prefill: Engine, clock: Clock
) -> None:
    driver = StuckReadTransport()
    with Engine("decode", transport=lambda: driver, clock=clock) as decode:
        endpoint = decode.endpoint
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2])
        try:
            eventually(driver.is_reading.is_set, "the driver is called")
            assert endpoint.healthy
            clock.skip(STUCK_SECONDS)
            assert "a call of the driver does not return" in endpoint.problems[0]
            assert endpoint.pending == 1
        finally:
            driver.may_return.set()
        assert decode.error("d-1") is None
        eventually(lambda: endpoint.healthy, "the call has returned")


@pytest.fixture
def problems() -> list[str]:
    return []


@pytest.fixture
def server(problems: list[str]) -> Iterator[HandshakeServer]:
    with Engine("prefill") as prefill, prefill.side_channel(problems=lambda: problems) as running:
        yield running


@pytest.mark.parametrize("name", ["", "prefill"])
def test_a_probe_gets_the_problems_of_the_engine(
    server: HandshakeServer, problems: list[str], name: str
) -> None:
    condition = health(server.host, server.port, name, timeout=LONG)
    assert (condition.engine, condition.problems) == ("prefill", [])
    problems += ["rank 0: it burns", "x" * 100_000] * 100
    condition = health(server.host, server.port, name, timeout=LONG)
    assert condition.problems[0] == "rank 0: it burns"
    assert len(condition.problems) == 64


def test_a_probe_for_another_engine_is_refused(server: HandshakeServer) -> None:
    with pytest.raises(HandshakeError, match="'decode' is not here"):
        health(server.host, server.port, "decode", timeout=LONG)


def test_a_probe_of_a_closed_port_fails(server: HandshakeServer) -> None:
    server.close()
    with pytest.raises(HandshakeError, match="nobody listens there"):
        health(server.host, server.port, timeout=LONG)
