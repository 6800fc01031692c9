"""``Connections``: engines share them; they are opened once and closed by the last user."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.core.driver_calls.connections import BlockingCalls, Connections
from kvferry.core.driver_calls.error_containment import as_ours
from kvferry.core.errors import ConnectError, KVFerryError, TransportError, TransportUsageError
from kvferry.core.transport import PeerId

LONG = 30.0
A, B, C = b"a", b"b", b"c"


class Driver:
    """The methods of a transport and of ``Transfers`` that connections use.

    An address is the name of a transport; ``a/1`` and ``a/2`` are addresses of the transport ``a``.
    """

    def __init__(self) -> None:
        self.disconnecting: set[PeerId] = set()
        self.ended: list[tuple[PeerId, bool]] = []
        self.dialled: list[bytes] = []
        self.disconnected: list[PeerId] = []
        self.connected: dict[bytes, PeerId] = {}
        self.error: Exception | None = None
        self.refused: dict[bytes, object] = {}
        self.now = 0.0
        self._ids = 0

    def begin_disconnect(self, peer: PeerId) -> None:
        self.disconnecting.add(peer)

    def end_disconnect(self, peer: PeerId, *, closed: bool) -> None:
        self.disconnecting.discard(peer)
        self.ended.append((peer, closed))

    def connect(self, address: bytes) -> Any:
        self.dialled.append(address)
        refusal = self.refused.get(address)
        if isinstance(refusal, Exception):
            raise refusal
        if refusal is not None:
            return refusal
        name = address.partition(b"/")[0]
        if name not in self.connected:
            self._ids += 1
            self.connected[name] = PeerId(self._ids)
        return self.connected[name]

    def disconnect(self, peer: PeerId) -> None:
        assert peer in self.disconnecting, "its transfers must not be named meanwhile"
        self.disconnected.append(peer)
        if self.error is not None:
            raise self.error
        [name] = [name for name, each in self.connected.items() if each == peer]
        del self.connected[name]

    def clock(self) -> float:
        return self.now


class ManualCalls:
    """Blocking calls that run when the test says so."""

    are_ending = False

    def __init__(self) -> None:
        self.queued: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []

    def run(self, call: Callable[[], Any], over: Callable[[Any], None]) -> None:
        self.queued.append((call, over))

    def run_next(self, index: int = 0) -> None:
        call, over = self.queued.pop(index)
        try:
            outcome = call()
        except Exception as exc:  # noqa: BLE001
            outcome = as_ours(exc)
        over(outcome)


class Commands:
    """The endpoint's thread: runs what is posted, one command after the other."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()

    def __call__(self, command: Callable[[], None]) -> None:
        self._queue.append(command)
        if len(self._queue) == 1:
            while self._queue:
                self._queue[0]()
                self._queue.popleft()


class Acquired:
    def __init__(self) -> None:
        self.ids: list[dict[int, PeerId]] = []
        self.errors: list[KVFerryError] = []

    @property
    def peer(self) -> PeerId:
        """The first connection of the first acquisition, which succeeded."""
        return self.ids[0][0]

    def __call__(self, result: dict[int, PeerId] | KVFerryError) -> None:
        if isinstance(result, KVFerryError):
            self.errors.append(result)
        else:
            self.ids.append(result)


class Links:
    """``Connections`` over a driver of the test's, whose calls run at once or as the test says."""

    def __init__(self, *, manual: bool = False, driver: Driver | None = None) -> None:
        self.driver, self.calls = driver or Driver(), ManualCalls()
        self.connections = self.make(self.calls if manual else None)

    def make(self, calls: Any) -> Connections:
        clock = self.driver.clock
        at_once = BlockingCalls(threads=False, post=Commands(), clock=clock)
        return Connections(self.driver, self.driver, calls or at_once, clock)  # type: ignore[arg-type]

    def acquire(self, *addresses: bytes, engine: str = "e") -> Acquired:
        return self.acquire_ranks(dict(enumerate(addresses)), engine)

    def acquire_ranks(self, addresses: dict[int, bytes], engine: str = "e") -> Acquired:
        acquired = Acquired()
        self.connections.acquire(addresses, engine, acquired)
        return acquired


@pytest.fixture
def links() -> Links:
    return Links()


@pytest.fixture
def manual() -> Links:
    return Links(manual=True)


def test_a_connection_is_opened_once_and_closed_by_its_last_user(links: Links) -> None:
    one, other = links.acquire(A, engine="one").peer, links.acquire(A, engine="other").peer
    assert one == other
    links.connections.release(one)
    assert links.driver.disconnected == []
    assert links.connections.is_open(one)
    links.connections.release(other)
    links.connections.release(other)
    links.connections.close(other)
    assert links.driver.disconnected == [other], "it is closed once"
    again = links.acquire(A).peer
    assert again != one
    links.driver.error = TransportUsageError("no such peer")
    links.connections.release(again)
    assert (links.connections.closing, links.connections.not_quiesced) == (0, 0)


def test_if_one_rank_cannot_be_connected_the_engines_other_connections_are_closed(
    links: Links,
) -> None:
    links.driver.refused[B] = ConnectError("nobody there")
    shared = links.acquire(A).peer
    [error] = links.acquire_ranks({0: A, 3: C, 5: B}).errors
    assert str(error) == "cannot connect to rank 5 of engine e: nobody there"
    assert isinstance(error, ConnectError)
    assert links.driver.disconnected == [PeerId(2)], "the connection without other users"
    assert links.connections.is_open(shared)
    links.connections.release(shared)
    assert links.driver.disconnected == [PeerId(2), shared]


def test_another_address_of_the_same_transport_refreshes_its_connection(links: Links) -> None:
    """The driver knows the regions that the last address of a transport lists."""
    peers = [links.acquire(each).peer for each in (b"a/1", b"a/2", b"a/2", b"a/1")]
    first = peers[0]
    assert peers == [first] * 4
    assert links.driver.dialled == [b"a/1", b"a/2", b"a/2", b"a/1"]
    for _ in range(3):
        links.connections.release(first)
    assert not links.driver.disconnected
    links.connections.release(first)
    assert links.driver.disconnected == [first]


def test_two_ranks_of_one_engine_on_one_transport_are_refused(links: Links) -> None:
    """Their addresses differ; equal ones are refused by the handshake."""
    [error] = links.acquire(b"a/0", b"a/1").errors
    assert "rank 1 of engine e: it is the transport of rank 0" in str(error)
    assert links.driver.disconnected == [PeerId(1)]


def test_no_further_rank_is_connected_once_the_endpoint_is_closing(links: Links) -> None:
    calls = BlockingCalls(threads=False, post=Commands(), clock=links.driver.clock)
    links.connections = links.make(calls)
    assert calls.wait(0.0)
    [error] = links.acquire(A).errors
    assert "the endpoint is closed" in str(error)
    assert links.driver.dialled == []


# Concurrent acquisitions.


def test_two_engines_that_connect_at_once_share_connections(manual: Links) -> None:
    one, other = manual.acquire(A, engine="one"), manual.acquire(A, B, engine="other")
    manual.calls.run_next()
    assert one.ids == [{0: 1}]
    manual.connections.release(PeerId(1))
    manual.calls.run_next()  # of the other; the connection is about to be closed
    while manual.calls.queued:
        manual.calls.run_next()
    assert other.ids == [{0: 3, 1: 2}], "it is connected again"


def test_a_connection_that_was_closed_while_others_were_made_is_made_again() -> None:
    class Slow(Driver):
        """Closes the first connection after it has connected to the second transport."""

        def connect(self, address: bytes) -> Any:
            made = super().connect(address)
            if address == B and A in self.connected and self.dialled.count(A) == 1:
                links.connections.release(one.peer)
            return made

    links = Links(driver=Slow())
    one = links.acquire(A, engine="one")
    links.driver.dialled.clear()
    other = links.acquire(A, B, engine="other")
    assert other.ids == [{0: 3, 1: 2}]


# Disconnects that fail or take long.


def test_a_disconnect_that_fails_is_reported_and_repeated_at_growing_intervals(
    links: Links, caplog: pytest.LogCaptureFixture
) -> None:
    driver, connections = links.driver, links.connections
    peer, other = links.acquire(A, engine="first").peer, links.acquire(B).peer
    driver.error = TransportError("still copying")
    connections.release(peer)
    tries = []
    for now in range(200):
        known = len(driver.disconnected)
        driver.now = float(now)
        connections.progress(driver.now)
        assert not driver.disconnecting, "its transfers would never be polled again"
        if len(driver.disconnected) > known:
            tries.append(now)
    assert (connections.not_quiesced, connections.closing) == (1, 1)
    quiesced = [not connections.has_not_quiesced(each) for each in (peer, other, PeerId(99))]
    assert quiesced == [False, True, True]
    assert tries == [2, 6, 14, 30, 62, 122, 182]
    assert set(driver.ended) == {(peer, False)}
    [error] = links.acquire(A, engine="second").errors
    assert "second: the last connection to it does not fall silent" in str(error)
    driver.error = None
    connections.progress(300.0)
    assert (connections.closing, connections.not_quiesced) == (0, 0)
    assert not connections.has_not_quiesced(peer)
    assert driver.ended[-1] == (peer, True)
    assert links.acquire(A).peer != peer
    [record] = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "to first, did not fall silent (stage disconnect, cause transport)" in record.message


def test_acquisitions_that_wait_for_a_disconnect_fail_if_it_fails(manual: Links) -> None:
    manual.acquire(A)
    manual.calls.run_next()
    manual.driver.error = TransportError("still copying")
    manual.connections.release(PeerId(1))
    waiting = [manual.acquire(A, engine="f"), manual.acquire(b"a/2", engine="g")]
    manual.calls.run_next(1)  # g: returns what is about to be closed, and is dialled again
    assert not any(each.errors for each in waiting)
    while manual.calls.queued:
        manual.calls.run_next()
    for each in waiting:
        assert ["does not fall silent" in str(error) for error in each.errors] == [True]
        assert not each.ids


# Any order of events.

ADDRESSES = [A, B, b"a/1", b"a/2"]


class ConnectionsStateMachine(RuleBasedStateMachine):
    """Acquisitions, releases, losses and answers of the driver come in any order."""

    def __init__(self) -> None:
        super().__init__()
        links = Links(manual=True)
        self.driver, self.calls, self.connections = links.driver, links.calls, links.connections
        self.held: list[dict[int, PeerId]] = []
        self.expected = 0
        self.answered = 0

    def _on_acquired(self, result: dict[int, PeerId] | KVFerryError) -> None:
        self.answered += 1
        if isinstance(result, dict):
            assert all(self.connections.is_open(peer) for peer in result.values())
            assert len(set(result.values())) == len(result)
            self.held.append(result)

    @rule(addresses=st.lists(st.sampled_from(ADDRESSES), min_size=1, max_size=3))
    def acquire(self, addresses: list[bytes]) -> None:
        self.expected += 1
        self.connections.acquire(dict(enumerate(addresses)), "e", self._on_acquired)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        for peer in held.values():
            self.connections.release(peer)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """Release all acquisitions that use a connection, and close it."""
        peer = next(iter(data.draw(st.sampled_from(self.held)).values()))
        gone = [held for held in self.held if peer in held.values()]
        self.held = [held for held in self.held if held not in gone]
        for held in gone:
            for each in held.values():
                self.connections.release(each)
        self.connections.close(peer)

    @precondition(lambda self: self.calls.queued)
    @rule(data=st.data())
    def run_call(self, data: st.DataObject) -> None:
        self.calls.run_next(data.draw(st.integers(0, len(self.calls.queued) - 1)))

    @rule(fails=st.booleans())
    def set_driver_errors(self, fails: bool) -> None:
        self.driver.refused = {B: ConnectError("nobody there")} if fails else {}
        self.driver.error = TransportError("still copying") if fails else None

    @rule()
    def time_passes(self) -> None:
        self.driver.now += 100.0
        self.connections.progress(self.driver.now)

    @invariant()
    def acquired_connections_are_open(self) -> None:
        for held in self.held:
            assert all(self.connections.is_open(peer) for peer in held.values())
            assert set(held.values()) <= set(self.driver.connected.values())

    def teardown(self) -> None:
        self.set_driver_errors(fails=False)
        for _ in range(100):
            while self.held:
                for peer in self.held.pop().values():
                    self.connections.release(peer)
            while self.calls.queued:
                self.calls.run_next()
            self.time_passes()
        assert self.answered == self.expected
        assert not self.driver.connected
        assert (self.connections.closing, self.connections.not_quiesced) == (0, 0)
        assert max(Counter(p for p, c in self.driver.ended if c).values(), default=1) == 1


TestConnectionsStateMachine = ConnectionsStateMachine.TestCase
TestConnectionsStateMachine.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None
)
