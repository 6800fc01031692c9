"""``Loads``: the actions of early loads, whose parts come while the producer computes the rest."""

from __future__ import annotations

import pytest

from kvferry.core.errors import DeadlineError, KVFerryError, StaleError, TransportError
from kvferry.core.lifecycle.holds import NOTHING, Hold, RequestId
from kvferry.core.lifecycle.loads import MARK_SECONDS, LoadAction, Loads, RemoteRank
from kvferry.core.metrics import Stage

HOLD = Hold(slot=1, generation=7)
OTHER = Hold(slot=1, generation=8)
UNIT = 4
LATE = 1000.0

Acts = list[tuple[LoadAction, int, int | None]]
"""Each action's kind, with the tokens that are read already, and up to which it reads."""


class EarlyLoad:
    """One early load from one producer rank, whose first part covers 8 tokens."""

    def __init__(self, *, unit: int = UNIT, parties: int = 1, handshake: bool = True) -> None:
        self.loads = Loads()
        self.id = self.loads.begin(
            RequestId("a"), HOLD, computed=False, reads=True, deadline=10.0, early=8
        )
        self.now = 0.0
        self.error: KVFerryError | None = None
        self.reports = 0
        ranks = tuple(RemoteRank(rank=rank, reads=True) for rank in range(parties))
        if handshake:
            self.loads.handshake_succeeded(self.id, ranks, unit)

    def begin_marking(self) -> None:
        """Read the slot word, up to the moment when the watermark is read."""
        assert self.tick() == [(LoadAction.CHECK, 0, None)]
        assert self.check() == [(LoadAction.MARK, 0, None)]

    @property
    def acts(self) -> Acts:
        """Return the actions that are to be performed next."""
        actions = self.loads.take_actions()
        for action in actions:
            if action.op is LoadAction.REPORT:
                self.error, self.reports = action.error, self.reports + 1
        return [(action.op, action.since, action.until) for action in actions]

    def tick(self) -> Acts:
        """Let the time pass after which watermarks are read again."""
        self.now += MARK_SECONDS
        self.loads.tick(self.now)
        return self.acts

    def check(self, word: int = HOLD.computing) -> Acts:
        self.loads.checked(self.id, 0, word)
        return self.acts

    def mark(self, tokens: int, hold: Hold = HOLD) -> Acts:
        self.loads.marked(self.id, 0, hold.watermark(tokens))
        return self.acts

    def read(self) -> Acts:
        self.loads.read(self.id, 0)
        return self.acts

    def finish(self, hold: Hold = HOLD, *, computed: bool = True) -> Acts:
        self.loads.finish(self.id, hold, computed=computed, deadline=LATE)
        return self.acts

    def begin_reading(self) -> None:
        """Read the first 8 tokens, up to the moment when the read is under way."""
        self.begin_marking()
        assert self.mark(8) == [(LoadAction.READ, 0, 8)]


def test_finished_chunks_are_read_then_the_rest_is_fenced() -> None:
    load = EarlyLoad()
    load.begin_reading()
    assert load.read() == []
    load.loads.extend(load.id, HOLD, 16, 10.0)
    assert load.tick() == [(LoadAction.MARK, 0, None)]
    assert load.mark(14) == [(LoadAction.READ, 8, 12)]
    assert load.read() == []
    assert load.finish() == [(LoadAction.READ, 12, None)]
    assert load.read() == [(LoadAction.FENCE, 0, None)]
    load.loads.fenced(load.id, 0, HOLD.computing)
    assert load.acts == [(LoadAction.REPORT, 0, None)]
    assert load.error is None


def test_no_more_is_read_than_the_newest_part_covers() -> None:
    load = EarlyLoad()
    load.begin_marking()
    assert load.mark(100) == [(LoadAction.READ, 0, 8)]
    assert load.read() == []
    assert load.tick() == []


@pytest.mark.parametrize(("tokens", "hold"), [(0, HOLD), (3, HOLD), (8, OTHER)])
def test_a_watermark_of_no_page_of_the_hold_is_read_again_but_not_too_soon(
    tokens: int, hold: Hold
) -> None:
    load = EarlyLoad()
    load.begin_marking()
    assert load.mark(tokens, hold) == []
    load.loads.tick(load.now + MARK_SECONDS / 2)
    assert load.acts == []
    assert load.tick() == [(LoadAction.MARK, 0, None)]


@pytest.mark.parametrize("word", [NOTHING, OTHER.computing])
def test_a_hold_that_does_not_stand_yet_is_checked_again(word: int) -> None:
    load = EarlyLoad()
    load.tick()
    assert load.check(word) == []
    assert load.tick() == [(LoadAction.CHECK, 0, None)]
    assert load.check() == [(LoadAction.MARK, 0, None)]


def test_nothing_is_read_early_without_watermarks() -> None:
    load = EarlyLoad(unit=0)
    assert load.tick() == []
    assert load.finish() == [(LoadAction.READ, 0, None)]


def test_a_part_with_another_hold_has_everything_read_again() -> None:
    load = EarlyLoad()
    load.begin_reading()
    load.read()
    load.loads.extend(load.id, OTHER, 8, 10.0)
    assert load.tick() == [(LoadAction.CHECK, 0, None)]
    assert load.check(OTHER.computing) == [(LoadAction.MARK, 0, None)]
    assert load.mark(8, OTHER) == [(LoadAction.READ, 0, 8)]


@pytest.mark.parametrize("stage", ["check", "mark", "read"])
@pytest.mark.parametrize("is_last", [False, True], ids=["part", "last part"])
def test_what_is_under_way_for_an_older_hold_is_awaited_and_counts_nothing(
    stage: str, is_last: bool
) -> None:
    load = EarlyLoad()
    load.tick()
    if stage != "check":
        load.check()
    if stage == "read":
        load.mark(8)
    if is_last:
        assert load.finish(OTHER) == []
    else:
        load.loads.extend(load.id, OTHER, 8, 10.0)
        assert load.tick() == []
    ends = {"check": load.check, "mark": lambda: load.mark(8), "read": load.read}
    acts = ends[stage]()
    assert acts == ([(LoadAction.READ, 0, None)] if is_last else [])
    assert load.tick() == ([] if is_last else [(LoadAction.CHECK, 0, None)])


def test_a_read_for_an_older_hold_is_discarded() -> None:
    load = EarlyLoad()
    load.begin_reading()
    assert not load.loads.is_discarded(load.id, 0)
    load.loads.extend(load.id, OTHER, 8, 10.0)
    assert load.loads.is_discarded(load.id, 0)
    load.read()
    load.tick()
    assert not load.loads.is_discarded(load.id, 0)


def test_an_early_load_is_early_until_its_last_part_and_idle_between_its_reads() -> None:
    def state(load: EarlyLoad) -> tuple[bool, bool, bool]:
        return load.loads.is_early(load.id), load.loads.is_idle(load.id), load.loads.only_computing

    load, failed = EarlyLoad(), EarlyLoad()
    assert state(load) == (True, True, True)
    load.begin_reading()
    assert state(load) == (True, False, False)
    load.read()
    assert state(load) == (True, True, True)
    load.finish()
    assert state(load) == (False, False, False)
    failed.loads.abort(failed.id, KVFerryError("given up"))
    assert state(failed)[:2] == (False, False)


def test_a_check_that_was_too_early_is_repeated_after_the_last_part() -> None:
    load = EarlyLoad()
    load.tick()
    assert load.finish(computed=False) == []
    assert load.check(NOTHING) == [(LoadAction.CHECK, 0, None)]
    assert load.check(NOTHING)[-1] == (LoadAction.REPORT, 0, None)
    assert isinstance(load.error, StaleError)


def test_a_ticket_that_is_not_computed_is_checked_until_it_is_ready() -> None:
    load = EarlyLoad()
    load.begin_reading()
    load.read()
    assert load.finish(computed=False) == [(LoadAction.CHECK, 0, None)]
    assert load.check(HOLD.computing) == []
    assert load.tick() == [(LoadAction.CHECK, 0, None)]
    assert load.check(HOLD.ready) == [(LoadAction.READ, 8, None)]


def test_the_deadline_counts_after_the_last_part() -> None:
    load = EarlyLoad()
    load.begin_reading()
    load.read()
    load.now = 100.0
    assert (LoadAction.REPORT, 0, None) not in load.tick()
    load.finish(computed=False)
    load.now = LATE
    load.tick()
    load.check()
    assert isinstance(load.error, DeadlineError)


@pytest.mark.parametrize("stage", ["handshake", "idle", "check", "mark", "read"])
def test_an_early_load_can_be_aborted_at_any_time(stage: str) -> None:
    load = EarlyLoad(handshake=stage != "handshake")
    if stage in ("check", "mark", "read"):
        load.tick()
    if stage in ("mark", "read"):
        load.check()
    if stage == "read":
        load.mark(8)
    load.loads.abort(load.id, KVFerryError("given up"))
    acts = [op for op, _, _ in load.acts]
    if stage in ("check", "mark", "read"):
        assert acts == [LoadAction.CANCEL]
        load.loads.lost(load.id, 0, TransportError("cancelled"))
        acts = [op for op, _, _ in load.acts]
    told = [] if stage == "handshake" else [LoadAction.ABANDON]
    assert acts == [*told, LoadAction.REPORT]
    load.loads.extend(load.id, OTHER, 16, 10.0)
    load.loads.finish(load.id, OTHER, computed=True, deadline=LATE)
    assert load.tick() == []
    assert load.reports == 1


def test_a_watermark_that_lands_after_a_failure_starts_no_read() -> None:
    load = EarlyLoad(parties=2)
    load.tick()
    load.check()
    load.loads.lost(load.id, 1, TransportError("lost"))
    assert load.mark(8)[-1] == (LoadAction.REPORT, 0, None)


def test_a_last_part_during_the_handshake_makes_it_an_ordinary_load() -> None:
    load = EarlyLoad(handshake=False)
    assert load.finish() == []
    load.loads.handshake_succeeded(load.id, (RemoteRank(rank=0, reads=True),), UNIT)
    assert load.acts == [(LoadAction.READ, 0, None)]


def test_a_rank_that_reads_nothing_is_told_after_the_last_part() -> None:
    loads = Loads()
    load_id = loads.begin(RequestId("a"), HOLD, computed=False, reads=True, deadline=10.0, early=8)
    loads.handshake_succeeded(load_id, (RemoteRank(rank=0, reads=False),), UNIT)
    loads.tick(1.0)
    assert loads.take_actions() == []
    assert loads.stage(load_id) in (None, Stage.CHECK)
    loads.finish(load_id, HOLD, computed=True, deadline=LATE)
    assert [action.op for action in loads.take_actions()] == [LoadAction.DONE, LoadAction.REPORT]
    assert load_id not in loads
