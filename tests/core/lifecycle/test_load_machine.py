"""``LoadMachine``: the next actions of a load, and when it is over."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core.errors import DeadlineError, KVFerryError, StaleError, TransportError
from kvferry.core.lifecycle.holds import NOTHING, Hold
from kvferry.core.lifecycle.load_machine import (
    WATERMARK_SECONDS,
    LoadAction,
    LoadId,
    LoadMachine,
    RemoteRank,
)
from kvferry.core.metrics import Stage

HOLD = Hold(slot=1, generation=7)
OTHER = Hold(slot=1, generation=8)
DEADLINE, LATE = 100.0, 1000.0
UNIT = 4
CHECK, MARK, READ, FENCE = LoadAction.CHECK, LoadAction.WATERMARK, LoadAction.READ, LoadAction.FENCE
CANCEL, ABANDON, REPORT = LoadAction.CANCEL, LoadAction.ABANDON, (LoadAction.REPORT, -1)
CABLE, CANCELLED = TransportError("cable"), TransportError("cancelled")
GIVEN_UP = KVFerryError("given up")

Acts = list[tuple[Any, ...]]


def ranks(*reading: int) -> tuple[RemoteRank, ...]:
    return tuple(RemoteRank(rank=rank, reads=True) for rank in reading)


class Load(LoadMachine):
    """A load, whose actions are returned once."""

    @property
    def acts(self) -> Acts:
        """Return what is to be done next, as (op, rank), and for early reads (op, since, until)."""
        acts: Acts = [
            (READ, action.since, action.until)
            if action.since or action.until
            else (action.op, action.rank)
            for action in self.actions
        ]
        self.actions.clear()
        return acts

    def fence(self, rank: int = 0, word: int = HOLD.ready) -> None:
        """Let the read from a rank end, and its fence."""
        self.pages_read(rank)
        self.fenced(rank, word)


def begin(*reading: int, handshake: bool = True, **how: Any) -> Load:
    """Return a load from these ranks."""
    fields = {"computed": True, "reads": True, "deadline": DEADLINE, **how}
    load = Load(id=LoadId(1), actions=[], hold=HOLD, **fields)
    if handshake:
        load.handshake_succeeded(ranks(*reading), UNIT)
    return load


STAGES = {
    "handshake": Stage.HANDSHAKE,
    "checking": Stage.CHECK,
    "recheck": Stage.CHECK,
    "reading": Stage.TRANSFER,
    "fencing": Stage.FENCE,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("late", [False, True])
def test_a_load_can_fail_in_every_stage(stage: str, late: bool) -> None:
    load = begin(0, computed=False, handshake=stage != "handshake")
    if stage in ("reading", "fencing", "recheck"):
        load.checked(0, HOLD.computing if stage == "recheck" else HOLD.ready)
    if stage == "fencing":
        load.pages_read(0)
    assert load.stage is STAGES[stage]
    load.actions.clear()
    if late:
        load.tick(DEADLINE - 0.1)
        load.checked(0, HOLD.computing)
        load.actions.clear()
        load.tick(DEADLINE)
        load.tick(DEADLINE)
    else:
        load.abort(GIVEN_UP)
    if stage in ("reading", "fencing") or (stage == "checking" and not late):
        assert load.acts == [(CANCEL, 0)]
        assert load.stage is STAGES[stage]
        load.lost(0, CANCELLED)
    assert load.actions[-1].stage is STAGES[stage]
    assert load.acts == [*([] if stage == "handshake" else [(ABANDON, 0)]), REPORT]
    assert load.failure is GIVEN_UP or late
    computes = ", the producer still computes the pages" if STAGES[stage] is Stage.CHECK else ""
    assert f"(stage: {STAGES[stage]}{computes})" in str(load.failure) or not late
    assert isinstance(load.failure, DeadlineError) is late
    assert load.stage is None


def test_unexpected_events_change_nothing() -> None:
    load = begin(0, 1)
    load.fence(1)
    load.actions.clear()
    for rank in (5, 1):  # unknown, and over
        load.pages_read(rank)
        load.lost(rank, CABLE)
        load.failing(rank, CABLE)
        load.checked(rank, HOLD.ready)
        load.watermark_read(rank, HOLD.watermark(8))
        load.fenced(rank, NOTHING)
    load.checked(0, NOTHING)
    load.fenced(0, NOTHING)
    load.handshake_succeeded(ranks(0))
    load.handshake_failed(CABLE)
    load.passed()
    load.copied(CABLE)
    load.extend(OTHER, 8, LATE)
    load.finish(OTHER, computed=True, deadline=LATE)
    assert load.acts == []
    load.fence()
    assert load.acts == [(FENCE, 0), REPORT]
    assert load.failure is None
    load.abort(GIVEN_UP)
    load.tick(DEADLINE)
    load.handshake_succeeded(ranks(0))
    assert load.acts == []


# Early loads, whose parts come while the producer computes the rest.


def test_finished_chunks_are_read_then_the_rest_is_fenced() -> None:
    load, now = begin(0, computed=False, tokens=8, deadline=10.0), 100.0
    assert load.is_idle
    load.tick(now)
    assert load.acts == [(CHECK, 0)], "the deadline counts after the last part"
    assert not load.is_idle
    load.checked(0, HOLD.computing)
    assert load.acts == [(MARK, 0)]
    for tokens, hold in ((0, HOLD), (3, HOLD), (8, OTHER)):  # of no page of the hold
        load.watermark_read(0, hold.watermark(tokens))
        load.tick(now + WATERMARK_SECONDS / 2)
        assert load.acts == []
        now += WATERMARK_SECONDS
        load.tick(now)
        assert load.acts == [(MARK, 0)]
    load.watermark_read(0, HOLD.watermark(8))
    assert load.acts == [(READ, 0, 8)]
    load.pages_read(0)
    assert load.is_idle
    load.extend(HOLD, 16, 10.0)
    load.tick(now + WATERMARK_SECONDS)
    load.watermark_read(0, HOLD.watermark(14))
    assert load.acts == [(MARK, 0), (READ, 8, 12)]
    load.pages_read(0)
    load.finish(HOLD, computed=True, deadline=LATE)
    assert load.acts == [(READ, 12, None)]
    assert not load.is_idle
    load.pages_read(0)
    load.tick(LATE - 1.0)
    assert load.acts == [(FENCE, 0)]
    load.fenced(0, HOLD.computing)
    assert load.acts == [REPORT]
    assert load.failure is None


def test_an_early_load_is_checked_before_the_rest_is_read_unless_all_is_computed() -> None:
    load = begin(0, computed=False, tokens=8)
    load.tick(0.0)
    load.checked(0, HOLD.computing)
    load.watermark_read(0, HOLD.watermark(8))
    load.pages_read(0)
    load.actions.clear()
    load.finish(HOLD, computed=False, deadline=LATE)
    assert load.acts == [(CHECK, 0)]
    load.checked(0, NOTHING)
    assert load.acts == [(ABANDON, 0), REPORT], "the hold stood before"
    assert isinstance(load.failure, StaleError)


# Loads that wait for the device, and those of a staged cache, which are copied there.


def test_a_load_fails_whose_device_takes_too_long() -> None:
    load = begin(0, awaits_device=True)
    load.tick(DEADLINE - 1.0)
    assert load.acts == []
    load.tick(DEADLINE)
    assert load.actions[-1].stage is Stage.WAIT
    assert load.acts == [(ABANDON, 0), REPORT]
    assert "the device was not done" in str(load.failure)
