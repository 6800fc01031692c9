"""``Transfers``: reads are queued, posted within limits, cancelled, failing and disconnected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.core.driver_calls import transfers as module
from kvferry.core.driver_calls.error_containment import ErrorContainment
from kvferry.core.driver_calls.transfers import CANCEL_SECONDS, Read, Transfers
from kvferry.core.errors import (
    KVFerryError,
    StatusUnknownError,
    TransferCancelledError,
    TransportError,
)
from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.core.transport.copies import Copies, copies_between
from tests.core.endpoint.transports import DONE, FAILED_CANCELLED, PENDING, failed, failing

ONE, OTHER = PeerId(1), PeerId(2)
HERE, THERE = Region(address=1 << 20, nbytes=1 << 30), Region(address=1 << 40, nbytes=1 << 30)


@pytest.fixture(autouse=True)
def posting_is_never_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the number of reads that one ``progress`` posts independent of the machine's load."""
    monkeypatch.setattr(module, "LONG_SECONDS", 1e9)


def copies(nbytes: int) -> Copies:
    return copies_between([(HERE.address, THERE.address, nbytes)], local=HERE, remote=THERE)


class Harness:
    """``Transfers`` whose reads have names, and the driver, whose transfers count from 1.

    Attributes:
        new: the status of a transfer that begins.
        unknown: the transfers of which ``poll`` raises.
        poll_result: if not ``None``, what ``poll`` returns instead of a list of statuses.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.capabilities, self.max_outstanding = self, limit
        self.now, self.new = 100.0, PENDING
        self.transfers = Transfers(self, ErrorContainment(), lambda: self.now)  # type: ignore[arg-type]
        self.reads: dict[str, Read] = {}
        self.peers: list[PeerId] = []
        self.sizes: list[int] = []
        self.statuses: dict[TransferId, Status] = {}
        self.cancelled: list[int] = []
        self.unknown: set[int] = set()
        self.polled: set[TransferId] = set()
        self.poll_result: Any = None
        self.outcomes: dict[str, KVFerryError | None] = {}
        self.failing: dict[str, KVFerryError] = {}
        self.failed: list[KVFerryError] = []
        self.transfers.failing = self._on_failing
        self.transfers.failed = lambda _, error: self.failed.append(error)

    def read(self, peer: PeerId, copies: Copies, _: bytes | None) -> TransferId:
        self.peers.append(peer)
        self.sizes.append(copies.total)
        transfer = TransferId(len(self.sizes))
        self.statuses[transfer] = self.new
        return transfer

    def poll(self, ids: Sequence[TransferId]) -> Any:
        self.polled.update(ids)
        if self.unknown.intersection(ids):
            raise ZeroDivisionError
        if self.poll_result is not None:
            return self.poll_result
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
        **how: Any,
    ) -> Read:
        def ended(error: KVFerryError | None) -> None:
            assert name not in self.outcomes, "called once"
            self.outcomes[name] = error

        parts: dict[str, Any] = {"build": lambda: copies(nbytes), "landed": lambda _: ended(None)}
        read = Read(connection=peer, lost=ended, tags={*tags, name}, **parts | how)
        self.reads[name] = read
        self.transfers.add(read)
        return read

    def start(self, names: str, **how: Any) -> list[Read]:
        """Add and post reads with names of one letter."""
        reads = [self.add(name, **how) for name in names]
        self.transfers.progress()
        return reads

    def end(self, *numbers: int, status: Status = DONE) -> bool:
        """Give a status to transfers, and make progress."""
        self.statuses.update({TransferId(number): status for number in numbers})
        return self.transfers.progress()

    def _on_failing(self, read: Read, error: KVFerryError) -> None:
        [name] = [name for name, each in self.reads.items() if each is read]
        assert name not in self.failing, "called once"
        assert name not in self.outcomes
        self.failing[name] = error

    def lingering_after(self, seconds: float) -> list[PeerId]:
        """Let time pass; return the peers of the cancelled reads that go on then."""
        self.now += seconds
        return [read.connection for read in self.transfers.lingering(self.now)]


@pytest.fixture
def harness() -> Harness:
    return Harness()


# The order of posts.


def test_peers_take_turns_and_urgent_reads_go_first(harness: Harness) -> None:
    for nbytes, peer in ((1, ONE), (2, ONE), (3, ONE), (4, OTHER)):
        harness.add(str(nbytes), peer, nbytes=nbytes)
    for nbytes in (5, 6):
        harness.add(str(nbytes), nbytes=nbytes, urgent=True)
    assert harness.transfers.progress()
    assert harness.sizes == [5, 6, 1, 4, 2, 3]
    assert not harness.transfers.progress()
    assert len(harness.transfers) == 6


def test_an_urgent_read_that_has_ended_is_reported_before_another_read_is_posted(
    harness: Harness,
) -> None:
    harness.new = DONE
    harness.add("pages", nbytes=2)
    harness.add("word", nbytes=1, urgent=True)
    assert harness.transfers.progress()
    assert (list(harness.outcomes), harness.sizes) == (["word"], [1])


def test_for_a_peer_at_its_byte_limit_only_urgent_reads_are_posted(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNDER_WAY_BYTES", 10)
    for name, nbytes in (("a", 9), ("b", 1), ("c", 7)):
        harness.add(name, nbytes=nbytes)
    harness.add("other", OTHER, nbytes=6)
    harness.transfers.progress()
    assert harness.sizes == [9, 6, 1]
    harness.start("w", nbytes=8, urgent=True)
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
    harness.start("abc")
    assert len(harness.sizes) == 1
    assert harness.transfers.progress()
    assert len(harness.sizes) == 2


# Failing, cancelled, and of unknown status.


def test_a_failing_read_is_reported_failing_and_then_finished(harness: Harness) -> None:
    harness.start("a")
    error, late = TransportError("the cable is out"), TransportError("disconnected")
    assert harness.end(1, status=failing(error))
    assert harness.failing == {"a": error}
    assert not harness.transfers.progress(), "no status changed"
    assert not harness.outcomes
    harness.start("b")
    assert len(harness.sizes) == 2, "others are posted meanwhile"
    assert harness.end(1, status=failed(late))
    assert harness.outcomes["a"] is error, "the first"
    assert harness.failed == [late]
    harness.end(2, status=Status(state=State.FAILED))
    assert "gave no reason" in str(harness.outcomes["b"])


def test_a_read_is_cancelled_once_all_its_tags_are() -> None:
    harness = Harness(limit=2)
    harness.start("ab", tags=["x"])
    for name in "cdef":  # they wait
        harness.add(name, urgent=name in "ef")
    for name in "ce":
        harness.transfers.cancel(name)
        assert isinstance(harness.outcomes[name], TransferCancelledError)
    assert (harness.reads["c"].begun, harness.reads["c"].seconds) == (0.0, 0.0)
    harness.transfers.cancel("a")
    assert harness.cancelled == []
    for _ in range(2):
        harness.transfers.cancel("x")
    assert harness.cancelled == [1], "it is cancelled once"
    assert (list(harness.outcomes), len(harness.transfers)) == (["c", "e"], 4)


def test_cancelled_reads_that_do_not_end_soon_are_lingering(harness: Harness) -> None:
    [read] = harness.start("a")
    harness.start("b", peer=OTHER)
    harness.transfers.cancel("a", 7.0)
    assert read.deadline == 7.0
    assert harness.lingering_after(CANCEL_SECONDS / 2) == []
    harness.transfers.cancel("b")
    assert harness.lingering_after(CANCEL_SECONDS / 2) == [ONE]
    harness.end(1, status=FAILED_CANCELLED)
    assert harness.lingering_after(CANCEL_SECONDS / 2) == [OTHER]
    harness.end(2)
    assert harness.lingering_after(CANCEL_SECONDS) == []


@pytest.mark.parametrize("poll_result", [[], [None], "no statuses", 7])
def test_a_poll_that_returns_no_statuses_says_nothing_of_the_reads(
    harness: Harness, poll_result: Any
) -> None:
    harness.start("a")
    harness.poll_result = poll_result
    assert harness.transfers.progress()
    assert "cannot say how a read stands: unexpected TypeError" in str(harness.failing["a"])
    assert not harness.outcomes


def test_a_read_of_unknown_status_is_over_when_its_connection_is_closed(harness: Harness) -> None:
    harness.start("o", peer=OTHER)
    harness.start("ab")
    harness.unknown = {1, 2}
    assert harness.end(3)
    assert [*harness.outcomes] == ["b"]
    assert harness.failing.keys() == {"a", "o"}
    for closed in (False, True):
        assert "a" not in harness.outcomes
        harness.transfers.begin_disconnect(ONE)
        harness.transfers.end_disconnect(ONE, closed=closed)
        harness.transfers.progress()
    assert isinstance(harness.outcomes["a"], StatusUnknownError)
    harness.start("c")
    harness.unknown.add(4)
    harness.transfers.progress()
    assert harness.outcomes.keys() == {"a", "b"}, "only reads of that connection, until then"


# What callbacks may do.


def test_a_callback_of_a_failed_read_may_cancel_other_queued_reads() -> None:
    """The failure of a read fails its load, which then cancels its other reads."""
    harness, lost = Harness(limit=0), list[KVFerryError]()

    def cancel_too(error: KVFerryError) -> None:
        harness.transfers.cancel("b")
        lost.append(error)

    for read in harness.start("abc")[:1]:
        read.lost = cancel_too
    harness.transfers.begin_disconnect(ONE)
    assert (len(lost), sorted(harness.outcomes), len(harness.transfers)) == (1, ["b", "c"], 0)


# Any order of events.

STATES = st.sampled_from([State.PENDING, State.FAILING, State.DONE, State.FAILED])
PEERS = st.sampled_from([ONE, OTHER])


class TransfersStateMachine(RuleBasedStateMachine):
    """Every read is finished exactly once, and not before its status is final."""

    LIMIT = 3

    def __init__(self) -> None:
        super().__init__()
        self.reads = Harness(limit=self.LIMIT)
        self.disconnecting: set[PeerId] = set()

    @rule(peer=PEERS, urgent=st.booleans(), nbytes=st.integers(1, 100))
    def add(self, peer: PeerId, urgent: bool, nbytes: int) -> None:
        if peer not in self.disconnecting:
            name = f"read {len(self.reads.reads)}"
            self.reads.add(name, peer, urgent=urgent, nbytes=nbytes, tags=["all"])

    @precondition(lambda self: self.reads.reads)
    @rule(data=st.data(), everybody=st.booleans())
    def cancel(self, data: st.DataObject, everybody: bool) -> None:
        self.reads.transfers.cancel(data.draw(st.sampled_from([*self.reads.reads])))
        if everybody:
            self.reads.transfers.cancel("all")

    @precondition(lambda self: self.reads.statuses)
    @rule(data=st.data(), state=STATES, unknown_status=st.booleans())
    def change_status(self, data: st.DataObject, state: State, unknown_status: bool) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.reads.statuses)))
        error = TransportError("out") if state in (State.FAILING, State.FAILED) else None
        if not self.reads.statuses[transfer].state.final:
            self.reads.statuses[transfer] = Status(state=state, error=error)
        self.reads.unknown.discard(transfer)
        if unknown_status:
            self.reads.unknown.add(transfer)

    @rule(peer=PEERS)
    def begin_or_end_disconnect(self, peer: PeerId) -> None:
        if peer in self.disconnecting:
            self.reads.transfers.end_disconnect(peer, closed=False)
        else:
            self.reads.transfers.begin_disconnect(peer)
        self.disconnecting ^= {peer}

    @rule()
    def progress(self) -> None:
        self.reads.polled.clear()
        self.reads.transfers.progress()
        peers = {self.reads.peers[transfer - 1] for transfer in self.reads.polled}
        assert self.disconnecting.isdisjoint(peers)

    @invariant()
    def every_read_is_accounted_for(self) -> None:
        reads = self.reads
        assert len(reads.statuses) <= self.LIMIT
        assert len(reads.transfers) + len(reads.outcomes) == len(reads.reads)

    def teardown(self) -> None:
        self.reads.unknown.clear()
        for peer in list(self.disconnecting):
            self.begin_or_end_disconnect(peer)
        for _ in range(2 * len(self.reads.reads) + 2):
            self.reads.end(*self.reads.statuses)
        assert self.reads.outcomes.keys() == self.reads.reads.keys()
        assert len(self.reads.transfers) == 0
        assert not self.reads.transfers._under_way


TestTransfersStateMachine = TransfersStateMachine.TestCase
TestTransfersStateMachine.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None
)
