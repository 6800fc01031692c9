"""``Transfers``: reads are queued, posted within limits, cancelled, failing and disconnected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.core.driver_calls import transfers as module
from kvferry.core.driver_calls.error_containment import ErrorContainment
from kvferry.core.driver_calls.slow_path import Throughput
from kvferry.core.driver_calls.transfers import CANCEL_SECONDS, Read, Transfers
from kvferry.core.errors import (
    KVFerryError,
    PageError,
    StatusUnknownError,
    TransferCancelledError,
    TransportError,
)
from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.core.transport.copies import Copies, copies_between
from tests.core.endpoint.transports import DONE, PENDING, failed, failing

ONE, OTHER = PeerId(1), PeerId(2)
HERE, THERE = Region(address=1 << 20, nbytes=1 << 30), Region(address=1 << 40, nbytes=1 << 30)
CANCELLED = failed(TransferCancelledError("cancelled"))


@pytest.fixture(autouse=True)
def posting_is_never_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the number of reads that one ``progress`` posts independent of the machine's load."""
    monkeypatch.setattr(module, "LONG_SECONDS", 1e9)


class Harness:
    """``Transfers`` whose reads have names, on a clock and a driver of the test's.

    It is the driver itself, whose transfers are numbered from 1.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.capabilities, self.max_outstanding = self, limit
        self.now = 100.0
        self.transfers = Transfers(self, ErrorContainment(), lambda: self.now)  # type: ignore[arg-type]
        self.reads: dict[str, Read] = {}
        self.posted: list[tuple[PeerId, int, bytes | None]] = []
        self.statuses: dict[TransferId, Status] = {}
        self.cancelled: list[int] = []
        self.unknown_status: set[int] = set()
        self.polls: list[list[TransferId]] = []
        self.poll_result: Any = None
        """If not ``None``, what ``poll`` returns instead of a list of statuses."""
        self.outcomes: dict[str, KVFerryError | None] = {}
        self.failing: dict[str, KVFerryError] = {}
        self.failed: list[KVFerryError] = []
        self.transfers.failing = self._on_failing
        self.transfers.failed = lambda _, error: self.failed.append(error)

    @property
    def sizes(self) -> list[int]:
        return [nbytes for _, nbytes, _ in self.posted]

    @property
    def finished(self) -> list[str]:
        return list(self.outcomes)

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None) -> TransferId:
        self.posted.append((peer, copies.total, notify))
        transfer = TransferId(len(self.posted))
        self.statuses[transfer] = PENDING
        return transfer

    def poll(self, ids: Sequence[TransferId]) -> list[Status]:
        self.polls.append(list(ids))
        if self.unknown_status.intersection(ids):
            raise ZeroDivisionError
        if self.poll_result is not None:
            return self.poll_result  # type: ignore[no-any-return]
        return [self.statuses[each] for each in ids]

    def cancel(self, transfer: TransferId) -> None:
        assert transfer in self.statuses
        self.cancelled.append(transfer)

    def forget(self, transfer: TransferId) -> None:
        del self.statuses[transfer]

    def add(
        self,
        name: str,
        peer: PeerId = ONE,
        *,
        nbytes: int = 8,
        tags: Sequence[str] = (),
        build: Callable[[], Copies] | None = None,
        **how: Any,
    ) -> Read:
        def ended(error: KVFerryError | None) -> None:
            assert name not in self.outcomes, "called once"
            self.outcomes[name] = error

        read = Read(
            connection=peer,
            build=build or (lambda: copies(nbytes)),
            landed=lambda _: ended(None),
            lost=ended,
            tags={*tags, name},
            **how,
        )
        self.reads[name] = read
        self.transfers.add(read)
        return read

    def end(self, *numbers: int, status: Status = DONE) -> bool:
        """Give a status to transfers, and make progress."""
        self.statuses.update({TransferId(number): status for number in numbers})
        return self.transfers.progress()

    def _on_failing(self, read: Read, error: KVFerryError) -> None:
        [name] = [name for name, each in self.reads.items() if each is read]
        assert name not in self.failing, "called once"
        assert name not in self.outcomes
        self.failing[name] = error

    def error(self, name: str) -> KVFerryError | None:
        return self.outcomes[name]

    def lingering_after(self, seconds: float) -> list[PeerId]:
        """Let time pass; return the peers of the cancelled reads that go on then."""
        self.now += seconds
        return [read.connection for read in self.transfers.lingering(self.now)]


@pytest.fixture
def harness() -> Harness:
    return Harness()


def copies(nbytes: int) -> Copies:
    return copies_between([(HERE.address, THERE.address, nbytes)], local=HERE, remote=THERE)


def test_a_read_is_posted_polled_and_finished_once(harness: Harness) -> None:
    read = harness.add("a", nbytes=24, notify=b"done")
    assert harness.transfers.progress()
    assert harness.posted == [(ONE, 24, b"done")]
    assert not harness.transfers.progress()
    assert len(harness.transfers) == 1
    assert harness.end(1)
    assert (harness.error("a"), read.copies, read.nbytes) == (None, 1, 24)
    assert read.begun > 0
    assert 0 <= read.post_seconds <= read.seconds
    assert not harness.failed
    assert not harness.statuses
    assert len(harness.transfers) == 0
    assert not harness.transfers.progress()


def test_peers_take_turns_and_urgent_reads_go_first(harness: Harness) -> None:
    for nbytes, peer in ((1, ONE), (2, ONE), (3, ONE), (4, OTHER)):
        harness.add(str(nbytes), peer, nbytes=nbytes)
    for nbytes in (5, 6):
        harness.add(str(nbytes), nbytes=nbytes, urgent=True)
    harness.transfers.progress()
    assert harness.sizes == [5, 6, 1, 4, 2, 3]


def test_an_urgent_read_that_has_ended_is_reported_before_another_read_is_posted() -> None:
    class Immediate(Harness):
        def read(self, peer: PeerId, copies: Copies, notify: bytes | None) -> TransferId:
            transfer = super().read(peer, copies, notify)
            self.statuses[transfer] = DONE
            return transfer

    harness = Immediate()
    harness.add("pages", nbytes=2)
    harness.add("word", nbytes=1, urgent=True)
    assert harness.transfers.progress()
    assert harness.finished == ["word"]
    assert harness.sizes == [1]


def test_for_a_peer_at_its_byte_limit_only_urgent_reads_are_posted(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNDER_WAY_BYTES", 10)
    for name, nbytes in (("a", 9), ("b", 1), ("c", 7)):
        harness.add(name, nbytes=nbytes)
    harness.add("other", OTHER, nbytes=6)
    harness.transfers.progress()
    assert harness.sizes == [9, 6, 1]
    harness.add("word", nbytes=8, urgent=True)
    harness.transfers.progress()
    assert harness.sizes == [9, 6, 1, 8]
    harness.end(4)
    assert not harness.transfers.progress()
    harness.end(3, status=failed(TransportError("no")))
    harness.transfers.progress()
    assert harness.sizes == [9, 6, 1, 8, 7]


def test_one_progress_posts_only_one_read_if_posting_takes_long(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONG_SECONDS", -1.0)
    for name in "abc":
        harness.add(name)
    for posted in (1, 2, 3):
        assert harness.transfers.progress()
        assert len(harness.posted) == posted


def test_a_read_that_cannot_be_posted_fails_alone(harness: Harness) -> None:
    hole = PageError("a hole")

    def fails() -> Copies:
        raise hole

    harness.add("a", build=fails)
    harness.add("b", build=lambda: copies(1 // 0))
    harness.add("c")
    assert harness.transfers.progress()
    assert harness.error("a") is hole
    assert "unexpected ZeroDivisionError" in str(harness.error("b"))
    assert harness.reads["a"].copies == 0
    assert len(harness.posted) == len(harness.transfers) == 1


# Failing.


def test_a_failing_read_is_reported_failing_and_then_finished(harness: Harness) -> None:
    harness.add("a", nbytes=5)
    harness.transfers.progress()
    error = TransportError("the cable is out")
    assert harness.end(1, status=failing(error))
    assert harness.failing == {"a": error}
    assert not harness.transfers.progress(), "no status changed"
    assert not harness.outcomes
    harness.add("b")
    harness.transfers.progress()
    assert len(harness.posted) == 2, "others are posted meanwhile"
    late = TransportError("disconnected")
    assert harness.end(1, status=failed(late))
    assert harness.error("a") is error, "the first"
    assert harness.failed == [late]
    harness.end(2, status=Status(state=State.FAILED))
    assert "gave no reason" in str(harness.error("b"))


# Cancelled.


def test_cancelling_a_queued_read_ends_only_that_read() -> None:
    harness = Harness(limit=0)
    for name in "abcd":
        harness.add(name, urgent=name in "cd")
    for name in "bc":
        harness.transfers.cancel(name)
        assert isinstance(harness.error(name), TransferCancelledError)
    assert (harness.reads["b"].begun, harness.reads["b"].seconds) == (0.0, 0.0)
    assert (harness.finished, len(harness.transfers)) == (["b", "c"], 2)


def test_a_read_under_way_is_cancelled_once_all_its_tags_are(harness: Harness) -> None:
    harness.add("both", tags=["x", "y"])
    harness.add("other", tags=["x"])
    harness.transfers.progress()
    for tag in ("both", "x"):
        harness.transfers.cancel(tag)
    assert harness.cancelled == []
    harness.transfers.cancel("y")
    harness.transfers.cancel("y")
    assert harness.cancelled == [1], "it is cancelled once"
    assert not harness.outcomes


def test_cancelled_reads_that_do_not_end_soon_are_lingering(harness: Harness) -> None:
    read = harness.add("a")
    harness.add("b", OTHER)
    harness.transfers.progress()
    harness.transfers.cancel("a", 7.0)
    assert read.deadline == 7.0
    assert harness.lingering_after(CANCEL_SECONDS / 2) == []
    harness.transfers.cancel("b")
    assert harness.lingering_after(CANCEL_SECONDS / 2) == [ONE]
    harness.end(1, status=CANCELLED)
    assert harness.lingering_after(CANCEL_SECONDS / 2) == [OTHER]
    harness.end(2)
    assert harness.lingering_after(CANCEL_SECONDS) == []


def test_the_batches_of_a_read_are_read_in_turn_with_others(harness: Harness) -> None:
    sizes = [3, 2, 1]
    read = harness.add("a", build=lambda: copies(sizes.pop()), has_more=lambda: bool(sizes))
    harness.transfers.progress()
    harness.add("b", nbytes=10)
    for number in (1, 3, 4):
        harness.end(number)
        harness.transfers.progress()
    assert harness.sizes == [1, 10, 2, 3]
    assert harness.finished == ["a"]
    assert (read.copies, read.nbytes) == (3, 6)


# Disconnects.


def test_a_callback_of_a_failed_read_may_cancel_other_queued_reads() -> None:
    """The failure of a read fails its load, which then cancels its other reads."""
    harness = Harness(limit=0)
    read = harness.add("a")
    harness.add("b")
    harness.add("c")
    lost = read.lost

    def cancel_too(error: KVFerryError) -> None:
        harness.transfers.cancel("b")
        lost(error)

    read.lost = cancel_too
    harness.transfers.begin_disconnect(ONE)
    assert sorted(harness.outcomes) == ["a", "b", "c"]
    assert len(harness.transfers) == 0


def test_reads_are_left_alone_whose_disconnect_a_callback_has_begun(harness: Harness) -> None:
    """The statuses of both were asked for before."""
    read = harness.add("a")
    harness.add("b")
    landed = read.landed

    def disconnect_too(whole: Read) -> None:
        harness.transfers.begin_disconnect(ONE)
        landed(whole)

    read.landed = disconnect_too
    harness.transfers.progress()
    harness.end(1, 2)
    assert harness.finished == ["a"]
    assert list(harness.statuses) == [2], "it is not forgotten meanwhile"
    harness.transfers.end_disconnect(ONE, closed=True)
    harness.transfers.progress()
    assert harness.finished == ["a", "b"]


def test_a_read_of_unknown_status_is_over_when_its_connection_is_closed(harness: Harness) -> None:
    for name, peer in (("a", ONE), ("b", ONE), ("other", OTHER)):
        harness.add(name, peer)
    harness.transfers.progress()
    harness.unknown_status = {1, 2}  # the second is the other peer's
    assert harness.end(3)
    assert harness.finished == ["b"]
    assert harness.failing.keys() == {"a", "other"}
    assert isinstance(harness.failing["a"], StatusUnknownError)
    for closed in (False, True):
        assert "a" not in harness.outcomes
        harness.transfers.begin_disconnect(ONE)
        harness.transfers.end_disconnect(ONE, closed=closed)
        harness.transfers.progress()
    assert isinstance(harness.error("a"), StatusUnknownError)
    assert "other" not in harness.outcomes, "its connection is open"
    harness.add("c")
    harness.transfers.progress()
    harness.unknown_status.add(4)
    harness.transfers.progress()
    assert "c" not in harness.outcomes, "closing a connection ends only the reads that it had then"


@pytest.mark.parametrize("poll_result", [[], [None], "no statuses", 7])
def test_a_poll_that_returns_no_statuses_says_nothing_of_the_reads(
    harness: Harness, poll_result: Any
) -> None:
    harness.add("a")
    harness.transfers.progress()
    harness.poll_result = poll_result
    assert harness.transfers.progress()
    assert "cannot say how a read stands: unexpected TypeError" in str(harness.failing["a"])
    assert not harness.outcomes


# Any order of events.

STATES = st.sampled_from([State.PENDING, State.FAILING, State.DONE, State.FAILED])
PEERS = st.sampled_from([ONE, OTHER])


class TransfersStateMachine(RuleBasedStateMachine):
    """Every read is finished exactly once, and not before its status is final."""

    LIMIT = 3

    def __init__(self) -> None:
        super().__init__()
        self.reads = Harness(limit=self.LIMIT)
        self.names: list[str] = []
        self.disconnecting: set[PeerId] = set()

    @rule(peer=PEERS, urgent=st.booleans(), nbytes=st.integers(1, 100))
    def add(self, peer: PeerId, urgent: bool, nbytes: int) -> None:
        if peer not in self.disconnecting:
            self.names.append(f"read {len(self.names)}")
            self.reads.add(self.names[-1], peer, urgent=urgent, nbytes=nbytes, tags=["all"])

    @precondition(lambda self: self.names)
    @rule(data=st.data(), everybody=st.booleans())
    def cancel(self, data: st.DataObject, everybody: bool) -> None:
        self.reads.transfers.cancel(data.draw(st.sampled_from(self.names)))
        if everybody:
            self.reads.transfers.cancel("all")

    @precondition(lambda self: self.reads.statuses)
    @rule(data=st.data(), state=STATES, unknown_status=st.booleans())
    def change_status(self, data: st.DataObject, state: State, unknown_status: bool) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.reads.statuses)))
        error = TransportError("out") if state in (State.FAILING, State.FAILED) else None
        if not self.reads.statuses[transfer].state.final:
            self.reads.statuses[transfer] = Status(state=state, error=error)
        self.reads.unknown_status.discard(transfer)
        if unknown_status:
            self.reads.unknown_status.add(transfer)

    @rule(peer=PEERS)
    def begin_disconnect(self, peer: PeerId) -> None:
        if peer not in self.disconnecting:
            self.disconnecting.add(peer)
            self.reads.transfers.begin_disconnect(peer)

    @rule(peer=PEERS)
    def end_disconnect(self, peer: PeerId) -> None:
        if peer in self.disconnecting:
            self.disconnecting.discard(peer)
            self.reads.transfers.end_disconnect(peer, closed=False)

    @rule()
    def progress(self) -> None:
        self.reads.polls.clear()
        self.reads.transfers.progress()
        peers = [peer for peer, _, _ in self.reads.posted]
        for polled in self.reads.polls:
            assert self.disconnecting.isdisjoint(peers[transfer - 1] for transfer in polled)

    @invariant()
    def every_read_is_accounted_for(self) -> None:
        assert len(self.reads.statuses) <= self.LIMIT
        assert len(self.reads.transfers) + len(self.reads.outcomes) == len(self.names)

    def teardown(self) -> None:
        self.reads.unknown_status.clear()
        for peer in list(self.disconnecting):
            self.end_disconnect(peer)
        for _ in range(2 * len(self.names) + 2):
            self.reads.end(*self.reads.statuses)
        assert sorted(self.reads.outcomes) == sorted(self.names)
        assert len(self.reads.transfers) == 0
        assert not self.reads.transfers._under_way


TestTransfersStateMachine = TransfersStateMachine.TestCase
TestTransfersStateMachine.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None
)


# Throughput.

NBYTES = 100 << 20


def test_the_time_of_a_slow_read_is_that_in_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that in the queue nor that to build the copies."""
    harness, slow = Harness(limit=1), list[tuple[int, int, float]]()
    accept, throughput = harness.read, Throughput(lambda *sizes: slow.append(sizes))

    def read(peer: PeerId, copies: Copies, notify: bytes | None) -> TransferId:
        harness.now += 1.0  # the driver moves the bytes meanwhile
        return accept(peer, copies, notify)

    def build() -> Copies:
        harness.now += 10.0
        return copies(NBYTES)

    harness.add("first of the connection", throughput=throughput)
    harness.transfers.progress()
    harness.end(1)
    harness.add("other", OTHER)
    harness.add("a", build=build, throughput=throughput)
    monkeypatch.setattr(harness, "read", read)
    harness.transfers.progress()
    harness.now += 100.0
    harness.end(2)
    assert harness.transfers.progress()
    harness.now += 3.0
    harness.end(3)
    assert slow == [(NBYTES, 1, 4.0)]
