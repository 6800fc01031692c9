"""FaultyTransport: each fault has its stated effect and no other, and is repeated by its seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import ConnectError, PeerLostError, TransportUsageError
from kvferry.core.transport import Quiescence, State, TransferId
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing import Fault, FaultyTransport, Schedule
from tests.drivers.pairs import Pair, paired, received

HALF = 1024
HALVES = [(0, 0, HALF), (HALF, HALF, HALF)]

FaultyPair = Pair[FaultyTransport, LoopbackTransport]
Make = Callable[..., FaultyPair]


@pytest.fixture
def make() -> Iterator[Make]:
    """Return a function that makes a pair, by default without faults."""
    with ExitStack() as stack:

        def make_pair(schedule: Schedule | None = None, **options: object) -> FaultyPair:
            reader = FaultyTransport(LoopbackTransport(), schedule, **options)  # type: ignore[arg-type]
            made = paired(reader, LoopbackTransport(), 2 * HALF)
            stack.callback(made.other.close)
            stack.callback(made.reader.close)
            return made

        yield make_pair


@pytest.fixture
def pair(request: pytest.FixtureRequest, make: Make) -> FaultyPair:
    """A pair whose first call has the fault that the test is parametrized with."""
    return make(Schedule(at={0: request.param}, polls=3))


def begin(pair: FaultyPair, notify: bytes | None = b"done") -> TransferId:
    """Begin to read both halves."""
    return pair.read(HALVES, notify)


def states(pair: FaultyPair, transfer: TransferId, polls: int) -> list[State]:
    return [pair.status(transfer).state for _ in range(polls)]


def moved(pair: FaultyPair) -> list[bool]:
    """Return whether each half has moved."""
    same = pair.mine == pair.theirs
    return [bool(same[:HALF].all()), bool(same[HALF:].all())]


P, D, DONE, FAILED = State.PENDING, State.FAILING, State.DONE, State.FAILED


@pytest.mark.parametrize(
    ("pair", "seen", "halves", "arrives"),
    [
        (Fault.DELAY, [P, P, P, DONE, DONE], [True, True], True),
        (Fault.FAIL, [FAILED, FAILED], [False, False], False),
        (Fault.TRUNCATE, [FAILED, FAILED], [True, False], False),
        (Fault.DOOM, [D, D, D, FAILED, FAILED], [True, True], False),
        (Fault.DROP, [DONE, DONE], [True, True], False),
    ],
    indirect=["pair"],
)
def test_fault_of_a_transfer(
    pair: FaultyPair, seen: list[State], halves: list[bool], arrives: bool
) -> None:
    transfer = begin(pair)
    if seen[0] in (P, D):
        with pytest.raises(TransportUsageError, match="not final"):
            pair.reader.forget(transfer)
        with pytest.raises(TransportUsageError, match="still uses"):
            pair.reader.deregister(pair.local)
    assert states(pair, transfer, len(seen)) == seen
    assert moved(pair) == halves
    pair.reader.notify(pair.peer, b"next")
    wanted = [b"done", b"next"] if arrives else [b"next"]
    assert received(pair.other, len(wanted)) == wanted
    pair.reader.forget(transfer)
    assert states(pair, begin(pair), 1) == [DONE]
    pair.reader.deregister(pair.local)


def test_failing_transfer_fails_after_disconnect(make: Make) -> None:
    pair = make(Schedule(at={0: Fault.DOOM}), quiescence=Quiescence.AFTER_DISCONNECT)
    assert pair.reader.capabilities.quiescence is Quiescence.AFTER_DISCONNECT
    transfer = begin(pair)
    assert states(pair, transfer, 2) == [D, D]
    pair.reader.disconnect(pair.peer)
    assert states(pair, transfer, 1) == [FAILED]


@pytest.mark.parametrize("pair", [Fault.DIE], indirect=True)
def test_dead_transport_is_lost_to_both_sides(pair: FaultyPair) -> None:
    address = pair.reader.address()
    transfer = begin(pair)
    status = pair.status(transfer)
    assert isinstance(status.error, PeerLostError)
    pair.reader.notify(pair.peer, b"not sent")
    assert pair.other.notifications() == []
    assert pair.reader.address() == address
    for side, to in ((pair.reader, pair.other.address()), (pair.other, address)):
        with pytest.raises(ConnectError):
            side.connect(to)
    pair.reader.disconnect(pair.peer)
    pair.reader.forget(transfer)
    pair.reader.close()
    with pytest.raises(TransportUsageError, match="closed"):
        pair.reader.address()


def test_death_fails_unfinished_transfers_only(make: Make) -> None:
    pair = make(Schedule(at={1: Fault.DELAY}))
    done = begin(pair)
    assert states(pair, done, 1) == [DONE]
    unfinished = begin(pair)
    pair.reader.die()
    assert [one.state for one in pair.reader.poll([done, unfinished])] == [DONE, FAILED]


@pytest.mark.parametrize("pair", [Fault.DELAY, Fault.FAIL, Fault.DOOM, Fault.DROP], indirect=True)
def test_usage_errors_are_raised_despite_faults(pair: FaultyPair) -> None:
    with pytest.raises(TransportUsageError):
        begin(pair, b"")
    pair.reader.deregister(pair.local)
    with pytest.raises(TransportUsageError):
        begin(pair)


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
