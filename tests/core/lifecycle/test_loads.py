"""The consumer's worker half: what is done next, and when a load is over."""

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


def reads(*ranks: int) -> tuple[RemoteRank, ...]:
    return tuple(RemoteRank(rank=rank, reads=True) for rank in ranks)


def tells(*ranks: int) -> tuple[RemoteRank, ...]:
    return tuple(RemoteRank(rank=rank, reads=False) for rank in ranks)


class Bench:
    """One load, whose actions are looked at as (op, rank)."""

    def __init__(
        self,
        *parties: RemoteRank,
        computed: bool = True,
        pulls: bool = True,
        shakes: bool = True,
        shared: bool = False,
    ) -> None:
        self.loads = Loads()
        self.id = self.loads.begin(
            REQUEST, HOLD, computed=computed, reads=pulls, deadline=DEADLINE, shared=shared
        )
        self.reported: list[KVFerryError | None] = []
        self.failed_at: Stage | None = None
        if shakes:
            self.loads.handshake_succeeded(self.id, parties)

    @property
    def next(self) -> list[tuple[LoadAction, int]]:
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
    def over(self) -> bool:
        return len(self.loads) == 0 and self.id not in self.loads

    def fence(self, rank: int = 0, word: int = HOLD.ready) -> None:
        self.loads.read(self.id, rank)
        self.loads.fenced(self.id, rank, word)


def test_a_load_is_read_then_fenced_then_reported() -> None:
    bench = Bench(shakes=False)
    assert bench.next == []
    bench.loads.handshake_succeeded(bench.id, reads(0))
    assert bench.next == [(LoadAction.READ, 0)]
    bench.loads.read(bench.id, 0)
    assert bench.next == [(LoadAction.FENCE, 0)]
    assert not bench.over
    bench.loads.fenced(bench.id, 0, HOLD.ready)
    assert bench.next == [(LoadAction.REPORT, -1)]
    assert bench.error is None
    assert bench.over


def test_every_rank_is_fenced_for_itself_and_replicas_are_told_at_the_end() -> None:
    bench = Bench(*reads(0, 2), *tells(1))
    assert bench.next == [(LoadAction.READ, 0), (LoadAction.READ, 2)]
    bench.fence(2)
    assert bench.next == [(LoadAction.FENCE, 2)]
    bench.loads.read(bench.id, 0)
    assert bench.next == [(LoadAction.FENCE, 0)]
    bench.loads.fenced(bench.id, 0, HOLD.ready)
    assert bench.next == [(LoadAction.DONE, 1), (LoadAction.REPORT, -1)]
    assert bench.error is None


@pytest.mark.parametrize("word", [HOLD.ready, NOTHING])
def test_a_load_that_shares_its_hold_is_fenced_and_tells_nobody(word: int) -> None:
    """Neither ranks that it reads nor replicas, whether it fails or not."""
    bench = Bench(*reads(0), *tells(1), shared=True)
    assert bench.next == [(LoadAction.READ, 0)]
    bench.fence(word=word)
    assert bench.next == [(LoadAction.FENCE, 0), (LoadAction.REPORT, -1)]
    assert (bench.error is None) is (word == HOLD.ready)
    assert bench.over


@pytest.mark.parametrize("shakes", [True, False])
def test_a_load_that_shares_its_hold_is_given_up_and_tells_nobody(shakes: bool) -> None:
    """Nor does it when the handshake succeeds after that."""
    bench = Bench(*reads(0), *tells(1), shared=True, shakes=shakes)
    bench.loads.abort(bench.id, KVFerryError("given up"))
    if shakes:
        assert bench.next == [(LoadAction.READ, 0), (LoadAction.CANCEL, 0)]
        bench.loads.lost(bench.id, 0, KVFerryError("cancelled"))
    assert bench.next == [(LoadAction.REPORT, -1)]
    bench.loads.handshake_succeeded(bench.id, (*reads(0), *tells(1)))
    assert bench.next == []
    assert bench.over


@pytest.mark.parametrize("shared", [True, False])
def test_who_reads_nothing_tells_everybody_unless_it_shares(shared: bool) -> None:
    bench = Bench(*reads(0), *tells(1), pulls=False, shared=shared)
    told = [] if shared else [(LoadAction.DONE, 0), (LoadAction.DONE, 1)]
    assert bench.next == [*told, (LoadAction.REPORT, -1)]


@pytest.mark.parametrize("computed", [True, False])
@pytest.mark.parametrize("word", [NOTHING, OTHER.ready, OTHER.computing])
def test_a_fence_that_finds_another_word_is_stale(word: int, computed: bool) -> None:
    bench = Bench(*reads(0), computed=computed)
    if not computed:
        bench.loads.checked(bench.id, 0, HOLD.ready)
    bench.fence(word=word)
    assert bench.next[-2:] == [(LoadAction.ABANDON, 0), (LoadAction.REPORT, -1)]
    assert isinstance(bench.error, StaleError)
    assert bench.over


def test_a_fence_may_find_computing_where_the_ticket_says_computed() -> None:
    bench = Bench(*reads(0), computed=True)
    bench.fence(word=HOLD.computing)
    assert bench.next[-1] == (LoadAction.REPORT, -1)
    assert bench.error is None


def test_a_fence_may_not_find_computing_where_a_check_was_needed() -> None:
    bench = Bench(*reads(0), computed=False)
    bench.loads.checked(bench.id, 0, HOLD.ready)
    bench.fence(word=HOLD.computing)
    assert bench.next[-1] == (LoadAction.REPORT, -1)
    assert isinstance(bench.error, StaleError)


def test_pages_that_are_still_written_are_asked_for_again() -> None:
    bench = Bench(*reads(0), computed=False)
    assert bench.next == [(LoadAction.CHECK, 0)]
    for now in (1.0, 2.0):
        bench.loads.checked(bench.id, 0, HOLD.computing)
        assert bench.next == []
        bench.loads.tick(now)
        assert bench.next == [(LoadAction.CHECK, 0)]
        bench.loads.tick(now)
        assert bench.next == []
    bench.loads.checked(bench.id, 0, HOLD.ready)
    assert bench.next == [(LoadAction.READ, 0)]
    bench.fence()
    assert bench.next == [(LoadAction.FENCE, 0), (LoadAction.REPORT, -1)]
    assert bench.error is None


@pytest.mark.parametrize("word", [HOLD.ready, HOLD.computing, NOTHING])
def test_a_check_that_comes_after_a_failure_leads_to_nothing(word: int) -> None:
    bench = Bench(*reads(0), computed=False)
    given_up = KVFerryError("given up")
    bench.loads.abort(bench.id, given_up)
    assert bench.next == [(LoadAction.CHECK, 0), (LoadAction.CANCEL, 0)]
    bench.loads.checked(bench.id, 0, word)
    assert bench.next == [(LoadAction.ABANDON, 0), (LoadAction.REPORT, -1)]
    assert bench.error is given_up


@pytest.mark.parametrize("word", [NOTHING, OTHER.ready])
def test_a_check_that_finds_another_word_is_stale_and_nothing_is_read(word: int) -> None:
    bench = Bench(*reads(0), computed=False)
    assert bench.next == [(LoadAction.CHECK, 0)]
    bench.loads.checked(bench.id, 0, word)
    assert bench.next == [(LoadAction.ABANDON, 0), (LoadAction.REPORT, -1)]
    assert isinstance(bench.error, StaleError)


def test_a_failure_cancels_the_rest_and_waits_for_it() -> None:
    bench = Bench(*reads(0, 1), *tells(2))
    assert bench.next == [(LoadAction.READ, 0), (LoadAction.READ, 1)]
    failure = TransportError("cable")
    bench.loads.lost(bench.id, 0, failure)
    assert bench.next == [(LoadAction.CANCEL, 1)]
    assert len(bench.loads) == 1
    bench.loads.lost(bench.id, 1, TransportError("cancelled"))
    assert bench.next == [
        (LoadAction.ABANDON, 0),
        (LoadAction.ABANDON, 1),
        (LoadAction.ABANDON, 2),
        (LoadAction.REPORT, -1),
    ]
    assert bench.error is failure
    assert bench.over


def test_what_arrives_after_a_failure_is_not_fenced() -> None:
    bench = Bench(*reads(0, 1))
    bench.loads.lost(bench.id, 0, TransportError("cable"))
    assert (LoadAction.CANCEL, 1) in bench.next
    bench.loads.read(bench.id, 1)
    assert bench.next == [(LoadAction.ABANDON, 0), (LoadAction.ABANDON, 1), (LoadAction.REPORT, -1)]


def test_a_good_fence_does_not_save_a_load_that_failed() -> None:
    bench = Bench(*reads(0, 1))
    bench.loads.read(bench.id, 0)
    bench.loads.lost(bench.id, 1, TransportError("cable"))
    bench.loads.fenced(bench.id, 0, HOLD.ready)
    assert bench.next[-1] == (LoadAction.REPORT, -1)
    assert isinstance(bench.error, TransportError)


def test_a_failing_transfer_is_known_at_once_and_reported_when_quiet() -> None:
    bench = Bench(*reads(0, 1))
    assert bench.next == [(LoadAction.READ, 0), (LoadAction.READ, 1)]
    doom = TransportError("the peer is gone")
    bench.loads.failing(bench.id, 0, doom)
    assert bench.next == [(LoadAction.CANCEL, 0), (LoadAction.CANCEL, 1)]
    bench.loads.failing(bench.id, 0, doom)
    bench.loads.lost(bench.id, 1, TransportError("cancelled"))
    assert bench.next == []
    bench.loads.lost(bench.id, 0, TransportError("quiet"))
    assert bench.next == [(LoadAction.ABANDON, 0), (LoadAction.ABANDON, 1), (LoadAction.REPORT, -1)]
    assert bench.error is doom


COUNTED_AS = {
    "handshake": Stage.HANDSHAKE,
    "checking": Stage.CHECK,
    "recheck": Stage.CHECK,
    "reading": Stage.TRANSFER,
    "fencing": Stage.FENCE,
}


@pytest.mark.parametrize("stage", COUNTED_AS)
def test_a_load_can_be_given_up_in_every_stage(stage: str) -> None:
    bench = Bench(*reads(0), computed=False, shakes=stage != "handshake")
    if stage != "handshake":
        bench.loads.checked(bench.id, 0, HOLD.ready if stage[-3:] == "ing" else HOLD.computing)
    if stage == "checking":
        bench = Bench(*reads(0), computed=False)
    if stage == "fencing":
        bench.loads.read(bench.id, 0)
    assert bench.loads.stage(bench.id) is COUNTED_AS[stage]
    assert bench.loads.request(bench.id) == REQUEST
    assert bench.next is not None
    given_up = KVFerryError("given up")
    bench.loads.abort(bench.id, given_up)
    if stage in ("checking", "reading", "fencing"):
        assert bench.next == [(LoadAction.CANCEL, 0)]
        bench.loads.lost(bench.id, 0, TransportError("cancelled"))
    told = [] if stage == "handshake" else [(LoadAction.ABANDON, 0)]
    assert bench.next == [*told, (LoadAction.REPORT, -1)]
    assert bench.error is given_up
    assert bench.failed_at is COUNTED_AS[stage]
    assert bench.loads.stage(bench.id) is None


def test_a_load_that_waits_too_long_fails_and_says_where_it_stood() -> None:
    bench = Bench(*reads(0), computed=False)
    bench.loads.checked(bench.id, 0, HOLD.computing)
    bench.loads.tick(DEADLINE - 0.1)
    bench.loads.checked(bench.id, 0, HOLD.computing)
    assert bench.next == [(LoadAction.CHECK, 0), (LoadAction.CHECK, 0)]
    bench.loads.tick(DEADLINE)
    assert bench.next == [(LoadAction.ABANDON, 0), (LoadAction.REPORT, -1)]
    assert isinstance(bench.error, DeadlineError)
    assert "(stage: check, the producer still computes the pages)" in str(bench.error)
    assert "load_timeout" in str(bench.error)


def test_a_read_that_is_late_is_cancelled_and_waited_for() -> None:
    bench = Bench(*reads(0))
    assert bench.next == [(LoadAction.READ, 0)]
    bench.loads.tick(DEADLINE + 1)
    bench.loads.tick(DEADLINE + 2)
    assert bench.next == [(LoadAction.CANCEL, 0)]
    bench.loads.read(bench.id, 0)
    assert bench.next == [(LoadAction.ABANDON, 0), (LoadAction.REPORT, -1)]
    assert isinstance(bench.error, DeadlineError)


def test_a_failed_handshake_fails_the_load_and_tells_nobody() -> None:
    bench = Bench(shakes=False)
    failure = KVFerryError("nobody answers")
    bench.loads.handshake_failed(bench.id, failure)
    assert bench.next == [(LoadAction.REPORT, -1)]
    assert bench.error is failure
    assert bench.over


def test_what_was_given_up_during_the_handshake_is_abandoned_after_it() -> None:
    bench = Bench(shakes=False)
    bench.loads.abort(bench.id, KVFerryError("given up"))
    assert bench.next == [(LoadAction.REPORT, -1)]
    assert len(bench.loads) == 0
    assert bench.id in bench.loads
    bench.loads.handshake_succeeded(bench.id, (*reads(0), *tells(1)))
    assert bench.next == [(LoadAction.ABANDON, 0), (LoadAction.ABANDON, 1)]
    assert bench.over


def test_what_was_given_up_during_a_handshake_that_fails_is_reported_once() -> None:
    bench = Bench(shakes=False)
    given_up = KVFerryError("given up")
    bench.loads.abort(bench.id, given_up)
    bench.loads.tick(DEADLINE)
    bench.loads.abort(bench.id, KVFerryError("again"))
    bench.loads.handshake_failed(bench.id, KVFerryError("nobody answers"))
    assert bench.next == [(LoadAction.REPORT, -1)]
    assert bench.error is given_up
    assert bench.over


def test_where_nothing_is_to_be_read_everybody_is_told() -> None:
    bench = Bench(*reads(0), *tells(1), pulls=False)
    assert bench.next == [(LoadAction.DONE, 0), (LoadAction.DONE, 1), (LoadAction.REPORT, -1)]
    assert bench.error is None


def test_a_rank_that_has_nothing_to_read_reports_too() -> None:
    bench = Bench()
    assert bench.next == [(LoadAction.REPORT, -1)]
    assert bench.error is None
    assert bench.over


def test_events_about_what_is_over_or_was_never_asked_change_nothing() -> None:
    bench = Bench(*reads(0))
    assert bench.next == [(LoadAction.READ, 0)]
    late = TransportError("late")
    for load_id, rank in ((LoadId(99), 0), (bench.id, 5)):
        bench.loads.read(load_id, rank)
        bench.loads.lost(load_id, rank, late)
        bench.loads.failing(load_id, rank, late)
        bench.loads.checked(load_id, rank, HOLD.ready)
        bench.loads.fenced(load_id, rank, HOLD.ready)
    bench.loads.handshake_succeeded(LoadId(99), reads(0))
    bench.loads.handshake_failed(LoadId(99), late)
    bench.loads.abort(LoadId(99), late)
    bench.loads.checked(bench.id, 0, NOTHING)
    bench.loads.fenced(bench.id, 0, HOLD.ready)
    bench.loads.handshake_succeeded(bench.id, reads(0))
    bench.loads.handshake_failed(bench.id, late)
    assert bench.next == []
    bench.fence()
    assert bench.next == [(LoadAction.FENCE, 0), (LoadAction.REPORT, -1)]
    bench.loads.abort(bench.id, late)
    bench.loads.tick(DEADLINE)
    bench.loads.handshake_succeeded(bench.id, reads(0))
    assert bench.next == []


def test_a_rank_that_is_over_can_not_fail_the_others() -> None:
    bench = Bench(*reads(0, 1))
    bench.fence(0)
    bench.loads.lost(bench.id, 0, TransportError("late"))
    bench.loads.failing(bench.id, 0, TransportError("late"))
    bench.fence(1)
    assert bench.next[-1] == (LoadAction.REPORT, -1)
    assert bench.error is None


def test_the_pages_are_wanted_until_the_load_fails_or_ends() -> None:
    good, bad = Bench(*reads(0)), Bench(*reads(0))
    assert good.loads.wanted(good.id)
    assert bad.loads.wanted(bad.id)
    bad.loads.failing(bad.id, 0, TransportError("cable"))
    assert not bad.loads.wanted(bad.id)
    good.fence()
    assert not good.loads.wanted(good.id)
    late = Bench(shakes=False)
    assert late.loads.wanted(late.id)
    late.loads.abort(late.id, KVFerryError("given up"))
    assert late.id in late.loads
    assert not late.loads.wanted(late.id)


def test_loads_do_not_disturb_each_other_and_ids_do_not_come_back() -> None:
    loads = Loads()
    ids = []
    for _ in range(3):
        ids.append(loads.begin(REQUEST, HOLD, computed=True, reads=True, deadline=DEADLINE))
        loads.handshake_succeeded(ids[-1], reads(0))
    loads.lost(ids[1], 0, TransportError("cable"))
    assert len(loads) == 2
    again = loads.begin(REQUEST, HOLD, computed=True, reads=True, deadline=DEADLINE)
    assert len({*ids, again}) == 4
    reports = [a for a in loads.take_actions() if a.op is LoadAction.REPORT]
    assert [(a.load, type(a.error)) for a in reports] == [(ids[1], TransportError)]
    assert Action(op=LoadAction.READ, load=ids[0]).rank == -1
