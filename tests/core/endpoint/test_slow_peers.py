"""A peer whose connect or disconnect takes long does not delay other peers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from kvferry.core.endpoint import Results
from kvferry.core.endpoint import endpoint as module
from kvferry.core.errors import DeadlineError, KVFerryError, PeerLostError, TransportError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.transport import PeerId
from tests.core.endpoint.engines import (
    TOKENS,
    Clock,
    Engine,
    RecordingTransport,
    eventually,
    load,
    until,
)
from tests.core.endpoint.transports import PENDING, ScriptedTransport, three_engines

LONG = 60.0


class SlowPeerTransport(ScriptedTransport):
    """The first peer is slow: reads from it go on until ``disconnect`` returns, when told so."""

    def __init__(self, *, connects_at_once: bool = True) -> None:
        super().__init__()
        self.statuses[0] = PENDING if connects_at_once else None
        self.slow: PeerId | None = None
        self.connects_at_once = connects_at_once
        self.may_return = threading.Event()
        self.disconnecting = threading.Event()

    def connect(self, address: bytes) -> PeerId:
        peer: PeerId = super().connect(address)
        if self.slow is None:
            self.slow = peer
            assert self.connects_at_once or self.may_return.wait(LONG)
        return peer

    def disconnect(self, peer: PeerId) -> None:
        if peer == self.slow:
            self.disconnecting.set()
            assert self.may_return.wait(LONG)
        super().disconnect(peer)


@contextlib.contextmanager
def engines(
    driver: SlowPeerTransport, clock: Clock, other: RecordingTransport | None = None
) -> Iterator[tuple[Engine, Engine, Engine]]:
    """Run engines; unless the slow peer is being connected, it is read from, and is given up."""
    with three_engines(driver, clock, other) as (slow, quick, decode):
        if driver.connects_at_once:
            decode.pull("d-1", slow.serve("p-1", [1], TOKENS), [2])
            eventually(lambda: bool(driver.pages), "the slow peer is read from")
        try:
            yield slow, quick, decode
        finally:
            driver.may_return.set()


def disconnect(driver: SlowPeerTransport, clock: Clock) -> None:
    clock.skip(200.0)  # past the load's deadline, so its peer is given up
    eventually(driver.disconnecting.is_set, "it is being disconnected")


def assert_loads_succeed(other: Engine, decode: Engine) -> None:
    for number in range(5, 10):
        assert load(other, decode, number) is None
        assert not decode.wrong_bytes([number], TOKENS)
        other.released(f"p-{number}")


def test_loads_and_renewals_go_on_while_another_peer_is_being_disconnected(
    clock: Clock, producer_transport: RecordingTransport
) -> None:
    driver = SlowPeerTransport()
    with engines(driver, clock, producer_transport) as (_, other, decode):
        waiting = other.serve("w", [12], TOKENS)
        decode.prepare(waiting)
        disconnect(driver, clock)
        assert_loads_succeed(other, decode)
        producer_transport.received.clear()
        clock.skip(15.0)
        eventually(
            lambda: bool(producer_transport.received), "the hold of the waiting request is renewed"
        )
        assert not driver.may_return.is_set()
        results = decode.endpoint.results()
        assert RequestId("d-1") not in results.received, "bytes may still land in its pages"
        assert decode.load("d-w", waiting, [8]) is None
        eventually(lambda: decode.endpoint.healthy, "a round has run since the skip")
        clock.skip(30.0)
        assert "have not returned for 30 s" in decode.endpoint.problems[0]
        driver.may_return.set()
        error = decode.error("d-1")
        assert isinstance(error, DeadlineError | PeerLostError)
        eventually(lambda: decode.endpoint.healthy, "the call has returned")


def test_loads_go_on_while_another_peer_is_being_connected(clock: Clock) -> None:
    driver = SlowPeerTransport(connects_at_once=False)
    with engines(driver, clock) as (slow, other, decode):
        for number in range(3):
            decode.pull(f"d-{number}", slow.serve(f"p-{number}", [1], TOKENS), [2])
        eventually(lambda: driver.slow is not None, "the slow peer is being connected")
        assert_loads_succeed(other, decode)
        clock.skip(200.0)
        failed: dict[RequestId, KVFerryError] = {}

        def all_failed(results: Results) -> bool:
            failed.update(results.failed)
            return len(failed) == 3

        until(decode.endpoint, all_failed)
        assert all("stage: handshake" in str(error) for error in failed.values())
        driver.may_return.set()
        slow.released("p-2")  # "abandon" is sent once the peer is connected


def test_closing_while_a_peer_is_being_disconnected_asks_to_keep_the_memory(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """The transport cannot be closed while one of its calls has not returned."""
    monkeypatch.setattr(module, "JOIN_SECONDS", 0.5)
    monkeypatch.setattr(module, "WIND_DOWN_SECONDS", 0.1)
    driver = SlowPeerTransport()
    with engines(driver, clock) as (_, _, decode):
        disconnect(driver, clock)
        with pytest.raises(TransportError, match="keep it until the process ends"):
            decode.endpoint.close()
        driver.may_return.set()
        eventually(lambda: driver.slow in driver.disconnected, "the driver's call returns")
        driver.close()
