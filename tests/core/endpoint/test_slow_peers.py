"""A peer that a driver takes long to reach, or to part from: nobody else waits for it."""

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
from tests.core.endpoint.engines import (
    LAYERS,
    Clock,
    Engine,
    Watched,
    engine,
    eventually,
    expected,
    until,
)

TOKENS = 4
LONG = 60.0


class Slow(Watched):
    """A driver with one peer that it takes long to reach, to read from and to part from.

    Reads from it go on until ``disconnect`` has returned, for which the test has to let it go.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slow: PeerId | None = None
        self.is_reached = True
        self.let_go = threading.Event()
        self.parting = threading.Event()
        self._endless: set[TransferId] = set()

    @property
    def is_reading(self) -> bool:
        """Whether a read from the slow peer has begun, which then goes on."""
        return bool(self._endless)

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        if self.slow is None:
            self.slow = peer
            if not self.is_reached:
                assert self.let_go.wait(LONG)
        return peer

    def disconnect(self, peer: PeerId) -> None:
        if peer == self.slow:
            self.parting.set()
            assert self.let_go.wait(LONG)
        super().disconnect(peer)
        if peer == self.slow:
            self._endless.clear()

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if peer == self.slow:
            self._endless.add(transfer)
        return transfer

    def cancel(self, transfer: TransferId) -> None:
        assert not self.parting.is_set() or transfer not in self._endless, "named while it parts"
        super().cancel(transfer)

    def poll(self, transfers: list[TransferId]) -> list[Status]:  # type: ignore[override]
        endless = Status(state=State.PENDING)
        named = self._endless.intersection(transfers)
        assert not (named and self.parting.is_set()), "named while it parts"
        statuses = super().poll(transfers)
        return [
            endless if each in named else status
            for each, status in zip(transfers, statuses, strict=True)
        ]


@contextlib.contextmanager
def three(
    driver: Slow, clock: Clock, theirs: Callable[[], Transport] = LoopbackTransport
) -> Iterator[tuple[Engine, Engine, Engine]]:
    """A producer that is slow, another one, and who reads from both."""
    options = EndpointOptions(liveness_interval=0.0, load_timeout=100.0)
    with (
        engine("slow") as slow,
        engine("other", transport=theirs) as other,
        engine("decode", options=options, transport=lambda: driver, clock=clock) as decode,
    ):
        try:
            yield slow, other, decode
        finally:
            driver.let_go.set()


def loads_go_on(other: Engine, decode: Engine, count: int = 20) -> None:
    for number in range(count):
        ticket = other.serve(f"o-{number}", [5], TOKENS)
        decode.pull(f"do-{number}", ticket, [6])
        assert not decode.outcome(f"do-{number}").failed
        other.released(f"o-{number}")
        (rank,) = decode.ranks
        for layer in range(LAYERS):
            want = expected(decode.shape, TOKENS, layer, 0)
            np.testing.assert_array_equal(rank.tokens([6], layer)[:TOKENS], want)


def test_loads_and_renewals_go_on_while_another_peer_is_parted_from() -> None:
    driver, clock, theirs = Slow(), Clock(), Watched()
    with three(driver, clock, lambda: theirs) as (slow, other, decode):
        decode.pull("d-1", slow.serve("p-1", [1], TOKENS), [2])
        eventually(lambda: driver.is_reading, "the slow peer is read from")
        waiting = other.serve("w", [7], TOKENS)
        decode.prepare(waiting)
        clock.skip(200.0)  # the load is too late, and so its peer is given up
        eventually(driver.parting.is_set, "it is being disconnected")
        loads_go_on(other, decode)
        theirs.heard.clear()
        clock.skip(15.0)
        eventually(lambda: bool(theirs.heard), "what waits is renewed")
        assert not driver.let_go.is_set()
        results = decode.ranks[0].endpoint.results()
        assert RequestId("d-1") not in results.received, "bytes may still land in its pages"
        decode.pull("d-w", waiting, [8])
        assert not decode.outcome("d-w").failed
        assert decode.ranks[0].endpoint.healthy
        clock.skip(30.0)
        assert "have not returned for 30 s" in decode.ranks[0].endpoint.problems[0]
        driver.let_go.set()
        error = decode.outcome("d-1").failed[RequestId("d-1")]
        assert isinstance(error, DeadlineError | PeerLostError)
        eventually(lambda: decode.ranks[0].endpoint.healthy, "the call has returned")


def test_loads_go_on_while_another_peer_is_connected_to() -> None:
    driver, clock = Slow(), Clock()
    driver.is_reached = False
    with three(driver, clock) as (slow, other, decode):
        for number in range(3):
            decode.pull(f"d-{number}", slow.serve(f"p-{number}", [1], TOKENS), [2])
        eventually(lambda: driver.slow is not None, "the slow peer is being connected")
        loads_go_on(other, decode)
        clock.skip(200.0)
        failed: dict[RequestId, KVFerryError] = {}

        def all_failed(results: Results) -> bool:
            failed.update(results.failed)
            return len(failed) == 3

        until(decode.ranks[0].endpoint, all_failed)
        assert all("stage: handshake" in str(error) for error in failed.values())
        driver.let_go.set()
        slow.released("p-2")  # "abandon" goes to whoever is connected at last


def test_an_engine_that_closes_while_a_peer_is_parted_from_keeps_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That the transport is closed under a call of its own would be no end of anything."""
    monkeypatch.setattr(module, "JOIN_SECONDS", 0.5)
    monkeypatch.setattr(module, "WIND_DOWN_SECONDS", 0.1)
    driver, clock = Slow(), Clock()
    with three(driver, clock) as (slow, _, decode):
        decode.pull("d-1", slow.serve("p-1", [1], TOKENS), [2])
        eventually(lambda: driver.is_reading, "the slow peer is read from")
        clock.skip(200.0)
        eventually(driver.parting.is_set, "it is being disconnected")
        with pytest.raises(TransportError, match="keep it until the process ends"):
            decode.ranks[0].endpoint.close()
        driver.let_go.set()
        eventually(lambda: driver.slow in driver.disconnected, "the driver's call returns")
        driver.close()
