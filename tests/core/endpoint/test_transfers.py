"""``Transfers``: reads are queued, posted within limits, cancelled, failing and disconnected."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.core.endpoint import transfers as module
from kvferry.core.endpoint.error_containment import ErrorContainment
from kvferry.core.endpoint.throughput import Sample, Throughput
from kvferry.core.endpoint.transfers import CANCEL_SECONDS, Grace, Outcome, Read, Transfers
from kvferry.core.errors import (
    KVFerryError,
    PageError,
    PeerLostError,
    StatusUnknownError,
    TransferCancelledError,
    TransportError,
)
from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.core.transport.copies import Copies, copies_between

ONE, OTHER = PeerId(1), PeerId(2)
HERE, THERE = Region(address=1 << 20, nbytes=1 << 30), Region(address=1 << 40, nbytes=1 << 30)
DONE, PENDING = Status(state=State.DONE), Status(state=State.PENDING)


@pytest.fixture(autouse=True)
def posting_is_never_long() -> Iterator[None]:
    """Make the number of reads that one ``progress`` posts independent of the machine's load."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LONG_SECONDS", 1e9)
        yield


def copies(nbytes: int) -> Copies:
    return copies_between([(HERE.address, THERE.address, nbytes)], local=HERE, remote=THERE)


class Driver:
    """A transport whose transfers have the status that the test gives them."""

    def __init__(self, limit: int | None = None) -> None:
        self.capabilities = self
        self.max_outstanding = limit
        self.posted: list[tuple[PeerId, int, bytes | None]] = []
        self.statuses: dict[TransferId, Status] = {}
        self.cancelled: list[TransferId] = []
        self.forgotten: list[TransferId] = []
        self.unknown_status: set[TransferId] = set()
        self.polls: list[list[TransferId]] = []

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None) -> TransferId:
        self.posted.append((peer, copies.total, notify))
        transfer = TransferId(len(self.posted))
        self.statuses[transfer] = PENDING
        return transfer

    def poll(self, ids: Sequence[TransferId]) -> list[Status]:
        self.polls.append(list(ids))
        if self.unknown_status.intersection(ids):
            raise ZeroDivisionError
        return [self.statuses[each] for each in ids]

    def cancel(self, transfer: TransferId) -> None:
        assert transfer in self.statuses
        self.cancelled.append(transfer)

    def forget(self, transfer: TransferId) -> None:
        del self.statuses[transfer]
        self.forgotten.append(transfer)


class TransfersHarness:
    """``Transfers`` whose reads have names, and what was reported of each."""

    def __init__(self, driver: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self.transfers = Transfers(driver, ErrorContainment(), clock)
        self.outcomes: dict[str, Outcome] = {}
        self.failing: dict[str, KVFerryError] = {}
        self.finished_names: list[str] = []

    def add(
        self,
        name: str,
        peer: PeerId = ONE,
        *,
        nbytes: int = 8,
        urgent: bool = False,
        tags: Sequence[str] = (),
        build: Callable[[], Copies] | None = None,
        notify: bytes | None = None,
        throughput: Throughput | None = None,
    ) -> Read:
        def finished(outcome: Outcome) -> None:
            assert name not in self.outcomes, "called once"
            self.outcomes[name] = outcome
            self.finished_names.append(name)

        def failing(error: KVFerryError) -> None:
            assert name not in self.failing, "called once"
            assert name not in self.outcomes
            self.failing[name] = error

        read = Read(
            peer=peer,
            build=build or (lambda: copies(nbytes)),
            finished=finished,
            failing=failing,
            urgent=urgent,
            notify=notify,
            tags={*tags, name},
            throughput=throughput,
        )
        self.transfers.add(read)
        return read

    def error(self, name: str) -> KVFerryError | None:
        return self.outcomes[name].error


class Measured:
    """``Transfers`` with a clock of the test's, and the slow samples of its first connection.

    The connection's first read, which is never measured, is over.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.now = 0.0
        self.samples: list[Sample] = []
        self.throughput = Throughput(self.samples.append)
        self.driver = Driver(limit)
        self.harness = TransfersHarness(self.driver, clock=lambda: self.now)
        self.harness.add("first", throughput=self.throughput)
        self.end(seconds=0.0)

    def add(self, name: str, **how: Any) -> None:
        self.harness.add(name, nbytes=100 << 20, throughput=self.throughput, **how)

    def end(self, *, seconds: float, status: Status = DONE) -> None:
        """Post the queued reads, and end all reads that are under way after so many seconds."""
        self.harness.transfers.progress()
        self.now += seconds
        for transfer in self.driver.statuses:
            self.driver.statuses[transfer] = status
        self.harness.transfers.progress()


def failed_status(error: Exception, *, failing: bool = False) -> Status:
    assert isinstance(error, TransportError)
    return Status(state=State.FAILING if failing else State.FAILED, error=error)


def test_a_read_is_posted_polled_and_finished_once() -> None:
    driver = Driver()
    harness = TransfersHarness(driver)
    harness.add("a", nbytes=24, notify=b"done")
    assert len(harness.transfers) == 1
    assert harness.transfers.progress()
    assert driver.posted == [(ONE, 24, b"done")]
    assert not harness.transfers.progress()
    assert len(harness.transfers) == 1
    driver.statuses[TransferId(1)] = DONE
    assert harness.transfers.progress()
    outcome = harness.outcomes["a"]
    assert (outcome.error, outcome.copies, outcome.nbytes) == (None, 1, 24)
    assert outcome.begun > 0
    assert 0 <= outcome.post_seconds <= outcome.seconds
    assert driver.forgotten == [TransferId(1)]
    assert len(harness.transfers) == 0
    assert not harness.transfers.progress()


def test_finished_reads_are_reported_before_more_are_posted() -> None:
    driver = Driver()
    harness = TransfersHarness(driver)
    harness.add("a")
    harness.transfers.progress()
    driver.statuses[TransferId(1)] = DONE
    harness.add("b")
    assert harness.transfers.progress()
    assert len(driver.posted) == 1
    assert harness.transfers.progress()
    assert len(driver.posted) == 2


def test_no_more_than_max_outstanding_reads_are_posted() -> None:
    driver = Driver(limit=2)
    harness = TransfersHarness(driver)
    for name in "abc":
        harness.add(name, urgent=name == "c")
    harness.transfers.progress()
    assert len(driver.posted) == 2
    assert not harness.transfers.progress()
    driver.statuses[TransferId(1)] = DONE
    harness.transfers.progress()
    harness.transfers.progress()
    assert len(driver.posted) == 3


def test_peers_take_turns_and_urgent_reads_go_first() -> None:
    driver = Driver()
    harness = TransfersHarness(driver)
    for nbytes, peer in ((1, ONE), (2, ONE), (3, ONE), (4, OTHER)):
        harness.add(str(nbytes), peer, nbytes=nbytes)
    for nbytes in (5, 6):
        harness.add(str(nbytes), nbytes=nbytes, urgent=True)
    harness.transfers.progress()
    assert [nbytes for _, nbytes, _ in driver.posted] == [5, 6, 1, 4, 2, 3]


def test_an_urgent_read_that_has_ended_is_reported_before_another_read_is_posted() -> None:
    class Immediate(Driver):
        def read(self, peer: PeerId, copies: Copies, notify: bytes | None) -> TransferId:
            transfer = super().read(peer, copies, notify)
            self.statuses[transfer] = DONE
            return transfer

    driver = Immediate()
    harness = TransfersHarness(driver)
    harness.add("pages", nbytes=2)
    harness.add("word", nbytes=1, urgent=True)
    assert harness.transfers.progress()
    assert harness.finished_names == ["word"]
    assert [nbytes for _, nbytes, _ in driver.posted] == [1]


def test_for_a_peer_at_its_byte_limit_only_urgent_reads_are_posted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "UNDER_WAY_BYTES", 10)
    driver = Driver()
    harness = TransfersHarness(driver)
    for name, nbytes in (("a", 9), ("b", 1), ("c", 7)):
        harness.add(name, nbytes=nbytes)
    harness.add("other", OTHER, nbytes=6)
    harness.transfers.progress()
    assert [nbytes for _, nbytes, _ in driver.posted] == [9, 6, 1]
    harness.add("word", nbytes=8, urgent=True)
    harness.transfers.progress()
    assert [nbytes for _, nbytes, _ in driver.posted] == [9, 6, 1, 8]
    driver.statuses[TransferId(4)] = DONE
    harness.transfers.progress()
    assert not harness.transfers.progress()
    driver.statuses[TransferId(3)] = failed_status(TransportError("no"))
    harness.transfers.progress()
    harness.transfers.progress()
    assert [nbytes for _, nbytes, _ in driver.posted] == [9, 6, 1, 8, 7]


def test_one_progress_posts_only_one_read_if_posting_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LONG_SECONDS", -1.0)
    driver = Driver()
    harness = TransfersHarness(driver)
    for name in "abc":
        harness.add(name)
    for posted in (1, 2, 3):
        assert harness.transfers.progress()
        assert len(driver.posted) == posted


@pytest.mark.parametrize("error", [PageError("no such page"), MemoryError("none left")])
def test_a_read_that_cannot_be_posted_fails_alone(error: Exception) -> None:
    def fails() -> Copies:
        raise error

    driver = Driver()
    harness = TransfersHarness(driver)
    harness.add("a", build=fails)
    harness.add("b")
    assert harness.transfers.progress()
    assert str(error) in str(harness.error("a"))
    assert isinstance(harness.error("a"), KVFerryError)
    assert (harness.outcomes["a"].copies, harness.outcomes["a"].post_seconds >= 0) == (0, True)
    assert len(driver.posted) == len(harness.transfers) == 1


# Failing.


def test_a_failing_read_is_reported_failing_and_then_finished() -> None:
    driver = Driver()
    harness = TransfersHarness(driver)
    harness.add("a", nbytes=5)
    harness.transfers.progress()
    error = TransportError("the cable is out")
    driver.statuses[TransferId(1)] = failed_status(error, failing=True)
    assert harness.transfers.progress()
    assert harness.failing == {"a": error}
    assert not harness.transfers.progress(), "no status changed"
    assert not harness.outcomes
    assert len(harness.transfers) == 1
    driver.statuses[TransferId(1)] = failed_status(error)
    assert harness.transfers.progress()
    assert harness.error("a") is error


def test_a_failure_without_an_error_gets_one() -> None:
    driver = Driver()
    harness = TransfersHarness(driver)
    harness.add("a")
    harness.transfers.progress()
    driver.statuses[TransferId(1)] = Status(state=State.FAILED)
    harness.transfers.progress()
    assert "gave no reason" in str(harness.error("a"))


def test_while_one_read_is_failing_another_is_posted_and_finished() -> None:
    """A read that stays ``FAILING`` does not count as progress, which would delay posting."""
    driver = Driver()
    harness = TransfersHarness(driver)
    harness.add("failing")
    harness.transfers.progress()
    driver.statuses[TransferId(1)] = failed_status(TransportError("out"), failing=True)
    harness.transfers.progress()
    harness.add("other")
    assert harness.transfers.progress()
    assert len(driver.posted) == 2
    driver.statuses[TransferId(2)] = DONE
    assert harness.transfers.progress()
    assert harness.error("other") is None
    assert "failing" not in harness.outcomes


def test_one_poll_finishes_every_read_that_has_ended() -> None:
    driver = Driver()
    harness = TransfersHarness(driver)
    for name in "abc":
        harness.add(name)
    harness.transfers.progress()
    driver.statuses[TransferId(1)] = DONE
    driver.statuses[TransferId(3)] = failed_status(TransportError("out"))
    assert harness.transfers.progress()
    assert harness.finished_names == ["a", "c"]


# Cancelled.


def test_cancelling_a_queued_read_ends_only_that_read() -> None:
    driver = Driver(limit=0)
    harness = TransfersHarness(driver)
    for name in "abc":
        harness.add(name)
    harness.add("d", urgent=True)
    harness.add("e", urgent=True)
    harness.transfers.cancel("b")
    assert isinstance(harness.error("b"), TransferCancelledError)
    assert (harness.outcomes["b"].begun, harness.outcomes["b"].seconds) == (0.0, 0.0)
    harness.transfers.cancel("d")
    assert harness.finished_names == ["b", "d"]
    assert len(harness.transfers) == 3
    harness.transfers._limit = None
    harness.transfers.progress()
    assert len(driver.posted) == 3
    for number in range(1, 4):
        driver.statuses[TransferId(number)] = DONE
    harness.transfers.progress()
    assert harness.finished_names == ["b", "d", "e", "a", "c"]


def test_the_last_queued_read_of_a_peer_can_be_cancelled_and_another_added() -> None:
    driver = Driver(limit=0)
    harness = TransfersHarness(driver)
    harness.add("a")
    harness.transfers.cancel("a")
    assert len(harness.transfers) == 0
    harness.add("b")
    harness.transfers.cancel("nobody")
    assert len(harness.transfers) == 1


def test_a_read_under_way_is_cancelled_once_all_its_tags_are() -> None:
    driver = Driver()
    harness = TransfersHarness(driver)
    harness.add("both", tags=["x", "y"])
    harness.add("other", tags=["x"])
    harness.transfers.progress()
    for tag in ("both", "x"):
        harness.transfers.cancel(tag)
    assert driver.cancelled == []
    harness.transfers.cancel("y")
    assert driver.cancelled == [TransferId(1)]
    harness.transfers.cancel("y")
    assert driver.cancelled == [TransferId(1)], "it is cancelled once"
    assert not harness.outcomes


class GraceHarness:
    """``Transfers`` on a clock of the test's, and the peers whose reads were escalated."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.now = 100.0
        self.inner = TransfersHarness(self.driver, lambda: self.now)
        self.transfers = self.inner.transfers
        self.escalated: list[set[PeerId]] = []
        self.keep_grace = True

    def grace(self) -> Grace:
        def escalate(reads: Sequence[Read]) -> bool:
            self.escalated.append({read.peer for read in reads})
            return self.keep_grace

        return Grace(escalate=escalate)

    def escalated_after(self, seconds: float) -> list[set[PeerId]]:
        """Let time pass; return the peers of the reads that are escalated then, by grace."""
        self.now += seconds
        self.escalated.clear()
        self.transfers.escalate(self.now)
        return list(self.escalated)


def test_reads_that_outlast_their_grace_are_escalated() -> None:
    harness = GraceHarness()
    harness.inner.add("a", tags=["x"])
    harness.inner.add("b", OTHER, tags=["x"])
    harness.transfers.progress()
    harness.transfers.cancel("x", harness.grace())
    assert harness.escalated_after(CANCEL_SECONDS - 0.1) == []
    assert harness.escalated_after(0.1) == [{ONE, OTHER}]
    assert harness.escalated_after(CANCEL_SECONDS - 0.1) == [], "the grace starts anew"
    harness.driver.statuses[TransferId(2)] = failed_status(TransferCancelledError("cancelled"))
    harness.transfers.progress()
    assert harness.escalated_after(0.1) == [{ONE}]
    harness.driver.statuses[TransferId(1)] = DONE
    harness.transfers.progress()
    assert harness.escalated_after(CANCEL_SECONDS) == []
    assert not harness.transfers._graces


def test_a_read_that_ends_within_its_grace_is_not_escalated() -> None:
    harness = GraceHarness()
    for name in "ab":
        harness.inner.add(name)
    harness.transfers.progress()
    harness.transfers.cancel("a", harness.grace())
    harness.driver.statuses[TransferId(1)] = failed_status(TransferCancelledError("cancelled"))
    harness.transfers.progress()
    assert harness.escalated_after(CANCEL_SECONDS) == []
    assert "b" not in harness.inner.outcomes


def test_a_grace_that_several_tags_share_runs_from_the_first_cancel() -> None:
    harness = GraceHarness()
    harness.inner.add("a")
    harness.inner.add("b", OTHER)
    harness.transfers.progress()
    grace = harness.grace()
    harness.transfers.cancel("a", grace)
    harness.now += CANCEL_SECONDS / 2
    harness.transfers.cancel("b", grace)
    assert harness.escalated_after(CANCEL_SECONDS / 2) == [{ONE, OTHER}]


def test_a_grace_is_not_escalated_again_when_its_owner_declines() -> None:
    harness = GraceHarness()
    harness.inner.add("a")
    harness.transfers.progress()
    harness.transfers.cancel("a", harness.grace())
    harness.keep_grace = False
    assert harness.escalated_after(CANCEL_SECONDS) == [{ONE}]
    assert harness.escalated_after(CANCEL_SECONDS) == []
    harness.driver.statuses[TransferId(1)] = DONE
    harness.transfers.progress()
    assert harness.inner.error("a") is None


def test_the_grace_of_a_queued_read_with_other_tags_begins_when_it_is_posted() -> None:
    harness = GraceHarness()
    harness.transfers._limit = 0
    harness.inner.add("a", tags=["x", "y"])
    harness.transfers.cancel("x", harness.grace())
    assert harness.escalated_after(CANCEL_SECONDS) == []
    harness.transfers._limit = None
    harness.transfers.progress()
    assert harness.driver.cancelled == []
    assert harness.escalated_after(CANCEL_SECONDS) == [{ONE}]


# Disconnects.


def test_queued_reads_of_a_peer_fail_when_its_disconnect_begins() -> None:
    driver = Driver(limit=1)
    harness = TransfersHarness(driver)
    harness.add("under way")
    harness.transfers.progress()
    for name, peer, urgent in (
        ("a", ONE, False), ("b", ONE, True), ("c", OTHER, False), ("d", ONE, False),
    ):  # fmt: skip
        harness.add(name, peer, urgent=urgent)
    harness.transfers.begin_disconnect(ONE)
    assert sorted(harness.outcomes) == ["a", "b", "d"]
    assert all(isinstance(harness.error(name), PeerLostError) for name in "abd")
    assert len(harness.transfers) == 2


def test_a_callback_of_a_failed_read_may_cancel_other_queued_reads() -> None:
    """The failure of a read fails its load, which then cancels its other reads."""
    driver = Driver(limit=0)
    harness = TransfersHarness(driver)
    read = harness.add("a")
    harness.add("b")
    harness.add("c")
    finished = read.finished

    def finish_and_cancel(outcome: Outcome) -> None:
        harness.transfers.cancel("b")
        finished(outcome)

    read.finished = finish_and_cancel
    harness.transfers.begin_disconnect(ONE)
    assert sorted(harness.finished_names) == ["a", "b", "c"]
    assert len(harness.transfers) == 0


@pytest.mark.parametrize("closed", [False, True])
def test_reads_under_way_are_not_named_during_their_disconnect(closed: bool) -> None:
    driver = Driver()
    harness = TransfersHarness(driver)
    harness.add("a")
    harness.add("other", OTHER)
    harness.transfers.progress()
    harness.transfers.begin_disconnect(ONE)
    driver.polls.clear()
    harness.transfers.cancel("a")
    harness.transfers.progress()
    assert driver.cancelled == []
    assert driver.polls == [[TransferId(2)]]
    harness.transfers.end_disconnect(ONE, closed=closed)
    driver.statuses[TransferId(1)] = failed_status(PeerLostError("disconnected"))
    harness.transfers.progress()
    assert isinstance(harness.error("a"), PeerLostError)


# Unknown status.


def test_a_read_of_unknown_status_is_over_when_its_connection_is_closed() -> None:
    driver = Driver()
    harness = TransfersHarness(driver)
    for name, peer in (("a", ONE), ("b", ONE), ("other", OTHER)):
        harness.add(name, peer)
    harness.transfers.progress()
    driver.unknown_status = {TransferId(1), TransferId(2)}  # the second is the other peer's
    driver.statuses[TransferId(3)] = DONE
    assert harness.transfers.progress()
    assert harness.finished_names == ["b"]
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
    driver.unknown_status.add(TransferId(4))
    harness.transfers.progress()
    assert "c" not in harness.outcomes, "closing a connection ends only the reads that it had then"


# Any order of events.

STATES = st.sampled_from([State.PENDING, State.FAILING, State.DONE, State.FAILED])


class TransfersStateMachine(RuleBasedStateMachine):
    """Every read is finished exactly once, and not before its status is final."""

    LIMIT = 3

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(limit=self.LIMIT)
        self.reads = TransfersHarness(self.driver)
        self.names: list[str] = []
        self.disconnecting: set[PeerId] = set()

    @rule(peer=st.sampled_from([ONE, OTHER]), urgent=st.booleans(), nbytes=st.integers(1, 100))
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

    @precondition(lambda self: self.driver.statuses)
    @rule(data=st.data(), state=STATES, unknown_status=st.booleans())
    def change_status(self, data: st.DataObject, state: State, unknown_status: bool) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.driver.statuses)))
        error = TransportError("out") if state in (State.FAILING, State.FAILED) else None
        if not self.driver.statuses[transfer].state.final:
            self.driver.statuses[transfer] = Status(state=state, error=error)
        (self.driver.unknown_status.add if unknown_status else self.driver.unknown_status.discard)(
            transfer
        )

    @rule(peer=st.sampled_from([ONE, OTHER]))
    def begin_disconnect(self, peer: PeerId) -> None:
        if peer not in self.disconnecting:
            self.disconnecting.add(peer)
            self.reads.transfers.begin_disconnect(peer)

    @rule(peer=st.sampled_from([ONE, OTHER]))
    def end_disconnect(self, peer: PeerId) -> None:
        if peer in self.disconnecting:
            self.disconnecting.discard(peer)
            self.reads.transfers.end_disconnect(peer, closed=False)

    @rule()
    def progress(self) -> None:
        self.driver.polls.clear()
        self.reads.transfers.progress()
        peers = [peer for peer, _, _ in self.driver.posted]
        for polled in self.driver.polls:
            assert self.disconnecting.isdisjoint(peers[transfer - 1] for transfer in polled)

    @invariant()
    def every_read_is_accounted_for(self) -> None:
        assert len(self.driver.statuses) <= self.LIMIT
        assert len(self.reads.transfers) + len(self.reads.outcomes) == len(self.names)
        assert len(set(self.reads.finished_names)) == len(self.reads.finished_names)

    def teardown(self) -> None:
        self.driver.unknown_status.clear()
        for peer in list(self.disconnecting):
            self.end_disconnect(peer)
        for _ in range(2 * len(self.names) + 2):
            for transfer in self.driver.statuses:
                self.driver.statuses[transfer] = DONE
            self.reads.transfers.progress()
        assert sorted(self.reads.finished_names) == sorted(self.names)
        assert len(self.reads.transfers) == 0
        assert not self.reads.transfers._under_way


TestTransfersStateMachine = TransfersStateMachine.TestCase
TestTransfersStateMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)


def test_a_slow_read_is_measured_from_its_post_to_its_end() -> None:
    measured = Measured()
    measured.add("a")
    measured.now = 10.0
    measured.end(seconds=1.0)
    assert measured.samples == [Sample(nbytes=100 << 20, copies=1, seconds=1.0)]


def test_time_in_the_queue_is_not_measured() -> None:
    measured = Measured(limit=1)
    measured.harness.add("other", OTHER)
    measured.add("a")
    measured.end(seconds=10.0)
    assert measured.harness.finished_names == ["first", "other"]
    measured.end(seconds=1.0)
    assert [sample.seconds for sample in measured.samples] == [1.0]


def test_time_to_build_the_copies_is_not_measured() -> None:
    measured = Measured()

    def build() -> Copies:
        measured.now += 10.0
        return copies(100 << 20)

    measured.add("a", build=build)
    measured.end(seconds=1.0)
    assert [sample.seconds for sample in measured.samples] == [1.0]


def test_time_in_the_driver_until_it_has_accepted_a_read_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = Measured()
    accept = measured.driver.read

    def read(peer: PeerId, copies: Copies, notify: bytes | None) -> TransferId:
        measured.now += 1.0  # the driver moves the bytes meanwhile
        return accept(peer, copies, notify)

    monkeypatch.setattr(measured.driver, "read", read)
    measured.add("a")
    measured.end(seconds=0.0)
    assert [sample.seconds for sample in measured.samples] == [1.0]


def test_reads_that_could_not_be_posted_are_not_measured() -> None:
    measured = Measured()

    def build() -> Copies:
        raise PageError("a hole")

    measured.add("a", build=build)
    measured.end(seconds=1.0)
    measured.now = 100.0
    measured.add("b")
    measured.end(seconds=1.0)
    assert [sample.seconds for sample in measured.samples] == [1.0]


def test_a_slow_read_that_fails_is_not_measured() -> None:
    measured = Measured()
    measured.add("a")
    measured.end(seconds=1.0, status=failed_status(PeerLostError("gone")))
    assert isinstance(measured.harness.error("a"), PeerLostError)
    assert not measured.samples


def test_a_read_ends_although_its_measurement_raises() -> None:
    def slow(sample: Sample) -> None:
        raise ZeroDivisionError(sample)

    measured = Measured()
    throughput = Throughput(slow)
    for name in "ab":
        measured.harness.add(name, nbytes=100 << 20, throughput=throughput)
        measured.end(seconds=1.0)
        assert measured.harness.error(name) is None
