"""Whose consumer is gone: signs of life at one rank, all ranks together, and what is given up."""

from __future__ import annotations

import pytest

from kvferry.core.lifecycle import worker_holds as keepers
from kvferry.core.lifecycle.holds import Hold, Incarnation, RequestId
from kvferry.core.lifecycle.reclamation import (
    ASK_SECONDS,
    GONE_SECONDS,
    BlockPressure,
    Silence,
    silent_everywhere,
)
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.core.lifecycle.worker_holds import NoteOutcome, WorkerHolds
from kvferry.core.messages import Heartbeat, Release, Renewal

INCARNATION = Incarnation(99)
LEASE = 30.0
HOLDS = [Hold(slot=slot, generation=7 + slot) for slot in range(8)]


class Bench:
    """A keeper of eight holds, ready at 100.0."""

    def __init__(self) -> None:
        self.keeper = WorkerHolds([0] * len(HOLDS), INCARNATION)
        for hold in HOLDS:
            self.keeper.take_on(RequestId(f"r{hold.slot}"), hold)
            self.keeper.order(hold, LEASE, 100.0)
            self.keeper.ready(hold, 100.0)

    def claim(self, hold: Hold, now: float, engine: str = "d", life: int = 5) -> NoteOutcome:
        renewal = Renewal(
            incarnation=INCARNATION,
            slot=hold.slot,
            generation=hold.generation,
            engine=engine,
            life=life if engine else 0,
        )
        return self.keeper.renew(renewal, now)

    def beat(
        self, now: float, engine: str = "d", life: int = 5, incarnation: int = INCARNATION
    ) -> NoteOutcome:
        beat = Heartbeat(incarnation=incarnation, engine=engine, life=life)
        return self.keeper.heartbeat(beat, now)

    def done(self, hold: Hold, engine: str = "d") -> NoteOutcome:
        release = Release(
            incarnation=INCARNATION,
            slot=hold.slot,
            generation=hold.generation,
            engine=engine,
            rank=0,
            expected=1,
        )
        return self.keeper.release(release)

    def ages(self, now: float, *holds: Hold) -> list[float | None]:
        return [self.keeper.age(hold, now) for hold in holds]


def test_an_unclaimed_hold_ages_from_when_it_was_ready() -> None:
    keeper = WorkerHolds([0, 0], INCARNATION)
    keeper.take_on(RequestId("a"), HOLDS[0])
    assert keeper.age(HOLDS[0], 100.0) is None
    keeper.order(HOLDS[0], LEASE, 100.0)
    assert keeper.age(HOLDS[0], 102.0) == 2.0
    keeper.ready(HOLDS[0], 102.0)
    assert keeper.age(HOLDS[0], 103.0) == 1.0
    assert keeper.age(HOLDS[1], 103.0) is None


def test_a_heartbeat_counts_for_all_that_its_engine_claims_and_for_nothing_else() -> None:
    bench = Bench()
    bench.claim(HOLDS[0], 101.0)
    bench.claim(HOLDS[1], 101.0)
    bench.claim(HOLDS[2], 101.0, engine="other")
    assert bench.beat(110.0) is NoteOutcome.RENEWED
    assert bench.ages(110.0, *HOLDS[:4]) == [0.0, 0.0, 9.0, 10.0]


def test_the_youngest_of_those_who_claim_a_hold_counts() -> None:
    bench = Bench()
    bench.claim(HOLDS[0], 101.0)
    bench.claim(HOLDS[0], 101.0, engine="other")
    bench.beat(109.0, engine="other")
    assert bench.ages(110.0, HOLDS[0]) == [1.0]


def test_a_heartbeat_renews_no_lease() -> None:
    bench = Bench()
    bench.claim(HOLDS[0], 101.0)
    bench.beat(130.0)
    assert RequestId("r0") not in bench.keeper.expire(130.9)
    assert RequestId("r0") in bench.keeper.expire(131.0)


@pytest.mark.parametrize(
    "changes", [{"incarnation": 98}, {"engine": "other"}, {"life": 6}], ids=lambda each: str(each)
)
def test_a_heartbeat_of_another_changes_nothing(changes: dict[str, int | str]) -> None:
    """A consumer engine that was started again claims nothing of what it claimed before."""
    bench = Bench()
    bench.claim(HOLDS[0], 101.0)
    assert bench.beat(110.0, **changes) is NoteOutcome.UNKNOWN  # type: ignore[arg-type]
    assert bench.ages(110.0, HOLDS[0]) == [9.0]


def test_an_older_consumer_counts_as_alive_for_a_third_of_a_lease() -> None:
    bench = Bench()
    bench.claim(HOLDS[0], 101.0, engine="")
    assert bench.ages(111.0, HOLDS[0]) == [0.0]
    assert bench.ages(114.0, HOLDS[0]) == [3.0]


def test_an_older_consumer_may_renew_before_the_hold_is_ordered() -> None:
    """As most do: a ticket is often quicker than the next step's orders."""
    keeper = WorkerHolds([0], INCARNATION)
    keeper.take_on(RequestId("a"), HOLDS[0])
    renewal = Renewal(incarnation=INCARNATION, slot=0, generation=HOLDS[0].generation)
    assert keeper.renew(renewal, 100.0) is NoteOutcome.RENEWED
    keeper.order(HOLDS[0], LEASE, 100.5)
    keeper.ready(HOLDS[0], 100.5)
    assert keeper.age(HOLDS[0], 110.0) == 0.0
    assert keeper.silent(110.0, GONE_SECONDS, 8) == []
    assert keeper.age(HOLDS[0], 113.0) == 3.0


def test_engines_are_forgotten_with_their_last_claim() -> None:
    bench = Bench()
    bench.claim(HOLDS[0], 101.0)
    bench.claim(HOLDS[1], 101.0)
    bench.done(HOLDS[0], engine="other")
    assert bench.beat(102.0) is NoteOutcome.RENEWED
    bench.keeper.end(HOLDS[1])
    assert bench.beat(103.0) is NoteOutcome.UNKNOWN
    assert (len(bench.keeper._claims), len(bench.keeper._heard)) == (0, 0)


def test_claims_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes beyond the bounds is taken for a consumer that sends no heartbeats."""
    monkeypatch.setattr(keepers, "MAX_CLAIMANTS", 4)
    monkeypatch.setattr(keepers, "MAX_READERS", 2)
    bench = Bench()
    for number in range(6):
        assert bench.claim(HOLDS[0], 101.0, engine=f"d{number}") is NoteOutcome.RENEWED
    assert len(bench.keeper._claims) == 2
    for number in range(6):
        bench.claim(HOLDS[1 + number], 101.0, engine=f"e{number}")
    assert len(bench.keeper._claims) == 4
    assert bench.ages(111.0, HOLDS[6]) == [0.0]
    assert bench.ages(101.0 + LEASE / 3 + 4.0, HOLDS[6]) == [4.0]


def test_silent_holds_come_oldest_first_and_bounded() -> None:
    bench = Bench()
    for number, hold in enumerate(HOLDS[:4]):
        bench.claim(hold, 101.0 + number, engine=f"d{number}")
    found = bench.keeper.silent(106.0, beyond=GONE_SECONDS, limit=6)
    assert [each.age for each in found] == [6.0] * 4 + [5.0, 4.0]
    assert [each.engines for each in found[-2:]] == [("d0",), ("d1",)]
    assert [each.request for each in found[-2:]] == ["r0", "r1"]
    assert HOLDS[3] not in {each.hold for each in bench.keeper.silent(106.0, GONE_SECONDS, 99)}


def silence(slot: int, age: float, *engines: str) -> Silence:
    request = RequestId(f"r{slot}")
    return Silence(request=request, hold=HOLDS[slot], age=age, engines=engines)


def test_a_hold_is_silent_where_all_ranks_say_so_and_as_old_as_the_youngest() -> None:
    reports = {
        0: [silence(0, 9.0, "a"), silence(1, 5.0), silence(2, 8.0)],
        1: [silence(2, 4.0, "b"), silence(1, 7.0), silence(3, 99.0)],
    }
    assert silent_everywhere(reports, 2) == [silence(1, 5.0), silence(2, 4.0, "b")]
    assert silent_everywhere(reports, 3) == []
    assert silent_everywhere({0: [], 1: [silence(1, 7.0)]}, 2) == []
    assert silent_everywhere({}, 0) == []


def test_ranks_are_asked_now_and_then_and_only_about_something() -> None:
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


class Ledger:
    """A ledger of eight tickets of two pages each."""

    def __init__(self) -> None:
        self.ledger = SchedulerHolds(8)
        self.holds: dict[RequestId, Hold] = {}
        for number in range(8):
            request = RequestId(f"r{number}")
            self.ledger.take_on(request)
            hold = self.ledger.ticket(request, LEASE, frozenset([2 * number, 2 * number + 1]))
            assert hold is not None
            self.holds[request] = hold
        self.ledger.drain()

    def silences(self, *numbers: int) -> list[Silence]:
        requests = [RequestId(f"r{number}") for number in numbers]
        return [Silence(request=each, hold=self.holds[each], age=9.0) for each in requests]


def test_as_many_are_given_up_as_free_the_pages() -> None:
    bench = Ledger()
    silent = bench.silences(5, 3, 1, 0)
    assert bench.ledger.give_up(silent, 3) == silent[:2]
    assert bench.ledger.drain().ends == tuple(each.hold for each in silent[:2])
    assert (bench.ledger.held_pages, bench.ledger.ticketed, bench.ledger.held) == (12, 6, 8)
    assert bench.ledger.take_evicted() == []


def test_what_was_given_up_or_is_another_hold_now_is_left_out() -> None:
    bench = Ledger()
    first, second = bench.silences(5, 3)
    assert bench.ledger.give_up([first], 2) == [first]
    strange = Silence(request=second.request, hold=Hold(slot=3, generation=1), age=9.0)
    assert bench.ledger.give_up([first, strange], 2) == []
    bench.ledger.sent(second.request)
    assert bench.ledger.give_up([second], 2) == []


def test_what_a_reset_gave_up_is_left_out() -> None:
    bench = Ledger()
    bench.ledger.reset()
    ends = bench.ledger.drain().ends
    assert bench.ledger.give_up(bench.silences(5, 3), 4) == []
    assert (len(ends), bench.ledger.ticketed, bench.ledger.held_pages) == (8, 0, 0)
    assert not bench.ledger.drain()


def test_pages_are_to_come_back_until_the_last_is_sent() -> None:
    bench = Ledger()
    assert not bench.ledger.ending
    bench.ledger.give_up(bench.silences(5, 3), 4)
    assert bench.ledger.ending
    bench.ledger.sent(RequestId("r5"))
    assert bench.ledger.ending
    bench.ledger.sent(RequestId("r3"))
    assert not bench.ledger.ending
    bench.ledger.reset()
    assert bench.ledger.ending
