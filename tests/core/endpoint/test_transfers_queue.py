"""Reads: queued, posted within limits, cancelled, failing and disconnected, side by side."""

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
def no_post_is_long() -> Iterator[None]:
    """Otherwise it depends on the machine's load how many are posted at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LONG_SECONDS", 1e9)
        yield


def copies(nbytes: int) -> Copies:
    return copies_between([(HERE.address, THERE.address, nbytes)], local=HERE, remote=THERE)


class Driver:
    """A transport that only says what the test wants to be said of its transfers."""

    def __init__(self, limit: int | None = None) -> None:
        self.capabilities = self
        self.max_outstanding = limit
        self.posted: list[tuple[PeerId, int, bytes | None]] = []
        self.says: dict[TransferId, Status] = {}
        self.cancelled: list[TransferId] = []
        self.forgotten: list[TransferId] = []
        self.unclear: set[TransferId] = set()
        self.polls: list[list[TransferId]] = []

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None) -> TransferId:
        self.posted.append((peer, copies.total, notify))
        transfer = TransferId(len(self.posted))
        self.says[transfer] = PENDING
        return transfer

    def poll(self, ids: Sequence[TransferId]) -> list[Status]:
        self.polls.append(list(ids))
        if self.unclear.intersection(ids):
            raise ZeroDivisionError
        return [self.says[each] for each in ids]

    def cancel(self, transfer: TransferId) -> None:
        assert transfer in self.says
        self.cancelled.append(transfer)

    def forget(self, transfer: TransferId) -> None:
        del self.says[transfer]
        self.forgotten.append(transfer)


class Reads:
    """Jobs by name, and what was heard of each."""

    def __init__(self, driver: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self.transfers = Transfers(driver, ErrorContainment(), clock)
        self.outcomes: dict[str, Outcome] = {}
        self.failing: dict[str, KVFerryError] = {}
        self.heard: list[str] = []

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
    ) -> Read:
        def finished(outcome: Outcome) -> None:
            assert name not in self.outcomes, "called once"
            self.outcomes[name] = outcome
            self.heard.append(name)

        def failing(error: KVFerryError) -> None:
            assert name not in self.failing, "called once"
            assert name not in self.outcomes
            self.failing[name] = error

        job = Read(
            peer=peer,
            build=build or (lambda: copies(nbytes)),
            finished=finished,
            failing=failing,
            urgent=urgent,
            notify=notify,
            tags={*tags, name},
        )
        self.transfers.add(job)
        return job

    def error(self, name: str) -> KVFerryError | None:
        return self.outcomes[name].error


def ended(error: Exception, *, failing: bool = False) -> Status:
    assert isinstance(error, TransportError)
    return Status(state=State.FAILING if failing else State.FAILED, error=error)


def test_a_read_is_posted_polled_and_heard_of_once() -> None:
    driver = Driver()
    reads = Reads(driver)
    reads.add("a", nbytes=24, notify=b"done")
    assert len(reads.transfers) == 1
    assert reads.transfers.progress()
    assert driver.posted == [(ONE, 24, b"done")]
    assert not reads.transfers.progress()
    assert len(reads.transfers) == 1
    driver.says[TransferId(1)] = DONE
    assert reads.transfers.progress()
    outcome = reads.outcomes["a"]
    assert (outcome.error, outcome.copies, outcome.nbytes) == (None, 1, 24)
    assert outcome.begun > 0
    assert 0 <= outcome.post_seconds <= outcome.seconds
    assert driver.forgotten == [TransferId(1)]
    assert len(reads.transfers) == 0
    assert not reads.transfers.progress()


def test_what_has_ended_is_answered_before_more_is_posted() -> None:
    driver = Driver()
    reads = Reads(driver)
    reads.add("a")
    reads.transfers.progress()
    driver.says[TransferId(1)] = DONE
    reads.add("b")
    assert reads.transfers.progress()
    assert len(driver.posted) == 1
    assert reads.transfers.progress()
    assert len(driver.posted) == 2


def test_the_drivers_limit_is_kept() -> None:
    driver = Driver(limit=2)
    reads = Reads(driver)
    for name in "abc":
        reads.add(name, urgent=name == "c")
    reads.transfers.progress()
    assert len(driver.posted) == 2
    assert not reads.transfers.progress()
    driver.says[TransferId(1)] = DONE
    reads.transfers.progress()
    reads.transfers.progress()
    assert len(driver.posted) == 3


def test_peers_take_turns_and_what_is_ahead_goes_first() -> None:
    driver = Driver()
    reads = Reads(driver)
    for nbytes, peer in ((1, ONE), (2, ONE), (3, ONE), (4, OTHER)):
        reads.add(str(nbytes), peer, nbytes=nbytes)
    for nbytes in (5, 6):
        reads.add(str(nbytes), nbytes=nbytes, urgent=True)
    reads.transfers.progress()
    assert [nbytes for _, nbytes, _ in driver.posted] == [5, 6, 1, 4, 2, 3]


def test_of_a_peer_with_enough_under_way_only_what_is_ahead_is_posted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "UNDER_WAY_BYTES", 10)
    driver = Driver()
    reads = Reads(driver)
    for name, nbytes in (("a", 9), ("b", 1), ("c", 7)):
        reads.add(name, nbytes=nbytes)
    reads.add("other", OTHER, nbytes=6)
    reads.transfers.progress()
    assert [nbytes for _, nbytes, _ in driver.posted] == [9, 6, 1]
    reads.add("word", nbytes=8, urgent=True)
    reads.transfers.progress()
    assert [nbytes for _, nbytes, _ in driver.posted] == [9, 6, 1, 8]
    driver.says[TransferId(4)] = DONE
    reads.transfers.progress()
    assert not reads.transfers.progress()
    driver.says[TransferId(3)] = ended(TransportError("no"))
    reads.transfers.progress()
    reads.transfers.progress()
    assert [nbytes for _, nbytes, _ in driver.posted] == [9, 6, 1, 8, 7]


def test_a_post_that_takes_long_lets_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LONG_SECONDS", -1.0)
    driver = Driver()
    reads = Reads(driver)
    for name in "abc":
        reads.add(name)
    for posted in (1, 2, 3):
        assert reads.transfers.progress()
        assert len(driver.posted) == posted


@pytest.mark.parametrize("error", [PageError("no such page"), MemoryError("none left")])
def test_a_read_that_cannot_be_posted_fails_alone(error: Exception) -> None:
    def fails() -> Copies:
        raise error

    driver = Driver()
    reads = Reads(driver)
    reads.add("a", build=fails)
    reads.add("b")
    assert reads.transfers.progress()
    assert str(error) in str(reads.error("a"))
    assert isinstance(reads.error("a"), KVFerryError)
    assert (reads.outcomes["a"].copies, reads.outcomes["a"].post_seconds >= 0) == (0, True)
    assert len(driver.posted) == len(reads.transfers) == 1


# Failing.


def test_a_read_that_is_failing_is_heard_of_twice_and_over_when_it_is_quiet() -> None:
    driver = Driver()
    reads = Reads(driver)
    reads.add("a", nbytes=5)
    reads.transfers.progress()
    error = TransportError("the cable is out")
    driver.says[TransferId(1)] = ended(error, failing=True)
    assert reads.transfers.progress()
    assert reads.failing == {"a": error}
    assert not reads.transfers.progress(), "nothing new was heard"
    assert not reads.outcomes
    assert len(reads.transfers) == 1
    driver.says[TransferId(1)] = ended(error)
    assert reads.transfers.progress()
    assert reads.error("a") is error


def test_a_failure_without_a_reason_has_one() -> None:
    driver = Driver()
    reads = Reads(driver)
    reads.add("a")
    reads.transfers.progress()
    driver.says[TransferId(1)] = Status(state=State.FAILED)
    reads.transfers.progress()
    assert "gave no reason" in str(reads.error("a"))


def test_while_one_is_failing_another_is_posted_and_heard_of() -> None:
    """What is failing is no news: otherwise nothing would be posted as long as it lasts."""
    driver = Driver()
    reads = Reads(driver)
    reads.add("failing")
    reads.transfers.progress()
    driver.says[TransferId(1)] = ended(TransportError("out"), failing=True)
    reads.transfers.progress()
    reads.add("other")
    assert reads.transfers.progress()
    assert len(driver.posted) == 2
    driver.says[TransferId(2)] = DONE
    assert reads.transfers.progress()
    assert reads.error("other") is None
    assert "failing" not in reads.outcomes


def test_all_that_is_new_is_heard_of_in_one_poll() -> None:
    driver = Driver()
    reads = Reads(driver)
    for name in "abc":
        reads.add(name)
    reads.transfers.progress()
    driver.says[TransferId(1)] = DONE
    driver.says[TransferId(3)] = ended(TransportError("out"))
    assert reads.transfers.progress()
    assert reads.heard == ["a", "c"]


# Cancelled.


def test_of_queued_reads_only_the_one_that_is_cancelled_ends() -> None:
    driver = Driver(limit=0)
    reads = Reads(driver)
    for name in "abc":
        reads.add(name)
    reads.add("d", urgent=True)
    reads.add("e", urgent=True)
    reads.transfers.cancel("b")
    assert isinstance(reads.error("b"), TransferCancelledError)
    assert (reads.outcomes["b"].begun, reads.outcomes["b"].seconds) == (0.0, 0.0)
    reads.transfers.cancel("d")
    assert reads.heard == ["b", "d"]
    assert len(reads.transfers) == 3
    reads.transfers._limit = None
    reads.transfers.progress()
    assert len(driver.posted) == 3
    for number in range(1, 4):
        driver.says[TransferId(number)] = DONE
    reads.transfers.progress()
    assert reads.heard == ["b", "d", "e", "a", "c"]


def test_the_last_queued_read_of_a_peer_can_be_cancelled_and_another_added() -> None:
    driver = Driver(limit=0)
    reads = Reads(driver)
    reads.add("a")
    reads.transfers.cancel("a")
    assert len(reads.transfers) == 0
    reads.add("b")
    reads.transfers.cancel("nobody")
    assert len(reads.transfers) == 1


def test_a_read_that_is_under_way_is_cancelled_when_nobody_wants_it() -> None:
    driver = Driver()
    reads = Reads(driver)
    reads.add("both", tags=["x", "y"])
    reads.add("other", tags=["x"])
    reads.transfers.progress()
    for tag in ("both", "x"):
        reads.transfers.cancel(tag)
    assert driver.cancelled == []
    reads.transfers.cancel("y")
    assert driver.cancelled == [TransferId(1)]
    reads.transfers.cancel("y")
    assert driver.cancelled == [TransferId(1)], "it is asked once"
    assert not reads.outcomes


class Graces:
    """Reads that are cancelled on a clock of the test's, and what is escalated of them."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.now = 100.0
        self.reads = Reads(self.driver, lambda: self.now)
        self.transfers = self.reads.transfers
        self.escalated: list[set[PeerId]] = []
        self.again = True

    def grace(self) -> Grace:
        def escalate(reads: Sequence[Read]) -> bool:
            self.escalated.append({read.peer for read in reads})
            return self.again

        return Grace(escalate=escalate)

    def after(self, seconds: float) -> list[set[PeerId]]:
        """What is escalated now."""
        self.now += seconds
        self.escalated.clear()
        self.transfers.escalate(self.now)
        return list(self.escalated)


def test_reads_that_go_on_after_their_grace_are_escalated_to_those_that_gave_them_up() -> None:
    graces = Graces()
    graces.reads.add("a", tags=["x"])
    graces.reads.add("b", OTHER, tags=["x"])
    graces.transfers.progress()
    graces.transfers.cancel("x", graces.grace())
    assert graces.after(CANCEL_SECONDS - 0.1) == []
    assert graces.after(0.1) == [{ONE, OTHER}]
    assert graces.after(CANCEL_SECONDS - 0.1) == [], "they have as long again"
    graces.driver.says[TransferId(2)] = ended(TransferCancelledError("cancelled"))
    graces.transfers.progress()
    assert graces.after(0.1) == [{ONE}]
    graces.driver.says[TransferId(1)] = DONE
    graces.transfers.progress()
    assert graces.after(CANCEL_SECONDS) == []
    assert not graces.transfers._graces


def test_what_ends_by_itself_within_its_grace_is_not_escalated() -> None:
    graces = Graces()
    for name in "ab":
        graces.reads.add(name)
    graces.transfers.progress()
    graces.transfers.cancel("a", graces.grace())
    graces.driver.says[TransferId(1)] = ended(TransferCancelledError("cancelled"))
    graces.transfers.progress()
    assert graces.after(CANCEL_SECONDS) == []
    assert "b" not in graces.reads.outcomes


def test_one_grace_of_several_tags_is_over_when_the_first_of_them_is() -> None:
    graces = Graces()
    graces.reads.add("a")
    graces.reads.add("b", OTHER)
    graces.transfers.progress()
    grace = graces.grace()
    graces.transfers.cancel("a", grace)
    graces.now += CANCEL_SECONDS / 2
    graces.transfers.cancel("b", grace)
    assert graces.after(CANCEL_SECONDS / 2) == [{ONE, OTHER}]


def test_a_grace_whose_owner_has_done_what_it_can_is_not_looked_at_again() -> None:
    graces = Graces()
    graces.reads.add("a")
    graces.transfers.progress()
    graces.transfers.cancel("a", graces.grace())
    graces.again = False
    assert graces.after(CANCEL_SECONDS) == [{ONE}]
    assert graces.after(CANCEL_SECONDS) == []
    graces.driver.says[TransferId(1)] = DONE
    graces.transfers.progress()
    assert graces.reads.error("a") is None


def test_a_read_that_others_want_has_no_grace_before_it_is_posted() -> None:
    graces = Graces()
    graces.transfers._limit = 0
    graces.reads.add("a", tags=["x", "y"])
    graces.transfers.cancel("x", graces.grace())
    assert graces.after(CANCEL_SECONDS) == []
    graces.transfers._limit = None
    graces.transfers.progress()
    assert graces.driver.cancelled == []
    assert graces.after(CANCEL_SECONDS) == [{ONE}]


# Connections that are closed.


def test_what_waits_for_a_connection_that_is_closed_fails_and_others_go_on() -> None:
    driver = Driver(limit=1)
    reads = Reads(driver)
    reads.add("under way")
    reads.transfers.progress()
    for name, peer, urgent in (
        ("a", ONE, False), ("b", ONE, True), ("c", OTHER, False), ("d", ONE, False),
    ):  # fmt: skip
        reads.add(name, peer, urgent=urgent)
    reads.transfers.begin_disconnect(ONE)
    assert sorted(reads.outcomes) == ["a", "b", "d"]
    assert all(isinstance(reads.error(name), PeerLostError) for name in "abd")
    assert len(reads.transfers) == 2


def test_what_ends_with_one_may_end_others_that_wait() -> None:
    """A read that fails fails its load, whose other reads are cancelled then."""
    driver = Driver(limit=0)
    reads = Reads(driver)
    job = reads.add("a")
    reads.add("b")
    reads.add("c")
    finished = job.finished

    def ends_others(outcome: Outcome) -> None:
        reads.transfers.cancel("b")
        finished(outcome)

    job.finished = ends_others
    reads.transfers.begin_disconnect(ONE)
    assert sorted(reads.heard) == ["a", "b", "c"]
    assert len(reads.transfers) == 0


@pytest.mark.parametrize("closed", [False, True])
def test_nothing_under_way_is_named_while_its_connection_is_closed(closed: bool) -> None:
    driver = Driver()
    reads = Reads(driver)
    reads.add("a")
    reads.add("other", OTHER)
    reads.transfers.progress()
    reads.transfers.begin_disconnect(ONE)
    driver.polls.clear()
    reads.transfers.cancel("a")
    reads.transfers.progress()
    assert driver.cancelled == []
    assert driver.polls == [[TransferId(2)]]
    reads.transfers.end_disconnect(ONE, closed=closed)
    driver.says[TransferId(1)] = ended(PeerLostError("disconnected"))
    reads.transfers.progress()
    assert isinstance(reads.error("a"), PeerLostError)


# Drivers that cannot say.


def test_a_read_of_which_nothing_can_be_said_is_over_when_its_connection_is_closed() -> None:
    driver = Driver()
    reads = Reads(driver)
    for name, peer in (("a", ONE), ("b", ONE), ("other", OTHER)):
        reads.add(name, peer)
    reads.transfers.progress()
    driver.unclear = {TransferId(1), TransferId(2)}  # of which the second is the other peer's
    driver.says[TransferId(3)] = DONE
    assert reads.transfers.progress()
    assert reads.heard == ["b"]
    assert reads.failing.keys() == {"a", "other"}
    assert isinstance(reads.failing["a"], StatusUnknownError)
    for closed in (False, True):
        assert "a" not in reads.outcomes
        reads.transfers.begin_disconnect(ONE)
        reads.transfers.end_disconnect(ONE, closed=closed)
        reads.transfers.progress()
    assert isinstance(reads.error("a"), StatusUnknownError)
    assert "other" not in reads.outcomes, "its connection stands"
    reads.add("c")
    reads.transfers.progress()
    driver.unclear.add(TransferId(4))
    reads.transfers.progress()
    assert "c" not in reads.outcomes, "a connection that was closed is remembered for what it had"


# Whatever comes.

STATES = st.sampled_from([State.PENDING, State.FAILING, State.DONE, State.FAILED])


class AnyOrder(RuleBasedStateMachine):
    """Every job is heard of once, when it is quiet, and not before; and all are in the end."""

    LIMIT = 3

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(limit=self.LIMIT)
        self.reads = Reads(self.driver)
        self.names: list[str] = []
        self.leaving: set[PeerId] = set()

    @rule(peer=st.sampled_from([ONE, OTHER]), urgent=st.booleans(), nbytes=st.integers(1, 100))
    def adds(self, peer: PeerId, urgent: bool, nbytes: int) -> None:
        if peer not in self.leaving:
            self.names.append(f"job {len(self.names)}")
            self.reads.add(self.names[-1], peer, urgent=urgent, nbytes=nbytes, tags=["all"])

    @precondition(lambda self: self.names)
    @rule(data=st.data(), everybody=st.booleans())
    def cancels(self, data: st.DataObject, everybody: bool) -> None:
        self.reads.transfers.cancel(data.draw(st.sampled_from(self.names)))
        if everybody:
            self.reads.transfers.cancel("all")

    @precondition(lambda self: self.driver.says)
    @rule(data=st.data(), state=STATES, unclear=st.booleans())
    def happens(self, data: st.DataObject, state: State, unclear: bool) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.driver.says)))
        error = TransportError("out") if state in (State.FAILING, State.FAILED) else None
        if not self.driver.says[transfer].state.final:
            self.driver.says[transfer] = Status(state=state, error=error)
        (self.driver.unclear.add if unclear else self.driver.unclear.discard)(transfer)

    @rule(peer=st.sampled_from([ONE, OTHER]))
    def leaves(self, peer: PeerId) -> None:
        if peer not in self.leaving:
            self.leaving.add(peer)
            self.reads.transfers.begin_disconnect(peer)

    @rule(peer=st.sampled_from([ONE, OTHER]))
    def end_disconnect(self, peer: PeerId) -> None:
        if peer in self.leaving:
            self.leaving.discard(peer)
            self.reads.transfers.end_disconnect(peer, closed=False)

    @rule()
    def progresses(self) -> None:
        self.driver.polls.clear()
        self.reads.transfers.progress()
        of = [peer for peer, _, _ in self.driver.posted]
        for polled in self.driver.polls:
            assert self.leaving.isdisjoint(of[transfer - 1] for transfer in polled)

    @invariant()
    def all_are_there(self) -> None:
        assert len(self.driver.says) <= self.LIMIT
        assert len(self.reads.transfers) + len(self.reads.outcomes) == len(self.names)
        assert len(set(self.reads.heard)) == len(self.reads.heard)

    def teardown(self) -> None:
        self.driver.unclear.clear()
        for peer in list(self.leaving):
            self.end_disconnect(peer)
        for _ in range(2 * len(self.names) + 2):
            for transfer in self.driver.says:
                self.driver.says[transfer] = DONE
            self.reads.transfers.progress()
        assert sorted(self.reads.heard) == sorted(self.names)
        assert len(self.reads.transfers) == 0
        assert not self.reads.transfers._under_way


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
