"""A peer whose connect or disconnect takes long does not delay other peers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvferry.core.endpoint import EndpointOptions, Results
from kvferry.core.endpoint import endpoint as module
from kvferry.core.errors import DeadlineError, KVFerryError, PeerLostError, TransportError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.transport import PeerId, State, Status, TransferId, Transport
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from tests.core.endpoint.engines import LAYERS, Clock, Engine, RecordingTransport, eventually, until

TOKENS = 4
LONG = 60.0


class SlowPeerTransport(RecordingTransport):
    """A transport with one slow peer: the first to be connected.

    Reads from it go on until ``disconnect`` has returned, which waits for the test.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slow: PeerId | None = None
        self.connects_at_once = True
        self.may_return = threading.Event()
        self.disconnecting = threading.Event()
        self._stalled: set[TransferId] = set()

    @property
    def is_reading(self) -> bool:
        """Return whether a read from the slow peer is under way."""
        return bool(self._stalled)

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        if self.slow is None:
            self.slow = peer
            if not self.connects_at_once:
                assert self.may_return.wait(LONG)
        return peer

    def disconnect(self, peer: PeerId) -> None:
        if peer == self.slow:
            self.disconnecting.set()
            assert self.may_return.wait(LONG)
        super().disconnect(peer)
        if peer == self.slow:
            self._stalled.clear()

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if peer == self.slow:
            self._stalled.add(transfer)
        return transfer

    def cancel(self, transfer: TransferId) -> None:
        assert not self.disconnecting.is_set() or transfer not in self._stalled, (
            "named while it is being disconnected"
        )
        super().cancel(transfer)

    def poll(self, transfers: list[TransferId]) -> list[Status]:  # type: ignore[override]
        endless = Status(state=State.PENDING)
        named = self._stalled.intersection(transfers)
        assert not (named and self.disconnecting.is_set()), "named while it is being disconnected"
        statuses = super().poll(transfers)
        return [
            endless if each in named else status
            for each, status in zip(transfers, statuses, strict=True)
        ]


@contextlib.contextmanager
def three_engines(
    driver: SlowPeerTransport,
    clock: Clock,
    producer_transport: Callable[[], Transport] = LoopbackTransport,
) -> Iterator[tuple[Engine, Engine, Engine]]:
    """Run a slow producer, another one, and a consumer that reads from both."""
    options = EndpointOptions(liveness_interval=0.0, load_timeout=100.0)
    with (
        Engine("slow") as slow,
        Engine("other", transport=producer_transport) as other,
        Engine("decode", options=options, transport=lambda: driver, clock=clock) as decode,
    ):
        try:
            yield slow, other, decode
        finally:
            driver.may_return.set()


def assert_loads_succeed(other: Engine, decode: Engine, count: int = 5) -> None:
    for number in range(count):
        ticket = other.serve(f"o-{number}", [5], TOKENS)
        assert decode.load(f"do-{number}", ticket, [6]) is None
        other.released(f"o-{number}")
        (rank,) = decode.ranks
        for layer in range(LAYERS):
            want = rank.values(layer, TOKENS)
            np.testing.assert_array_equal(rank.read(layer, [6])[:TOKENS], want)


def test_loads_and_renewals_go_on_while_another_peer_is_being_disconnected(
    clock: Clock, producer_transport: RecordingTransport
) -> None:
    driver = SlowPeerTransport()
    with three_engines(driver, clock, lambda: producer_transport) as (slow, other, decode):
        decode.pull("d-1", slow.serve("p-1", [1], TOKENS), [2])
        eventually(lambda: driver.is_reading, "the slow peer is read from")
        waiting = other.serve("w", [7], TOKENS)
        decode.prepare(waiting)
        clock.skip(200.0)  # past the load's deadline, so its peer is given up
        eventually(driver.disconnecting.is_set, "it is being disconnected")
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
    driver = SlowPeerTransport()
    driver.connects_at_once = False
    with three_engines(driver, clock) as (slow, other, decode):
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The transport cannot be closed while one of its calls has not returned."""
    monkeypatch.setattr(module, "JOIN_SECONDS", 0.5)
    monkeypatch.setattr(module, "WIND_DOWN_SECONDS", 0.1)
    driver, clock = SlowPeerTransport(), Clock()
    with three_engines(driver, clock) as (slow, _, decode):
        decode.pull("d-1", slow.serve("p-1", [1], TOKENS), [2])
        eventually(lambda: driver.is_reading, "the slow peer is read from")
        clock.skip(200.0)
        eventually(driver.disconnecting.is_set, "it is being disconnected")
        with pytest.raises(TransportError, match="keep it until the process ends"):
            decode.endpoint.close()
        driver.may_return.set()
        eventually(lambda: driver.slow in driver.disconnected, "the driver's call returns")
        driver.close()
