"""FaultyTransport: each fault has its stated effect and no other, and is repeated by its seed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import ConnectError, PeerLostError, TransportUsageError
from kvferry.core.transport import PeerId, Quiescence, State, TransferId, Transport
from kvferry.core.transport.copies import Copies, copies_between
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing import Buffer, Fault, FaultyTransport, Schedule
from kvferry.testing.memory import allocate, pattern

HALF = 1024


@dataclass
class Pair:
    """A faulty transport and a plain one that it reads from, in two copies of HALF bytes."""

    reader: FaultyTransport
    source: Transport
    target: Buffer
    content: Buffer
    peer: PeerId

    @property
    def copies(self) -> Copies:
        near, far = self.target.region, self.content.region
        pairs = [(near.address + at, far.address + at, HALF) for at in (0, HALF)]
        return copies_between(pairs, local=near, remote=far)

    def read(self, notify: bytes | None = b"done") -> TransferId:
        return self.reader.read(self.peer, self.copies, notify)

    def states(self, transfer: TransferId, polls: int) -> list[State]:
        return [self.reader.poll([transfer])[0].state for _ in range(polls)]

    def moved(self) -> list[bool]:
        same = self.target.get() == self.content.get()
        return [bool(same[:HALF].all()), bool(same[HALF:].all())]

    def received(self, count: int = 0) -> list[bytes]:
        """Return the notifications that the source got, after waiting for at least ``count``."""
        until, received = time.monotonic() + 30, self.source.notifications()
        while len(received) < count and time.monotonic() < until:
            time.sleep(0.001)
            received += self.source.notifications()
        return [one.payload for one in received]


class Clock:
    """A clock that stands still unless a test moves it."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def make_pair(
    schedule: Schedule | None = None, quiescence: Quiescence | None = None, **pacing: Any
) -> Pair:
    reader = FaultyTransport(LoopbackTransport(), schedule, quiescence=quiescence, **pacing)
    source = LoopbackTransport()
    target, content = allocate("cpu", 2 * HALF), allocate("cpu", 2 * HALF)
    content.put(pattern(2 * HALF, 1))
    reader.register(target.region)
    source.register(content.region)
    return Pair(reader, source, target, content, reader.connect(source.address()))


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair whose first call has the fault that the test is parametrized with."""
    made = make_pair(Schedule(at={0: request.param}, polls=3))
    yield made
    made.reader.close()
    made.source.close()


def with_fault(fault: Fault) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", [fault], indirect=True)


P, D, DONE, FAILED = State.PENDING, State.FAILING, State.DONE, State.FAILED


@with_fault(Fault.DELAY)
def test_delayed_transfer_ends_as_usual(pair: Pair) -> None:
    transfer = pair.read()
    with pytest.raises(TransportUsageError, match="not final"):
        pair.reader.forget(transfer)
    with pytest.raises(TransportUsageError, match="still uses"):
        pair.reader.deregister(pair.target.region)
    assert pair.states(transfer, 5) == [P, P, P, DONE, DONE]
    assert pair.moved() == [True, True]
    assert pair.received(1) == [b"done"]
    pair.reader.forget(transfer)
    pair.reader.deregister(pair.target.region)


@with_fault(Fault.FAIL)
def test_failed_transfer_moves_nothing(pair: Pair) -> None:
    assert pair.states(pair.read(), 2) == [FAILED, FAILED]
    assert pair.moved() == [False, False]
    assert pair.received() == []
    assert pair.states(pair.read(), 1) == [DONE]


@with_fault(Fault.TRUNCATE)
def test_truncated_transfer_moves_half_of_the_copies_and_fails(pair: Pair) -> None:
    (status,) = pair.reader.poll([pair.read()])
    assert status.state is FAILED
    assert str(status.error) == "injected: truncate"
    assert pair.moved() == [True, False]
    assert pair.received() == []


@with_fault(Fault.DOOM)
def test_failing_transfer_fails_after_some_polls(pair: Pair) -> None:
    transfer = pair.read()
    assert pair.states(transfer, 5) == [D, D, D, FAILED, FAILED]
    assert pair.received() == []


def test_failing_transfer_fails_after_disconnect() -> None:
    pair = make_pair(Schedule(at={0: Fault.DOOM}), Quiescence.AFTER_DISCONNECT)
    assert pair.reader.capabilities.quiescence is Quiescence.AFTER_DISCONNECT
    transfer = pair.read()
    assert set(pair.states(transfer, 20)) == {D}
    pair.reader.disconnect(pair.peer)
    assert pair.states(transfer, 1) == [FAILED]
    pair.reader.close()
    pair.source.close()


@with_fault(Fault.DROP)
def test_dropped_notification_does_not_arrive(pair: Pair) -> None:
    assert pair.states(pair.read(), 1) == [DONE]
    assert pair.moved() == [True, True]
    pair.reader.notify(pair.peer, b"next")
    assert pair.received(1) == [b"next"]


@with_fault(Fault.LIE)
def test_lie_reports_done_with_half_of_the_bytes(pair: Pair) -> None:
    assert pair.states(pair.read(), 1) == [DONE]
    assert pair.moved() == [True, False]
    assert pair.received(1) == [b"done"]


@with_fault(Fault.DIE)
def test_dead_transport_is_lost_to_both_sides(pair: Pair) -> None:
    address = pair.reader.address()
    transfer = pair.read()
    (status,) = pair.reader.poll([transfer])
    assert isinstance(status.error, PeerLostError)
    pair.reader.notify(pair.peer, b"not sent")
    assert pair.received() == []
    assert pair.reader.address() == address
    for side, to in ((pair.reader, pair.source.address()), (pair.source, address)):
        with pytest.raises(ConnectError):
            side.connect(to)
    pair.reader.disconnect(pair.peer)
    pair.reader.forget(transfer)
    pair.reader.close()
    with pytest.raises(TransportUsageError, match="closed"):
        pair.reader.address()


def test_death_fails_unfinished_transfers_only() -> None:
    pair = make_pair(Schedule(at={1: Fault.DELAY}))
    done = pair.read()
    assert pair.states(done, 1) == [DONE]
    unfinished = pair.read()
    pair.reader.die()
    assert [one.state for one in pair.reader.poll([done, unfinished])] == [DONE, FAILED]
    pair.reader.close()
    pair.source.close()


def test_usage_errors_are_raised_despite_faults() -> None:
    for fault in (Fault.DELAY, Fault.FAIL, Fault.DOOM, Fault.DROP):
        pair = make_pair(Schedule(at={0: fault}))
        with pytest.raises(TransportUsageError):
            pair.read(notify=b"")
        pair.reader.deregister(pair.target.region)
        with pytest.raises(TransportUsageError):
            pair.read()
        pair.reader.close()
        pair.source.close()


@given(seed=st.integers(), rate=st.floats(0, 1))
def test_same_seed_gives_same_faults(seed: int, rate: float) -> None:
    one, other = Schedule(seed=seed, rate=rate), Schedule(seed=seed, rate=rate)
    faults = [one.fault(call) for call in range(50)]
    assert faults == [other.fault(call) for call in reversed(range(50))][::-1]
    assert {fault for fault in faults if fault} <= set(one.faults)


def test_rate_is_the_share_of_faulty_calls() -> None:
    assert not any(Schedule(seed=1, rate=0.0).fault(call) for call in range(100))
    assert all(Schedule(seed=1, rate=1.0).fault(call) for call in range(100))
    hits = sum(Schedule(seed=1, rate=0.3).fault(call) is not None for call in range(1000))
    assert 200 < hits < 400
    named = Schedule(seed=1, rate=1.0, at={3: Fault.DIE}, faults=(Fault.DROP,))
    assert [named.fault(call) for call in (2, 3)] == [Fault.DROP, Fault.DIE]


def test_every_faulty_transfer_is_right_or_fails() -> None:
    pair = make_pair(Schedule(seed=5, rate=0.5))
    outcomes = set()
    for _ in range(60):
        pair.target.put(np.zeros(2 * HALF, np.uint8))
        transfer = pair.read(notify=None)
        state = pair.states(transfer, 5)[-1]
        assert state.final
        outcomes.add(state)
        if state is DONE:
            assert pair.moved() == [True, True]
        pair.reader.forget(transfer)
    assert outcomes == {DONE, FAILED}
    pair.reader.close()
    pair.source.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def paced(clock: Clock) -> Iterator[Pair]:
    """A pair that reads 2 * HALF bytes, which is what ``Pair.read`` reads, in a second."""
    made = make_pair(bytes_per_second=2 * HALF, clock=clock)
    yield made
    made.reader.close()
    made.source.close()


def settled(pair: Pair, transfer: TransferId) -> State:
    """Return a transfer's state once loopback has had time to move the bytes."""
    until = time.monotonic() + 30
    while pair.moved() != [True, True] and time.monotonic() < until:
        time.sleep(0.001)
    return pair.states(transfer, 3)[-1]


def test_paced_read_ends_when_its_bytes_have_had_their_time(paced: Pair, clock: Clock) -> None:
    transfer = paced.read()
    assert settled(paced, transfer) is P
    with pytest.raises(TransportUsageError, match="not final"):
        paced.reader.forget(transfer)
    clock.seconds += 0.99
    assert paced.states(transfer, 1) == [P]
    clock.seconds += 0.02
    assert paced.states(transfer, 1) == [DONE]
    paced.reader.forget(transfer)
    paced.reader.deregister(paced.target.region)


def test_paced_reads_share_the_rate(paced: Pair, clock: Clock) -> None:
    first = paced.read()
    clock.seconds += 0.5
    second = paced.read()
    assert settled(paced, second) is P
    clock.seconds += 0.9  # of 0.5 and 1 s of bytes, 0.45 s each
    assert [status.state for status in paced.reader.poll([first, second])] == [P, P]
    clock.seconds += 0.2
    assert [status.state for status in paced.reader.poll([first, second])] == [DONE, P]
    clock.seconds += 0.45
    assert paced.states(second, 1) == [DONE]


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
def test_paced_read_that_is_given_up_ends_at_once(paced: Pair, how: str) -> None:
    transfer = paced.read()
    assert settled(paced, transfer) is P
    if how == "cancel":
        paced.reader.cancel(transfer)
    else:
        paced.reader.disconnect(paced.peer)
    assert paced.states(transfer, 1)[0].final


@pytest.mark.parametrize(
    ("fault", "meanwhile", "end"),
    [(Fault.DELAY, P, DONE), (Fault.FAIL, FAILED, FAILED), (Fault.LIE, P, DONE)],
)
def test_paced_read_may_have_a_fault(
    clock: Clock, fault: Fault, meanwhile: State, end: State
) -> None:
    pair = make_pair(Schedule(at={0: fault}), bytes_per_second=2 * HALF, clock=clock)
    transfer = pair.read()
    until = time.monotonic() + 30
    while pair.states(transfer, 9)[-1] is not meanwhile and time.monotonic() < until:
        time.sleep(0.001)
    assert pair.states(transfer, 9)[-1] is meanwhile
    clock.seconds += 1.1
    assert pair.states(transfer, 9)[-1] is end
    pair.reader.close()
    pair.source.close()
