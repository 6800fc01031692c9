"""``Connections``: engines share them; they are opened once and closed by the last user."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.core.driver_calls.connections import Connections
from kvferry.core.driver_calls.error_containment import as_ours
from kvferry.core.errors import ConnectError, KVFerryError, TransportError, TransportUsageError
from kvferry.core.transport import PeerId

A, B, C = b"a", b"b", b"c"
STILL_COPYING = TransportError("still copying")


class Links:
    """``Connections``, and all that they use: driver, transfers, and calls that the test makes.

    An address is the name of a transport; ``a/1`` and ``a/2`` are addresses of the transport ``a``.

    Attributes:
        error: what ``disconnect`` raises.
        refused: what ``connect`` raises, by address.
    """

    are_ending = False

    def __init__(self) -> None:
        self.queued: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.made: list[tuple[Callable[[Any], None], Any]] = []
        self.disconnecting: set[PeerId] = set()
        self.ended: list[tuple[PeerId, bool]] = []
        self.dialled: list[bytes] = []
        self.disconnected: list[PeerId] = []
        self.connected: dict[bytes, PeerId] = {}
        self.error: Exception | None = None
        self.refused: dict[bytes, Exception] = {}
        self.now = 0.0
        parts: Any = self
        self.connections = Connections(parts, parts, parts, lambda: self.now)

    # As transfers.

    def begin_disconnect(self, peer: PeerId) -> None:
        self.disconnecting.add(peer)

    def end_disconnect(self, peer: PeerId, *, closed: bool) -> None:
        self.disconnecting.discard(peer)
        self.ended.append((peer, closed))

    # As the driver.

    def connect(self, address: bytes) -> PeerId:
        self.dialled.append(address)
        if address in self.refused:
            raise self.refused[address]
        name = address.partition(b"/")[0]
        made = len({*self.connected.values(), *self.disconnected}) + 1
        return self.connected.setdefault(name, PeerId(made))

    def disconnect(self, peer: PeerId) -> None:
        assert peer in self.disconnecting, "its transfers must not be named meanwhile"
        self.disconnected.append(peer)
        if self.error is None or isinstance(self.error, TransportUsageError):
            self.connected = {name: each for name, each in self.connected.items() if each != peer}
        if self.error is not None:
            raise self.error

    # As blocking calls.

    def run(self, call: Callable[[], Any], over: Callable[[Any], None]) -> None:
        self.queued.append((call, over))

    def make_call(self, index: int = 0) -> None:
        """Make a call that waits; the endpoint's thread does not know its outcome yet."""
        call, over = self.queued.pop(index)
        try:
            outcome = call()
        except Exception as exc:  # noqa: BLE001
            outcome = as_ours(exc)
        self.made.append((over, outcome))

    def tell(self, index: int = 0) -> None:
        """Tell the endpoint's thread the outcome of a call."""
        over, outcome = self.made.pop(index)
        over(outcome)

    # As the test.

    def acquire(self, *addresses: bytes, engine: str = "e") -> list[Any]:
        """Return a list with rank to connection, or the error."""
        result: list[Any] = []
        self.connections.acquire(dict(enumerate(addresses)), engine, result.append)
        self.settle()
        return result

    def release(self, *peers: int) -> None:
        for peer in peers:
            self.connections.release(PeerId(peer))
        self.settle()

    def settle(self) -> None:
        while self.queued or self.made:
            if self.queued:
                self.make_call()
            self.tell()


@pytest.fixture
def links() -> Links:
    return Links()


def test_the_driver_gets_every_address_of_a_transport(links: Links) -> None:
    """It knows the regions that the last one lists."""
    for address in (A, b"a/1", b"a/2", b"a/1"):
        assert links.acquire(address) == [{0: 1}]
    assert links.dialled == [A, b"a/1", b"a/2", b"a/1"]
    links.connections.close(PeerId(1))
    links.release(1, 1, 1, 1)
    assert links.disconnected == [1], "it is closed once"


def test_an_engine_of_which_a_rank_cannot_be_connected_keeps_no_connection(links: Links) -> None:
    links.refused[B] = ConnectError("nobody there")
    links.acquire(A)
    [error] = links.acquire(A, C, B)
    assert str(error) == "cannot connect to rank 2 of engine e: nobody there"
    assert isinstance(error, ConnectError)
    assert links.disconnected == [2], "the connection without other users"
    [error] = links.acquire(b"c/0", b"c/1")
    assert "rank 1 of engine e: it is the transport of rank 0" in str(error)
    assert links.disconnected == [2, 3]
    links.are_ending = True
    links.dialled.clear()
    [error] = links.acquire(A)
    assert "the endpoint is closed" in str(error)
    assert links.dialled == []


def test_a_disconnect_that_fails_is_reported_and_repeated_at_growing_intervals(
    links: Links, caplog: pytest.LogCaptureFixture
) -> None:
    connections = links.connections
    links.acquire(A, engine="first")
    links.acquire(B)
    links.error = STILL_COPYING
    links.release(1)
    tries = []
    for now in range(200):
        known = len(links.disconnected)
        links.now = float(now)
        connections.progress(links.now)
        links.settle()
        assert not links.disconnecting, "its transfers would never be polled again"
        if len(links.disconnected) > known:
            tries.append(now)
    assert tries == [2, 6, 14, 30, 62, 122, 182]
    assert (connections.not_quiesced, connections.closing) == (1, 1)
    assert [connections.has_not_quiesced(PeerId(each)) for each in (1, 2, 99)] == [1, 0, 0]
    assert set(links.ended) == {(1, False)}
    [error] = links.acquire(A, engine="second")
    assert "second: the last connection to it does not fall silent" in str(error)
    links.error = None
    connections.progress(300.0)
    links.settle()
    assert (connections.closing, connections.not_quiesced) == (0, 0)
    assert not connections.has_not_quiesced(PeerId(1))
    assert links.ended[-1] == (1, True)
    assert links.acquire(A) == [{0: 3}]
    [record] = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "to first, did not fall silent (stage disconnect, cause transport)" in record.message


# Any order of events.


class ConnectionsStateMachine(RuleBasedStateMachine):
    """Acquisitions, releases, losses, calls of the driver and their outcomes come in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.links = Links()
        self.connections = self.links.connections
        self.held: list[dict[int, PeerId]] = []
        self.expected = self.answered = 0

    def _on_acquired(self, result: dict[int, PeerId] | KVFerryError) -> None:
        self.answered += 1
        if isinstance(result, dict):
            assert all(self.connections.is_open(peer) for peer in result.values())
            assert len(set(result.values())) == len(result)
            self.held.append(result)

    @rule(addresses=st.lists(st.sampled_from([A, B, b"a/1", b"a/2"]), min_size=1, max_size=3))
    def acquire(self, addresses: list[bytes]) -> None:
        self.expected += 1
        self.connections.acquire(dict(enumerate(addresses)), "e", self._on_acquired)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self._release(data.draw(st.sampled_from(self.held)))

    def _release(self, held: dict[int, PeerId]) -> None:
        self.held.remove(held)
        for peer in held.values():
            self.connections.release(peer)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """Release all acquisitions that use a connection, and close it."""
        peer = next(iter(data.draw(st.sampled_from(self.held)).values()))
        for held in [held for held in self.held if peer in held.values()]:
            self._release(held)
        self.connections.close(peer)

    @precondition(lambda self: self.links.queued)
    @rule(data=st.data())
    def make_call(self, data: st.DataObject) -> None:
        self.links.make_call(data.draw(st.integers(0, len(self.links.queued) - 1)))

    @precondition(lambda self: self.links.made)
    @rule(data=st.data())
    def tell(self, data: st.DataObject) -> None:
        self.links.tell(data.draw(st.integers(0, len(self.links.made) - 1)))

    @rule(error=st.sampled_from([None, STILL_COPYING, TransportUsageError("no such peer")]))
    def set_driver_errors(self, error: Exception | None) -> None:
        self.links.refused = {B: ConnectError("nobody there")} if error else {}
        self.links.error = error

    @rule()
    def time_passes(self) -> None:
        self.links.now += 100.0
        self.connections.progress(self.links.now)

    @invariant()
    def acquired_connections_are_open(self) -> None:
        for held in self.held:
            assert all(self.connections.is_open(peer) for peer in held.values())
            assert set(held.values()) <= set(self.links.connected.values())

    def teardown(self) -> None:
        self.set_driver_errors(error=None)
        for _ in range(100):
            while self.held:
                self._release(self.held[-1])
            self.links.settle()
            self.time_passes()
        assert self.answered == self.expected
        assert not self.links.connected
        assert (self.connections.closing, self.connections.not_quiesced) == (0, 0)
        assert max(Counter(p for p, c in self.links.ended if c).values(), default=1) == 1


TestConnectionsStateMachine = ConnectionsStateMachine.TestCase
TestConnectionsStateMachine.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None
)
