"""``Loads``: the next actions of each load, and when it is over."""

from __future__ import annotations

import pytest

from kvferry.core.errors import DeadlineError, KVFerryError, StaleError, TransportError
from kvferry.core.lifecycle.holds import NOTHING, Hold, RequestId
from kvferry.core.lifecycle.loads import LoadAction, LoadId, Loads, RemoteRank
from kvferry.core.metrics import Stage

HOLD = Hold(slot=1, generation=7)
OTHER = Hold(slot=1, generation=8)
REQUEST = RequestId("a")
DEADLINE = 100.0
CHECK, READ, FENCE = LoadAction.CHECK, LoadAction.READ, LoadAction.FENCE
CANCEL, DONE, ABANDON = LoadAction.CANCEL, LoadAction.DONE, LoadAction.ABANDON
REPORT = LoadAction.REPORT, -1
CABLE = TransportError("cable")
GIVEN_UP = KVFerryError("given up")


def ranks(*reading: int, notified: tuple[int, ...] = ()) -> tuple[RemoteRank, ...]:
    return tuple(RemoteRank(rank=rank, reads=rank in reading) for rank in (*reading, *notified))


class Load:
    """One load, whose actions are returned as (op, rank)."""

    def __init__(
        self,
        *reading: int,
        notified: tuple[int, ...] = (),
        computed: bool = True,
        reads: bool = True,
        handshake: bool = True,
        shared: bool = False,
    ) -> None:
        self.loads = Loads()
        self.id = self.loads.begin(
            REQUEST, HOLD, computed=computed, reads=reads, deadline=DEADLINE, shared=shared
        )
        self.reported: list[KVFerryError | None] = []
        self.failed_at: Stage | None = None
        if handshake:
            self.connect(*reading, notified=notified)

    def connect(self, *reading: int, notified: tuple[int, ...] = ()) -> None:
        self.loads.handshake_succeeded(self.id, ranks(*reading, notified=notified))

    @property
    def acts(self) -> list[tuple[LoadAction, int]]:
        """Return the actions that are to be performed next."""
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

    def check(self, word: int) -> None:
        self.loads.checked(self.id, 0, word)

    def read(self, rank: int = 0) -> None:
        self.loads.read(self.id, rank)

    def fence(self, rank: int = 0, word: int = HOLD.ready) -> None:
        self.read(rank)
        self.loads.fenced(self.id, rank, word)

    def lose(self, rank: int = 0, error: KVFerryError = CABLE) -> None:
        self.loads.lost(self.id, rank, error)

    def abort(self, error: KVFerryError = GIVEN_UP) -> None:
        self.loads.abort(self.id, error)


def test_a_load_is_read_then_fenced_then_reported() -> None:
    load = Load(handshake=False)
    assert load.acts == []
    load.connect(0)
    assert load.acts == [(READ, 0)]
    load.read()
    assert load.acts == [(FENCE, 0)]
    assert not load.is_over
    load.loads.fenced(load.id, 0, HOLD.ready)
    assert load.acts == [REPORT]
    assert load.error is None
    assert load.is_over


def test_every_rank_is_fenced_separately_and_unread_ranks_are_notified_at_the_end() -> None:
    load = Load(0, 2, notified=(1,))
    assert load.acts == [(READ, 0), (READ, 2)]
    load.fence(2)
    assert load.acts == [(FENCE, 2)]
    load.read()
    assert load.acts == [(FENCE, 0)]
    load.loads.fenced(load.id, 0, HOLD.ready)
    assert load.acts == [(DONE, 1), REPORT]
    assert load.error is None


@pytest.mark.parametrize("word", [HOLD.ready, NOTHING])
def test_a_shared_load_is_fenced_and_sends_no_done_or_abandon(word: int) -> None:
    load = Load(0, notified=(1,), shared=True)
    assert load.acts == [(READ, 0)]
    load.fence(word=word)
    assert load.acts == [(FENCE, 0), REPORT]
    assert (load.error is None) is (word == HOLD.ready)
    assert load.is_over


@pytest.mark.parametrize("handshake", [True, False])
def test_an_aborted_shared_load_sends_no_done_or_abandon(handshake: bool) -> None:
    """Not even if the handshake succeeds afterwards."""
    load = Load(0, notified=(1,), shared=True, handshake=handshake)
    load.abort()
    if handshake:
        assert load.acts == [(READ, 0), (CANCEL, 0)]
        load.lose()
    assert load.acts == [REPORT]
    load.connect(0, notified=(1,))
    assert load.acts == []
    assert load.is_over


@pytest.mark.parametrize("shared", [True, False])
def test_a_load_that_reads_nothing_sends_done_to_all_ranks_unless_shared(shared: bool) -> None:
    load = Load(0, notified=(1,), reads=False, shared=shared)
    assert load.acts == [*([] if shared else [(DONE, 0), (DONE, 1)]), REPORT]
    assert load.error is None


def test_a_load_without_remote_ranks_is_reported_at_once() -> None:
    load = Load()
    assert load.acts == [REPORT]
    assert load.error is None
    assert load.is_over


@pytest.mark.parametrize(
    ("computed", "word", "stale"),
    [
        (True, NOTHING, True),
        (True, OTHER.ready, True),
        (True, OTHER.computing, True),
        (True, HOLD.computing, False),
        (False, NOTHING, True),
        (False, OTHER.ready, True),
        (False, OTHER.computing, True),
        (False, HOLD.computing, True),
    ],
)
def test_a_fence_decides_by_the_word(computed: bool, word: int, stale: bool) -> None:
    """It may read "computing" if the ticket says ``computed``."""
    load = Load(0, computed=computed)
    if not computed:
        load.check(HOLD.ready)
    load.fence(word=word)
    assert load.acts[-2:] == [(ABANDON, 0) if stale else (FENCE, 0), REPORT]
    assert isinstance(load.error, StaleError) is stale
    assert load.is_over


def test_a_check_that_reads_computing_is_repeated_once_at_each_tick() -> None:
    load = Load(0, computed=False)
    assert load.acts == [(CHECK, 0)]
    for now in (1.0, 2.0):
        load.check(HOLD.computing)
        assert load.acts == []
        assert load.loads.is_computing(load.id)
        load.loads.tick(now)
        assert load.acts == [(CHECK, 0)]
        assert not load.loads.is_computing(load.id)
        load.loads.tick(now)
        assert load.acts == []
    load.check(HOLD.ready)
    assert load.acts == [(READ, 0)]
    load.fence()
    assert load.acts == [(FENCE, 0), REPORT]
    assert load.error is None


@pytest.mark.parametrize("word", [HOLD.ready, HOLD.computing, NOTHING])
def test_a_check_that_ends_after_a_failure_starts_no_read(word: int) -> None:
    load = Load(0, computed=False)
    load.abort()
    assert load.acts == [(CHECK, 0), (CANCEL, 0)]
    load.check(word)
    assert load.acts == [(ABANDON, 0), REPORT]
    assert load.error is GIVEN_UP


@pytest.mark.parametrize("word", [NOTHING, OTHER.ready])
def test_a_check_that_reads_another_word_is_stale_and_starts_no_read(word: int) -> None:
    load = Load(0, computed=False)
    assert load.acts == [(CHECK, 0)]
    load.check(word)
    assert load.acts == [(ABANDON, 0), REPORT]
    assert isinstance(load.error, StaleError)


def test_a_failure_cancels_the_other_reads_and_waits_for_them() -> None:
    load = Load(0, 1, notified=(2,))
    assert load.acts == [(READ, 0), (READ, 1)]
    load.lose()
    assert load.acts == [(CANCEL, 1)]
    assert len(load.loads) == 1
    load.lose(1, TransportError("cancelled"))
    assert load.acts == [(ABANDON, 0), (ABANDON, 1), (ABANDON, 2), REPORT]
    assert load.error is CABLE
    assert load.is_over


def test_a_read_that_ends_after_a_failure_is_not_fenced() -> None:
    load = Load(0, 1)
    load.lose()
    assert (CANCEL, 1) in load.acts
    load.read(1)
    assert load.acts == [(ABANDON, 0), (ABANDON, 1), REPORT]


def test_a_valid_fence_does_not_undo_a_failure() -> None:
    load = Load(0, 1)
    load.read(0)
    load.lose(1)
    load.loads.fenced(load.id, 0, HOLD.ready)
    assert load.acts[-1] == REPORT
    assert load.error is CABLE


def test_a_failing_read_cancels_the_others_and_is_reported_once_lost() -> None:
    load = Load(0, 1)
    assert load.acts == [(READ, 0), (READ, 1)]
    load.loads.failing(load.id, 0, CABLE)
    assert load.acts == [(CANCEL, 0), (CANCEL, 1)]
    load.loads.failing(load.id, 0, CABLE)
    load.lose(1, TransportError("cancelled"))
    assert load.acts == []
    load.lose(0, TransportError("quiet"))
    assert load.acts == [(ABANDON, 0), (ABANDON, 1), REPORT]
    assert load.error is CABLE


STAGES = {
    "handshake": Stage.HANDSHAKE,
    "checking": Stage.CHECK,
    "recheck": Stage.CHECK,
    "reading": Stage.TRANSFER,
    "fencing": Stage.FENCE,
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_load_can_be_aborted_in_every_stage(stage: str) -> None:
    load = Load(0, computed=False, handshake=stage != "handshake")
    if stage in ("reading", "fencing", "recheck"):
        load.check(HOLD.computing if stage == "recheck" else HOLD.ready)
    if stage == "fencing":
        load.read()
    assert load.loads.stage(load.id) is STAGES[stage]
    assert load.acts is not None
    load.abort()
    if stage in ("checking", "reading", "fencing"):
        assert load.acts == [(CANCEL, 0)]
        load.lose()
    assert load.acts == [*([] if stage == "handshake" else [(ABANDON, 0)]), REPORT]
    assert load.error is GIVEN_UP
    assert load.failed_at is STAGES[stage]
    assert load.loads.stage(load.id) is None


def test_the_deadline_error_names_the_stage() -> None:
    load = Load(0, computed=False)
    load.check(HOLD.computing)
    load.loads.tick(DEADLINE - 0.1)
    load.check(HOLD.computing)
    assert load.acts == [(CHECK, 0), (CHECK, 0)]
    load.loads.tick(DEADLINE)
    assert load.acts == [(ABANDON, 0), REPORT]
    assert isinstance(load.error, DeadlineError)
    assert "(stage: check, the producer still computes the pages)" in str(load.error)
    assert "load_timeout" in str(load.error)


def test_a_read_past_the_deadline_is_cancelled_and_waited_for() -> None:
    load = Load(0)
    assert load.acts == [(READ, 0)]
    load.loads.tick(DEADLINE + 1)
    load.loads.tick(DEADLINE + 2)
    assert load.acts == [(CANCEL, 0)]
    load.read()
    assert load.acts == [(ABANDON, 0), REPORT]
    assert isinstance(load.error, DeadlineError)


def test_a_failed_handshake_fails_the_load_and_notifies_no_rank() -> None:
    load = Load(handshake=False)
    load.loads.handshake_failed(load.id, CABLE)
    assert load.acts == [REPORT]
    assert load.error is CABLE
    assert load.is_over


def test_a_load_aborted_during_its_handshake_is_abandoned_after_it() -> None:
    load = Load(handshake=False)
    load.abort()
    assert load.acts == [REPORT]
    assert len(load.loads) == 0
    assert load.id in load.loads
    load.connect(0, notified=(1,))
    assert load.acts == [(ABANDON, 0), (ABANDON, 1)]
    assert load.is_over


def test_a_load_aborted_during_a_handshake_that_fails_is_reported_once() -> None:
    load = Load(handshake=False)
    load.abort()
    load.loads.tick(DEADLINE)
    load.abort(KVFerryError("again"))
    load.loads.handshake_failed(load.id, CABLE)
    assert load.acts == [REPORT]
    assert load.error is GIVEN_UP
    assert load.is_over


def test_unexpected_events_change_nothing() -> None:
    load = Load(0)
    assert load.acts == [(READ, 0)]
    for load_id, rank in ((LoadId(99), 0), (load.id, 5)):
        load.loads.read(load_id, rank)
        load.loads.lost(load_id, rank, CABLE)
        load.loads.failing(load_id, rank, CABLE)
        load.loads.checked(load_id, rank, HOLD.ready)
        load.loads.fenced(load_id, rank, HOLD.ready)
    load.loads.handshake_succeeded(LoadId(99), ranks(0))
    load.loads.handshake_failed(LoadId(99), CABLE)
    load.loads.abort(LoadId(99), CABLE)
    load.check(NOTHING)
    load.loads.fenced(load.id, 0, HOLD.ready)
    load.connect(0)
    load.loads.handshake_failed(load.id, CABLE)
    assert load.acts == []
    load.fence()
    assert load.acts == [(FENCE, 0), REPORT]
    load.abort()
    load.loads.tick(DEADLINE)
    load.connect(0)
    assert load.acts == []


def test_errors_of_a_rank_that_is_over_do_not_fail_the_load() -> None:
    load = Load(0, 1)
    load.fence(0)
    load.lose()
    load.loads.failing(load.id, 0, CABLE)
    load.fence(1)
    assert load.acts[-1] == REPORT
    assert load.error is None


def test_pages_are_wanted_until_the_load_fails_or_ends() -> None:
    good, bad, late = Load(0), Load(0), Load(handshake=False)
    assert all(each.loads.wanted(each.id) for each in (good, bad, late))
    good.fence()
    bad.loads.failing(bad.id, 0, CABLE)
    late.abort()
    assert late.id in late.loads
    assert not any(each.loads.wanted(each.id) for each in (good, bad, late))


def test_loads_are_independent_and_ids_are_not_reused() -> None:
    loads, ids = Loads(), []
    for _ in range(3):
        ids.append(loads.begin(REQUEST, HOLD, computed=True, reads=True, deadline=DEADLINE))
        loads.handshake_succeeded(ids[-1], ranks(0))
    loads.lost(ids[1], 0, CABLE)
    assert len(loads) == 2
    again = loads.begin(REQUEST, HOLD, computed=True, reads=True, deadline=DEADLINE)
    assert len({*ids, again}) == 4
    reports = [a for a in loads.take_actions() if a.op is LoadAction.REPORT]
    assert [(each.load, each.error) for each in reports] == [(ids[1], CABLE)]
