"""``Loads``: the next actions of each load, and when it is over."""

from __future__ import annotations

import pytest

from kvferry.core.errors import DeadlineError, KVFerryError, StaleError, TransportError
from kvferry.core.lifecycle.holds import NOTHING, Hold, RequestId
from kvferry.core.lifecycle.loads import Action, LoadAction, LoadId, Loads, RemoteRank
from kvferry.core.metrics import Stage

HOLD = Hold(slot=1, generation=7)
OTHER = Hold(slot=1, generation=8)
REQUEST = RequestId("a")
DEADLINE = 100.0


def read_ranks(*ranks: int) -> tuple[RemoteRank, ...]:
    return tuple(RemoteRank(rank=rank, reads=True) for rank in ranks)


def notified_ranks(*ranks: int) -> tuple[RemoteRank, ...]:
    return tuple(RemoteRank(rank=rank, reads=False) for rank in ranks)


class LoadHarness:
    """One load, whose actions are returned as (op, rank)."""

    def __init__(
        self,
        *remote_ranks: RemoteRank,
        computed: bool = True,
        reads_pages: bool = True,
        handshake: bool = True,
        shared: bool = False,
    ) -> None:
        self.loads = Loads()
        self.id = self.loads.begin(
            REQUEST, HOLD, computed=computed, reads=reads_pages, deadline=DEADLINE, shared=shared
        )
        self.reported: list[KVFerryError | None] = []
        self.failed_at: Stage | None = None
        if handshake:
            self.loads.handshake_succeeded(self.id, remote_ranks)

    @property
    def next_actions(self) -> list[tuple[LoadAction, int]]:
        actions = self.loads.take_actions()
        assert {action.load for action in actions} <= {self.id}
        for action in actions:
            if action.op is LoadAction.REPORT:
                self.reported.append(action.error)
                self.failed_at = action.stage
        return [(action.op, action.rank) for action in actions]

    @property
    def error(self) -> KVFerryError | None:
        (error,) = self.reported
        return error

    @property
    def is_over(self) -> bool:
        return len(self.loads) == 0 and self.id not in self.loads

    def fence(self, rank: int = 0, word: int = HOLD.ready) -> None:
        self.loads.read(self.id, rank)
        self.loads.fenced(self.id, rank, word)


def test_a_load_is_read_then_fenced_then_reported() -> None:
    harness = LoadHarness(handshake=False)
    assert harness.next_actions == []
    harness.loads.handshake_succeeded(harness.id, read_ranks(0))
    assert harness.next_actions == [(LoadAction.READ, 0)]
    harness.loads.read(harness.id, 0)
    assert harness.next_actions == [(LoadAction.FENCE, 0)]
    assert not harness.is_over
    harness.loads.fenced(harness.id, 0, HOLD.ready)
    assert harness.next_actions == [(LoadAction.REPORT, -1)]
    assert harness.error is None
    assert harness.is_over


def test_every_rank_is_fenced_separately_and_unread_ranks_are_notified_at_the_end() -> None:
    harness = LoadHarness(*read_ranks(0, 2), *notified_ranks(1))
    assert harness.next_actions == [(LoadAction.READ, 0), (LoadAction.READ, 2)]
    harness.fence(2)
    assert harness.next_actions == [(LoadAction.FENCE, 2)]
    harness.loads.read(harness.id, 0)
    assert harness.next_actions == [(LoadAction.FENCE, 0)]
    harness.loads.fenced(harness.id, 0, HOLD.ready)
    assert harness.next_actions == [(LoadAction.DONE, 1), (LoadAction.REPORT, -1)]
    assert harness.error is None


@pytest.mark.parametrize("word", [HOLD.ready, NOTHING])
def test_a_shared_load_is_fenced_and_sends_no_done_or_abandon(word: int) -> None:
    """Neither to ranks that it reads nor to other ranks, even if it fails."""
    harness = LoadHarness(*read_ranks(0), *notified_ranks(1), shared=True)
    assert harness.next_actions == [(LoadAction.READ, 0)]
    harness.fence(word=word)
    assert harness.next_actions == [(LoadAction.FENCE, 0), (LoadAction.REPORT, -1)]
    assert (harness.error is None) is (word == HOLD.ready)
    assert harness.is_over


@pytest.mark.parametrize("handshake", [True, False])
def test_an_aborted_shared_load_sends_no_done_or_abandon(handshake: bool) -> None:
    """Not even if the handshake succeeds afterwards."""
    harness = LoadHarness(*read_ranks(0), *notified_ranks(1), shared=True, handshake=handshake)
    harness.loads.abort(harness.id, KVFerryError("given up"))
    if handshake:
        assert harness.next_actions == [(LoadAction.READ, 0), (LoadAction.CANCEL, 0)]
        harness.loads.lost(harness.id, 0, KVFerryError("cancelled"))
    assert harness.next_actions == [(LoadAction.REPORT, -1)]
    harness.loads.handshake_succeeded(harness.id, (*read_ranks(0), *notified_ranks(1)))
    assert harness.next_actions == []
    assert harness.is_over


@pytest.mark.parametrize("shared", [True, False])
def test_a_load_that_reads_nothing_sends_done_to_all_ranks_unless_shared(shared: bool) -> None:
    harness = LoadHarness(*read_ranks(0), *notified_ranks(1), reads_pages=False, shared=shared)
    notified = [] if shared else [(LoadAction.DONE, 0), (LoadAction.DONE, 1)]
    assert harness.next_actions == [*notified, (LoadAction.REPORT, -1)]


@pytest.mark.parametrize("computed", [True, False])
@pytest.mark.parametrize("word", [NOTHING, OTHER.ready, OTHER.computing])
def test_a_fence_that_reads_another_word_is_stale(word: int, computed: bool) -> None:
    harness = LoadHarness(*read_ranks(0), computed=computed)
    if not computed:
        harness.loads.checked(harness.id, 0, HOLD.ready)
    harness.fence(word=word)
    assert harness.next_actions[-2:] == [(LoadAction.ABANDON, 0), (LoadAction.REPORT, -1)]
    assert isinstance(harness.error, StaleError)
    assert harness.is_over


def test_a_fence_may_read_computing_if_the_ticket_says_computed() -> None:
    harness = LoadHarness(*read_ranks(0), computed=True)
    harness.fence(word=HOLD.computing)
    assert harness.next_actions[-1] == (LoadAction.REPORT, -1)
    assert harness.error is None


def test_a_fence_that_reads_computing_is_stale_if_the_ticket_does_not_say_computed() -> None:
    harness = LoadHarness(*read_ranks(0), computed=False)
    harness.loads.checked(harness.id, 0, HOLD.ready)
    harness.fence(word=HOLD.computing)
    assert harness.next_actions[-1] == (LoadAction.REPORT, -1)
    assert isinstance(harness.error, StaleError)


def test_a_check_that_reads_computing_is_repeated_at_each_tick() -> None:
    harness = LoadHarness(*read_ranks(0), computed=False)
    assert harness.next_actions == [(LoadAction.CHECK, 0)]
    for now in (1.0, 2.0):
        harness.loads.checked(harness.id, 0, HOLD.computing)
        assert harness.next_actions == []
        harness.loads.tick(now)
        assert harness.next_actions == [(LoadAction.CHECK, 0)]
        harness.loads.tick(now)
        assert harness.next_actions == []
    harness.loads.checked(harness.id, 0, HOLD.ready)
    assert harness.next_actions == [(LoadAction.READ, 0)]
    harness.fence()
    assert harness.next_actions == [(LoadAction.FENCE, 0), (LoadAction.REPORT, -1)]
    assert harness.error is None


@pytest.mark.parametrize("word", [HOLD.ready, HOLD.computing, NOTHING])
def test_a_check_that_ends_after_a_failure_starts_no_read(word: int) -> None:
    harness = LoadHarness(*read_ranks(0), computed=False)
    aborted = KVFerryError("given up")
    harness.loads.abort(harness.id, aborted)
    assert harness.next_actions == [(LoadAction.CHECK, 0), (LoadAction.CANCEL, 0)]
    harness.loads.checked(harness.id, 0, word)
    assert harness.next_actions == [(LoadAction.ABANDON, 0), (LoadAction.REPORT, -1)]
    assert harness.error is aborted


@pytest.mark.parametrize("word", [NOTHING, OTHER.ready])
def test_a_check_that_reads_another_word_is_stale_and_starts_no_read(word: int) -> None:
    harness = LoadHarness(*read_ranks(0), computed=False)
    assert harness.next_actions == [(LoadAction.CHECK, 0)]
    harness.loads.checked(harness.id, 0, word)
    assert harness.next_actions == [(LoadAction.ABANDON, 0), (LoadAction.REPORT, -1)]
    assert isinstance(harness.error, StaleError)


def test_a_failure_cancels_the_other_reads_and_waits_for_them() -> None:
    harness = LoadHarness(*read_ranks(0, 1), *notified_ranks(2))
    assert harness.next_actions == [(LoadAction.READ, 0), (LoadAction.READ, 1)]
    failure = TransportError("cable")
    harness.loads.lost(harness.id, 0, failure)
    assert harness.next_actions == [(LoadAction.CANCEL, 1)]
    assert len(harness.loads) == 1
    harness.loads.lost(harness.id, 1, TransportError("cancelled"))
    assert harness.next_actions == [
        (LoadAction.ABANDON, 0),
        (LoadAction.ABANDON, 1),
        (LoadAction.ABANDON, 2),
        (LoadAction.REPORT, -1),
    ]
    assert harness.error is failure
    assert harness.is_over


def test_a_read_that_ends_after_a_failure_is_not_fenced() -> None:
    harness = LoadHarness(*read_ranks(0, 1))
    harness.loads.lost(harness.id, 0, TransportError("cable"))
    assert (LoadAction.CANCEL, 1) in harness.next_actions
    harness.loads.read(harness.id, 1)
    assert harness.next_actions == [
        (LoadAction.ABANDON, 0),
        (LoadAction.ABANDON, 1),
        (LoadAction.REPORT, -1),
    ]


def test_a_valid_fence_does_not_undo_a_failure() -> None:
    harness = LoadHarness(*read_ranks(0, 1))
    harness.loads.read(harness.id, 0)
    harness.loads.lost(harness.id, 1, TransportError("cable"))
    harness.loads.fenced(harness.id, 0, HOLD.ready)
    assert harness.next_actions[-1] == (LoadAction.REPORT, -1)
    assert isinstance(harness.error, TransportError)


def test_a_failing_read_cancels_the_others_and_is_reported_once_lost() -> None:
    harness = LoadHarness(*read_ranks(0, 1))
    assert harness.next_actions == [(LoadAction.READ, 0), (LoadAction.READ, 1)]
    error = TransportError("the peer is gone")
    harness.loads.failing(harness.id, 0, error)
    assert harness.next_actions == [(LoadAction.CANCEL, 0), (LoadAction.CANCEL, 1)]
    harness.loads.failing(harness.id, 0, error)
    harness.loads.lost(harness.id, 1, TransportError("cancelled"))
    assert harness.next_actions == []
    harness.loads.lost(harness.id, 0, TransportError("quiet"))
    assert harness.next_actions == [
        (LoadAction.ABANDON, 0),
        (LoadAction.ABANDON, 1),
        (LoadAction.REPORT, -1),
    ]
    assert harness.error is error


STAGES = {
    "handshake": Stage.HANDSHAKE,
    "checking": Stage.CHECK,
    "recheck": Stage.CHECK,
    "reading": Stage.TRANSFER,
    "fencing": Stage.FENCE,
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_load_can_be_aborted_in_every_stage(stage: str) -> None:
    harness = LoadHarness(*read_ranks(0), computed=False, handshake=stage != "handshake")
    if stage != "handshake":
        harness.loads.checked(harness.id, 0, HOLD.ready if stage[-3:] == "ing" else HOLD.computing)
    if stage == "checking":
        harness = LoadHarness(*read_ranks(0), computed=False)
    if stage == "fencing":
        harness.loads.read(harness.id, 0)
    assert harness.loads.stage(harness.id) is STAGES[stage]
    assert harness.loads.request(harness.id) == REQUEST
    assert harness.next_actions is not None
    aborted = KVFerryError("given up")
    harness.loads.abort(harness.id, aborted)
    if stage in ("checking", "reading", "fencing"):
        assert harness.next_actions == [(LoadAction.CANCEL, 0)]
        harness.loads.lost(harness.id, 0, TransportError("cancelled"))
    notified = [] if stage == "handshake" else [(LoadAction.ABANDON, 0)]
    assert harness.next_actions == [*notified, (LoadAction.REPORT, -1)]
    assert harness.error is aborted
    assert harness.failed_at is STAGES[stage]
    assert harness.loads.stage(harness.id) is None


def test_the_deadline_error_names_the_stage() -> None:
    harness = LoadHarness(*read_ranks(0), computed=False)
    harness.loads.checked(harness.id, 0, HOLD.computing)
    harness.loads.tick(DEADLINE - 0.1)
    harness.loads.checked(harness.id, 0, HOLD.computing)
    assert harness.next_actions == [(LoadAction.CHECK, 0), (LoadAction.CHECK, 0)]
    harness.loads.tick(DEADLINE)
    assert harness.next_actions == [(LoadAction.ABANDON, 0), (LoadAction.REPORT, -1)]
    assert isinstance(harness.error, DeadlineError)
    assert "(stage: check, the producer still computes the pages)" in str(harness.error)
    assert "load_timeout" in str(harness.error)


def test_a_read_past_the_deadline_is_cancelled_and_waited_for() -> None:
    harness = LoadHarness(*read_ranks(0))
    assert harness.next_actions == [(LoadAction.READ, 0)]
    harness.loads.tick(DEADLINE + 1)
    harness.loads.tick(DEADLINE + 2)
    assert harness.next_actions == [(LoadAction.CANCEL, 0)]
    harness.loads.read(harness.id, 0)
    assert harness.next_actions == [(LoadAction.ABANDON, 0), (LoadAction.REPORT, -1)]
    assert isinstance(harness.error, DeadlineError)


def test_a_failed_handshake_fails_the_load_and_notifies_no_rank() -> None:
    harness = LoadHarness(handshake=False)
    failure = KVFerryError("nobody answers")
    harness.loads.handshake_failed(harness.id, failure)
    assert harness.next_actions == [(LoadAction.REPORT, -1)]
    assert harness.error is failure
    assert harness.is_over


def test_a_load_aborted_during_its_handshake_is_abandoned_after_it() -> None:
    harness = LoadHarness(handshake=False)
    harness.loads.abort(harness.id, KVFerryError("given up"))
    assert harness.next_actions == [(LoadAction.REPORT, -1)]
    assert len(harness.loads) == 0
    assert harness.id in harness.loads
    harness.loads.handshake_succeeded(harness.id, (*read_ranks(0), *notified_ranks(1)))
    assert harness.next_actions == [(LoadAction.ABANDON, 0), (LoadAction.ABANDON, 1)]
    assert harness.is_over


def test_a_load_aborted_during_a_handshake_that_fails_is_reported_once() -> None:
    harness = LoadHarness(handshake=False)
    aborted = KVFerryError("given up")
    harness.loads.abort(harness.id, aborted)
    harness.loads.tick(DEADLINE)
    harness.loads.abort(harness.id, KVFerryError("again"))
    harness.loads.handshake_failed(harness.id, KVFerryError("nobody answers"))
    assert harness.next_actions == [(LoadAction.REPORT, -1)]
    assert harness.error is aborted
    assert harness.is_over


def test_a_load_that_reads_nothing_succeeds_and_sends_done_to_all_ranks() -> None:
    harness = LoadHarness(*read_ranks(0), *notified_ranks(1), reads_pages=False)
    assert harness.next_actions == [
        (LoadAction.DONE, 0),
        (LoadAction.DONE, 1),
        (LoadAction.REPORT, -1),
    ]
    assert harness.error is None


def test_a_load_without_remote_ranks_is_reported_at_once() -> None:
    harness = LoadHarness()
    assert harness.next_actions == [(LoadAction.REPORT, -1)]
    assert harness.error is None
    assert harness.is_over


def test_unexpected_events_change_nothing() -> None:
    harness = LoadHarness(*read_ranks(0))
    assert harness.next_actions == [(LoadAction.READ, 0)]
    late = TransportError("late")
    for load_id, rank in ((LoadId(99), 0), (harness.id, 5)):
        harness.loads.read(load_id, rank)
        harness.loads.lost(load_id, rank, late)
        harness.loads.failing(load_id, rank, late)
        harness.loads.checked(load_id, rank, HOLD.ready)
        harness.loads.fenced(load_id, rank, HOLD.ready)
    harness.loads.handshake_succeeded(LoadId(99), read_ranks(0))
    harness.loads.handshake_failed(LoadId(99), late)
    harness.loads.abort(LoadId(99), late)
    harness.loads.checked(harness.id, 0, NOTHING)
    harness.loads.fenced(harness.id, 0, HOLD.ready)
    harness.loads.handshake_succeeded(harness.id, read_ranks(0))
    harness.loads.handshake_failed(harness.id, late)
    assert harness.next_actions == []
    harness.fence()
    assert harness.next_actions == [(LoadAction.FENCE, 0), (LoadAction.REPORT, -1)]
    harness.loads.abort(harness.id, late)
    harness.loads.tick(DEADLINE)
    harness.loads.handshake_succeeded(harness.id, read_ranks(0))
    assert harness.next_actions == []


def test_errors_of_a_rank_that_is_over_do_not_fail_the_load() -> None:
    harness = LoadHarness(*read_ranks(0, 1))
    harness.fence(0)
    harness.loads.lost(harness.id, 0, TransportError("late"))
    harness.loads.failing(harness.id, 0, TransportError("late"))
    harness.fence(1)
    assert harness.next_actions[-1] == (LoadAction.REPORT, -1)
    assert harness.error is None


def test_pages_are_wanted_until_the_load_fails_or_ends() -> None:
    good, bad = LoadHarness(*read_ranks(0)), LoadHarness(*read_ranks(0))
    assert good.loads.wanted(good.id)
    assert bad.loads.wanted(bad.id)
    bad.loads.failing(bad.id, 0, TransportError("cable"))
    assert not bad.loads.wanted(bad.id)
    good.fence()
    assert not good.loads.wanted(good.id)
    late = LoadHarness(handshake=False)
    assert late.loads.wanted(late.id)
    late.loads.abort(late.id, KVFerryError("given up"))
    assert late.id in late.loads
    assert not late.loads.wanted(late.id)


def test_loads_are_independent_and_ids_are_not_reused() -> None:
    loads = Loads()
    ids = []
    for _ in range(3):
        ids.append(loads.begin(REQUEST, HOLD, computed=True, reads=True, deadline=DEADLINE))
        loads.handshake_succeeded(ids[-1], read_ranks(0))
    loads.lost(ids[1], 0, TransportError("cable"))
    assert len(loads) == 2
    again = loads.begin(REQUEST, HOLD, computed=True, reads=True, deadline=DEADLINE)
    assert len({*ids, again}) == 4
    reports = [a for a in loads.take_actions() if a.op is LoadAction.REPORT]
    assert [(a.load, type(a.error)) for a in reports] == [(ids[1], TransportError)]
    assert Action(op=LoadAction.READ, load=ids[0]).rank == -1
