"""Reclamation: ages of holds, silent holds, and which are given up when pages are lacking."""

from __future__ import annotations

import pytest

from kvferry.core.lifecycle import worker_holds as module
from kvferry.core.lifecycle.holds import Hold, Incarnation, RequestId
from kvferry.core.lifecycle.silent_holds import (
    ASK_SECONDS,
    GONE_SECONDS,
    BlockPressure,
    Silence,
    silent_everywhere,
)
from kvferry.core.lifecycle.worker_holds import ReleaseOutcome, WorkerHolds
from kvferry.core.messages import Heartbeat, Release, Renewal

INCARNATION = Incarnation(99)
LEASE = 30.0
HOLDS = [Hold(slot=slot, generation=7 + slot) for slot in range(8)]


class WorkerHoldsHarness:
    """``WorkerHolds`` with eight holds that are ready at 100.0."""

    def __init__(self) -> None:
        self.worker_holds = WorkerHolds([0] * len(HOLDS), INCARNATION, [0] * len(HOLDS))
        for hold in HOLDS:
            self.worker_holds.take_on(RequestId(f"r{hold.slot}"), hold)
            self.worker_holds.order(hold, LEASE, 100.0)
            self.worker_holds.ready(hold, 100.0)

    def renew(self, hold: Hold, now: float, engine: str = "d", life: int = 5) -> None:
        renewal = Renewal(
            incarnation=INCARNATION,
            slot=hold.slot,
            generation=hold.generation,
            engine=engine,
            life=life if engine else 0,
        )
        self.worker_holds.renew(renewal, now)

    def heartbeat(
        self, now: float, engine: str = "d", life: int = 5, incarnation: int = INCARNATION
    ) -> None:
        heartbeat = Heartbeat(incarnation=incarnation, engine=engine, life=life)
        self.worker_holds.heartbeat(heartbeat, now)

    def done(self, hold: Hold, engine: str = "d") -> ReleaseOutcome:
        release = Release(
            incarnation=INCARNATION,
            slot=hold.slot,
            generation=hold.generation,
            engine=engine,
            rank=0,
            expected=1,
        )
        return self.worker_holds.release(release)

    def ages(self, now: float, *holds: Hold) -> list[float | None]:
        return [age(self.worker_holds, hold, now) for hold in holds]


def age(worker_holds: WorkerHolds, hold: Hold, now: float) -> float | None:
    """Return for how long a hold is silent; ``None`` if it has ended or has no ticket."""
    return {each.hold: each.age for each in worker_holds.silent(now, 0.0, 99)}.get(hold)


def test_the_age_of_an_unclaimed_hold_starts_when_it_is_ready() -> None:
    worker_holds = WorkerHolds([0, 0], INCARNATION, [0, 0])
    worker_holds.take_on(RequestId("a"), HOLDS[0])
    assert age(worker_holds, HOLDS[0], 100.0) is None
    worker_holds.order(HOLDS[0], LEASE, 100.0)
    assert age(worker_holds, HOLDS[0], 102.0) == 2.0
    worker_holds.ready(HOLDS[0], 102.0)
    assert age(worker_holds, HOLDS[0], 103.0) == 1.0
    assert age(worker_holds, HOLDS[1], 103.0) is None


def test_a_heartbeat_resets_the_age_of_all_holds_that_its_engine_claims() -> None:
    harness = WorkerHoldsHarness()
    harness.renew(HOLDS[0], 101.0)
    harness.renew(HOLDS[1], 101.0)
    harness.renew(HOLDS[2], 101.0, engine="other")
    harness.heartbeat(110.0)
    assert harness.ages(110.0, *HOLDS[:4]) == [0.0, 0.0, 9.0, 10.0]


def test_the_latest_sign_of_life_of_any_claiming_engine_counts() -> None:
    harness = WorkerHoldsHarness()
    harness.renew(HOLDS[0], 101.0)
    harness.renew(HOLDS[0], 101.0, engine="other")
    harness.heartbeat(109.0, engine="other")
    assert harness.ages(110.0, HOLDS[0]) == [1.0]


def test_a_heartbeat_renews_no_lease() -> None:
    harness = WorkerHoldsHarness()
    harness.renew(HOLDS[0], 101.0)
    harness.heartbeat(130.0)
    assert RequestId("r0") not in harness.worker_holds.expire(130.9)
    assert RequestId("r0") in harness.worker_holds.expire(131.0)


@pytest.mark.parametrize(
    "changes", [{"incarnation": 98}, {"engine": "other"}, {"life": 6}], ids=lambda each: str(each)
)
def test_a_heartbeat_of_another_engine_or_incarnation_changes_nothing(
    changes: dict[str, int | str],
) -> None:
    """A restarted consumer engine has no claims of its earlier incarnation."""
    harness = WorkerHoldsHarness()
    harness.renew(HOLDS[0], 101.0)
    harness.heartbeat(110.0, **changes)  # type: ignore[arg-type]
    assert harness.ages(110.0, HOLDS[0]) == [9.0]


def test_a_consumer_without_heartbeats_counts_as_alive_for_a_third_of_a_lease() -> None:
    harness = WorkerHoldsHarness()
    harness.renew(HOLDS[0], 101.0, engine="")
    assert harness.ages(111.0, HOLDS[0]) == [0.0]
    assert harness.ages(114.0, HOLDS[0]) == [3.0]


def test_a_consumer_without_heartbeats_may_renew_before_the_hold_is_ordered() -> None:
    """That is common: a ticket often arrives before the next step's orders."""
    worker_holds = WorkerHolds([0], INCARNATION, [0])
    worker_holds.take_on(RequestId("a"), HOLDS[0])
    renewal = Renewal(incarnation=INCARNATION, slot=0, generation=HOLDS[0].generation)
    worker_holds.renew(renewal, 100.0)
    worker_holds.order(HOLDS[0], LEASE, 100.5)
    worker_holds.ready(HOLDS[0], 100.5)
    assert age(worker_holds, HOLDS[0], 110.0) == 0.0
    assert worker_holds.silent(110.0, GONE_SECONDS, 8) == []
    assert age(worker_holds, HOLDS[0], 113.0) == 3.0


def test_engines_are_forgotten_with_their_last_claim() -> None:
    harness = WorkerHoldsHarness()
    harness.renew(HOLDS[0], 101.0)
    harness.renew(HOLDS[1], 101.0)
    harness.done(HOLDS[0], engine="other")
    harness.heartbeat(102.0)
    assert harness.ages(102.0, HOLDS[1]) == [0.0]
    harness.worker_holds.end(HOLDS[1])
    harness.heartbeat(103.0)
    assert (len(harness.worker_holds._claims), len(harness.worker_holds._heard)) == (0, 0)


def test_the_number_of_claims_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine beyond the bound is treated as one without heartbeats."""
    monkeypatch.setattr(module, "MAX_CLAIMANTS", 4)
    monkeypatch.setattr(module, "MAX_READERS", 2)
    harness = WorkerHoldsHarness()
    for number in range(6):
        harness.renew(HOLDS[0], 101.0, engine=f"d{number}")
    assert len(harness.worker_holds._claims) == 2
    for number in range(6):
        harness.renew(HOLDS[1 + number], 101.0, engine=f"e{number}")
    assert len(harness.worker_holds._claims) == 4
    assert harness.ages(111.0, HOLDS[6]) == [0.0]
    assert harness.ages(101.0 + LEASE / 3 + 4.0, HOLDS[6]) == [4.0]


def test_silent_holds_are_sorted_by_age_and_limited() -> None:
    harness = WorkerHoldsHarness()
    for number, hold in enumerate(HOLDS[:4]):
        harness.renew(hold, 101.0 + number, engine=f"d{number}")
    silent = harness.worker_holds.silent(106.0, beyond=GONE_SECONDS, limit=6)
    assert [each.age for each in silent] == [6.0] * 4 + [5.0, 4.0]
    assert [each.engines for each in silent[-2:]] == [("d0",), ("d1",)]
    assert [each.request for each in silent[-2:]] == ["r0", "r1"]
    assert HOLDS[3] not in {
        each.hold for each in harness.worker_holds.silent(106.0, GONE_SECONDS, 99)
    }


def silence(slot: int, age: float, *engines: str) -> Silence:
    request = RequestId(f"r{slot}")
    return Silence(request=request, hold=HOLDS[slot], age=age, engines=engines)


def test_a_hold_is_silent_if_all_ranks_report_it_with_the_youngest_age() -> None:
    reports = {
        0: [silence(0, 9.0, "a"), silence(1, 5.0), silence(2, 8.0)],
        1: [silence(2, 4.0, "b"), silence(1, 7.0), silence(3, 99.0)],
    }
    assert silent_everywhere(reports, 2) == [silence(1, 5.0), silence(2, 4.0, "b")]
    assert silent_everywhere(reports, 3) == []
    assert silent_everywhere({0: [], 1: [silence(1, 7.0)]}, 2) == []
    assert silent_everywhere({}, 0) == []


def test_ranks_are_asked_at_intervals_and_only_while_holds_exist() -> None:
    pressure = BlockPressure(pages=160, ranks=1)
    assert not pressure.ask(100.0, held=0)
    assert pressure.ask(100.0, held=3)
    assert not pressure.ask(100.0 + ASK_SECONDS / 2, held=3)
    assert pressure.ask(100.0 + ASK_SECONDS, held=3)
    assert not BlockPressure(pages=160).ask(100.0, held=3)


def test_an_answer_is_used_once() -> None:
    pressure = BlockPressure(pages=160, ranks=1)
    pressure.answered({0: [silence(0, 9.0)]})
    assert pressure.take_silent() == [silence(0, 9.0)]
    assert pressure.take_silent() == []
    assert (pressure.enough(3), pressure.enough(30)) == (10, 30)
