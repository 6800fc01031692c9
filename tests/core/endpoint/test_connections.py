"""Connections that engines share: opened once, closed by the last, awaited by nobody else."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.core.endpoint import connections as module
from kvferry.core.endpoint.connections import BlockingCalls, Connections
from kvferry.core.errors import ConnectError, KVFerryError, TransportError, TransportUsageError
from kvferry.core.transport import PeerId
from tests.core.endpoint.engines import Clock

LONG = 30.0
A, B, C = b"a", b"b", b"c"


class Driver:
    """A transport and its transfers, as far as connections see them.

    An address is a transport's name; what follows a slash are other bytes of the same transport.
    """

    def __init__(self) -> None:
        self.leaving: set[PeerId] = set()
        self.left_as: list[tuple[PeerId, bool]] = []
        self.dialled: list[bytes] = []
        self.disconnected: list[PeerId] = []
        self.connected: dict[bytes, PeerId] = {}
        self.error: Exception | None = None
        self.refused: dict[bytes, object] = {}
        self.now = 0.0
        self._ids = 0

    def begin_disconnect(self, peer: PeerId) -> None:
        self.leaving.add(peer)

    def end_disconnect(self, peer: PeerId, *, closed: bool) -> None:
        self.leaving.discard(peer)
        self.left_as.append((peer, closed))

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
        assert peer in self.leaving, "its transfers may be named meanwhile"
        self.disconnected.append(peer)
        if self.error is not None:
            raise self.error
        [name] = [name for name, each in self.connected.items() if each == peer]
        del self.connected[name]

    def clock(self) -> float:
        return self.now


class Calls:
    """Calls beside the endpoint's thread that return when the test says so, in its order."""

    def __init__(self) -> None:
        self.made: deque[Callable[[], None]] = deque()

    def run(self, call: Callable[[], Any], over: Callable[[Any], None]) -> None:
        def both() -> None:
            try:
                outcome = call()
            except Exception as exc:  # noqa: BLE001
                outcome = exc
            over(outcome)

        self.made.append(both)

    def go(self, index: int = 0) -> None:
        self.made.rotate(-index)
        self.made.popleft()()
        self.made.rotate(index)


class Call:
    """One that has its answer before the endpoint hears of it: driver and endpoint race."""

    def __init__(self) -> None:
        self.made: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.answered: list[Callable[[], None]] = []

    def run(self, call: Callable[[], Any], over: Callable[[Any], None]) -> None:
        self.made.append((call, over))

    def answer(self) -> None:
        call, over = self.made.pop(0)
        outcome = call()
        self.answered.append(lambda: over(outcome))


class Got:
    """What acquisitions gave."""

    def __init__(self) -> None:
        self.ids: list[dict[int, PeerId]] = []
        self.errors: list[KVFerryError] = []

    def __call__(self, made: dict[int, PeerId] | KVFerryError) -> None:
        if isinstance(made, KVFerryError):
            self.errors.append(made)
        else:
            self.ids.append(made)


def connections(driver: Any, calls: Any = None) -> Connections:
    at_once = BlockingCalls(threads=False, post=lambda _: None, clock=driver.clock)
    return Connections(driver, driver, calls or at_once, driver.clock)


def acquire(table: Connections, *addresses: bytes, engine: str = "e") -> PeerId:
    """One engine's connections, of which the first is returned."""
    got = Got()
    table.acquire(dict(enumerate(addresses)), engine, got)
    assert not got.errors
    return got.ids[0][0]


@pytest.mark.parametrize("error", [None, TransportUsageError("no such peer")])
def test_a_connection_without_users_is_closed_at_once(error: Exception | None) -> None:
    driver = Driver()
    table = connections(driver)
    peer = acquire(table, A)
    assert table.is_open(peer)
    assert (table.closing, table.not_quiesced) == (0, 0)
    driver.error = error
    table.release(peer)
    assert driver.disconnected == [peer]
    assert driver.left_as == [(peer, True)]
    assert (table.closing, table.not_quiesced, table.is_open(peer)) == (0, 0, False)
    assert not driver.leaving


def test_a_connection_is_opened_once_and_closed_by_the_last_user() -> None:
    driver = Driver()
    table = connections(driver)
    one, other = acquire(table, A, engine="one"), acquire(table, A, engine="other")
    assert one == other
    assert driver.dialled == [A]
    table.release(one)
    assert driver.disconnected == []
    assert table.is_open(one)
    table.release(other)
    assert driver.disconnected == [other]
    table.release(other)
    table.close(other)
    assert driver.disconnected == [other], "closed twice"
    assert acquire(table, A) != one


def test_an_engine_has_the_connections_of_all_its_ranks_in_their_order() -> None:
    driver, got = Driver(), Got()
    table = connections(driver)
    table.acquire({7: B, 2: A, 9: C}, "e", got)
    assert driver.dialled == [A, B, C]
    assert got.ids == [{2: 1, 7: 2, 9: 3}]


def test_of_an_engine_that_cannot_be_connected_whole_nothing_is_left() -> None:
    driver, got = Driver(), Got()
    driver.refused[B] = ConnectError("nobody there")
    table = connections(driver)
    shared = acquire(table, A)
    table.acquire({0: A, 3: C, 5: B}, "e", got)
    [error] = got.errors
    assert str(error) == "cannot connect to rank 5 of engine e: nobody there"
    assert isinstance(error, ConnectError)
    assert driver.disconnected == [PeerId(2)], "the one that nobody else uses"
    assert table.is_open(shared)
    table.release(shared)
    assert driver.disconnected == [PeerId(2), shared]


def test_other_bytes_of_one_transport_are_one_connection_and_refresh_it() -> None:
    """The driver knows a transport's regions by what it was dialled with last."""
    driver = Driver()
    table = connections(driver)
    first = acquire(table, b"a/1")
    assert [acquire(table, b"a/2"), acquire(table, b"a/2"), acquire(table, b"a/1")] == [first] * 3
    assert driver.dialled == [b"a/1", b"a/2", b"a/1"]
    for _ in range(3):
        table.release(first)
    assert not driver.disconnected
    table.release(first)
    assert driver.disconnected == [first]
    acquire(table, b"a/1")
    acquire(table, b"a/1")
    assert driver.dialled[3:] == [b"a/1"]


def test_two_ranks_that_are_one_transport_are_refused() -> None:
    """Their addresses differ, or the handshake would have said so."""
    driver, got = Driver(), Got()
    table = connections(driver)
    table.acquire({0: b"a/0", 1: b"a/1"}, "e", got)
    assert "rank 1 of engine e: it is the transport of rank 0" in str(got.errors[0])
    assert driver.disconnected == [PeerId(1)]


@pytest.mark.parametrize("nonsense", ["peer", b"peer", 1.5, [1]])
def test_a_driver_that_returns_no_id_fails_who_waits_for_it(nonsense: object) -> None:
    driver, got = Driver(), Got()
    driver.refused[A] = nonsense
    table = connections(driver)
    table.acquire({0: A}, "e", got)
    assert "which is no id" in str(got.errors[0])


def test_as_many_ranks_as_there_may_be_in_a_driver_without_threads() -> None:
    driver, got = Driver(), Got()
    connections(driver).acquire({rank: b"%d" % rank for rank in range(4096)}, "e", got)
    assert len(got.ids[0]) == 4096


# Who waits for whom.


def test_two_engines_that_come_at_once_share_one_dial() -> None:
    driver, calls, one, other = Driver(), Calls(), Got(), Got()
    table = connections(driver, calls)
    table.acquire({0: A}, "one", one)
    table.acquire({0: A, 1: B}, "other", other)
    calls.go()
    assert one.ids == [{0: 1}]
    assert driver.dialled == [A]
    calls.go()
    assert other.ids == [{0: 1, 1: 2}]


def test_two_engines_that_come_at_once_share_a_failure() -> None:
    driver, calls, one, other = Driver(), Calls(), Got(), Got()
    driver.refused[A] = ConnectError("nobody there")
    table = connections(driver, calls)
    table.acquire({0: A}, "one", one)
    table.acquire({4: A}, "other", other)
    calls.go()
    assert "rank 0 of engine one" in str(one.errors[0])
    assert "rank 4 of engine other" in str(other.errors[0])
    assert driver.dialled == [A]


def test_an_address_that_hangs_holds_up_only_its_own_engine() -> None:
    driver, calls, squatter, honest = Driver(), Calls(), Got(), Got()
    table = connections(driver, calls)
    table.acquire({0: B, 1: A}, "squatter", squatter)
    table.acquire({0: A}, "honest", honest)
    calls.go(1)
    assert honest.ids == [{0: 1}]
    assert not squatter.ids


def test_who_comes_while_a_connection_is_closed_waits_and_gets_a_new_one() -> None:
    driver, calls, got = Driver(), Calls(), Got()
    table = connections(driver, calls)
    table.acquire({0: A}, "e", got)
    calls.go()
    table.release(PeerId(1))
    assert table.closing == 1
    table.acquire({0: A}, "f", got)
    assert len(calls.made) == 1, "it is dialled while it is disconnected"
    calls.go()
    calls.go()
    assert got.ids == [{0: 1}, {0: 2}]
    assert table.closing == 0


def test_who_dials_other_bytes_of_one_that_is_closed_waits_and_dials_again() -> None:
    driver, calls, got = Driver(), Calls(), Got()
    table = connections(driver, calls)
    table.acquire({0: b"a/1"}, "e", got)
    calls.go()
    table.release(PeerId(1))
    table.acquire({0: b"a/2"}, "f", got)
    calls.go(1)  # the driver gives the connection that it is about to close
    assert len(got.ids) == 1
    assert not got.errors
    calls.go()
    calls.go()
    assert got.ids == [{0: 1}, {0: 2}]
    assert driver.dialled == [b"a/1", b"a/2", b"a/2"]


def test_an_id_that_was_closed_since_the_driver_gave_it_is_not_used() -> None:
    driver, calls, got = Driver(), Call(), Got()
    table = connections(driver, calls)
    table.acquire({0: b"a/1"}, "e", got)
    calls.answer()
    calls.answered.pop(0)()
    table.acquire({0: b"a/2"}, "f", got)
    calls.answer()  # with the same id, of which nobody has heard yet
    table.release(PeerId(1))
    calls.answer()
    calls.answered.pop(1)()
    calls.answered.pop(0)()
    assert "closed meanwhile" in str(got.errors[0])
    table.acquire({0: b"a/2"}, "f", got)
    calls.answer()
    calls.answered.pop(0)()
    assert got.ids == [{0: 1}, {0: 2}]
    table.acquire({0: B}, "g", got)
    calls.answer()
    calls.answered.pop(0)()
    assert got.ids[2:] == [{0: 3}], "what was closed is remembered only while others are dialled"


def test_a_connection_that_is_lost_while_the_next_is_made_fails_the_engine() -> None:
    driver, calls, got = Driver(), Calls(), Got()
    table = connections(driver, calls)
    table.acquire({0: A, 1: B}, "e", got)
    calls.go()
    table.close(PeerId(1))
    calls.go(1)
    assert not got.errors
    calls.go()
    assert not got.ids
    assert "lost while the next was made" in str(got.errors[0])
    calls.go()
    assert driver.disconnected == [PeerId(1), PeerId(2)]
    assert table.closing == 0


def test_a_connection_can_be_closed_under_its_users() -> None:
    driver = Driver()
    table = connections(driver)
    peers = [acquire(table, A), acquire(table, A)]
    table.close(peers[0])
    assert driver.disconnected == peers[:1]
    fresh = acquire(table, A)
    for peer in peers:
        table.release(peer)
    assert table.is_open(fresh)
    assert driver.disconnected == peers[:1]


# Connections that do not fall silent.


def test_a_connection_that_does_not_fall_silent_is_loud_and_tried_again_ever_less(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver, got = Driver(), Got()
    table = connections(driver)
    peer, silent = acquire(table, A, engine="first"), acquire(table, B)
    driver.error = TransportError("still copying")
    table.release(peer)
    tries = []
    for now in range(200):
        known = len(driver.disconnected)
        driver.now = float(now)
        table.progress(driver.now)
        assert not driver.leaving, "its transfers are never heard of again"
        if len(driver.disconnected) > known:
            tries.append(now)
    assert (table.not_quiesced, table.closing) == (1, 1)
    assert table.has_not_quiesced(peer)
    assert not table.has_not_quiesced(silent)
    assert not table.has_not_quiesced(PeerId(99))
    assert tries == [2, 6, 14, 30, 62, 122, 182]
    assert set(driver.left_as) == {(peer, False)}
    table.acquire({0: A}, "second", got)
    assert "the last connection to second does not fall silent" in str(got.errors[0])
    driver.error = None
    table.progress(300.0)
    assert (table.closing, table.not_quiesced, table.has_not_quiesced(peer)) == (0, 0, False)
    assert driver.left_as[-1] == (peer, True)
    assert acquire(table, A) != peer
    [record] = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "to first, did not fall silent (stage disconnect, cause transport)" in record.message


def test_who_waits_for_a_connection_that_does_not_fall_silent_fails() -> None:
    driver, calls, got = Driver(), Calls(), Got()
    table = connections(driver, calls)
    table.acquire({0: A}, "e", got)
    calls.go()
    driver.error = TransportError("still copying")
    table.release(PeerId(1))
    table.acquire({0: A}, "f", got)
    table.acquire({0: b"a/2"}, "g", got)
    calls.go(1)
    assert not got.errors
    calls.go()
    assert ["does not fall silent" in str(error) for error in got.errors] == [True, True]
    assert len(got.ids) == 1


class Slow(Driver):
    """One whose ``disconnect`` of the first peer returns when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def disconnect(self, peer: PeerId) -> None:
        if peer == PeerId(1):
            assert self.let_go.wait(LONG)
        super().disconnect(peer)


def test_nobody_waits_for_a_connection_that_is_closed_slowly() -> None:
    driver, clock = Slow(), Clock()
    posted: deque[Callable[[], None]] = deque()
    came = threading.Semaphore(0)

    def post(command: Callable[[], None]) -> None:
        posted.append(command)
        came.release()

    def next_is_heard() -> None:
        assert came.acquire(timeout=LONG)
        posted.popleft()()

    calls = BlockingCalls(threads=True, post=post, clock=clock)
    table, got = connections(driver, calls), Got()
    for address in (A, B):
        table.acquire({0: address}, "e", got)
        next_is_heard()
    slow, quick = PeerId(1), PeerId(2)
    table.release(slow)
    table.release(quick)
    next_is_heard()
    assert table.closing == 1
    assert driver.leaving == {slow}
    table.progress(1000.0)
    assert driver.disconnected == [quick], "it is told twice at once"
    assert calls.stuck == 0
    clock.skip(module.STUCK_SECONDS + 1)
    assert calls.stuck == 1
    assert not calls.wait(time.monotonic())
    driver.let_go.set()
    assert calls.wait(time.monotonic() + LONG)
    next_is_heard()
    assert (table.closing, calls.stuck) == (0, 0)


# Whatever comes.

NAMES = [A, B, b"a/1", b"a/2"]


class AnyOrder(RuleBasedStateMachine):
    """Engines come and go, connections are lost, and the driver answers in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.driver, self.calls = Driver(), Calls()
        self.table = connections(self.driver, self.calls)
        self.held: list[dict[int, PeerId]] = []
        self.expected = 0
        self.answered = 0

    def _over(self, made: dict[int, PeerId] | KVFerryError) -> None:
        self.answered += 1
        if isinstance(made, dict):
            assert all(self.table.is_open(peer) for peer in made.values())
            assert len(set(made.values())) == len(made)
            self.held.append(made)

    @rule(addresses=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3))
    def comes(self, addresses: list[bytes]) -> None:
        self.expected += 1
        self.table.acquire(dict(enumerate(addresses)), "e", self._over)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def goes(self, data: st.DataObject) -> None:
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        for peer in held.values():
            self.table.release(peer)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def is_lost(self, data: st.DataObject) -> None:
        """All who use it are given up."""
        peer = next(iter(data.draw(st.sampled_from(self.held)).values()))
        gone = [held for held in self.held if peer in held.values()]
        self.held = [held for held in self.held if held not in gone]
        for held in gone:
            for each in held.values():
                self.table.release(each)
        self.table.close(peer)

    @precondition(lambda self: self.calls.made)
    @rule(data=st.data())
    def answers(self, data: st.DataObject) -> None:
        self.calls.go(data.draw(st.integers(0, len(self.calls.made) - 1)))

    @rule(fails=st.booleans())
    def breaks(self, fails: bool) -> None:
        self.driver.refused = {B: ConnectError("nobody there")} if fails else {}
        self.driver.error = TransportError("still copying") if fails else None

    @rule()
    def time_passes(self) -> None:
        self.driver.now += 100.0
        self.table.progress(self.driver.now)

    @invariant()
    def what_is_held_stands(self) -> None:
        for held in self.held:
            assert all(self.table.is_open(peer) for peer in held.values())
            assert set(held.values()) <= set(self.driver.connected.values())

    def teardown(self) -> None:
        """In the end everybody has had an answer, and nothing is left."""
        self.breaks(fails=False)
        for _ in range(100):
            while self.held:
                for peer in self.held.pop().values():
                    self.table.release(peer)
            while self.calls.made:
                self.calls.go()
            self.time_passes()
        assert self.answered == self.expected
        assert not self.driver.connected
        assert (self.table.closing, self.table.not_quiesced) == (0, 0)
        assert max(Counter(p for p, c in self.driver.left_as if c).values(), default=1) == 1


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
