"""Which holds are silent on all ranks, and when the ranks are asked for them."""

from __future__ import annotations

from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.silent_holds import (
    ASK_SECONDS,
    BlockPressure,
    Silence,
    silent_everywhere,
)


def silence(slot: int, age: float, *engines: str) -> Silence:
    hold = Hold(slot=slot, generation=7 + slot)
    return Silence(request=RequestId(f"r{slot}"), hold=hold, age=age, engines=engines)


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
