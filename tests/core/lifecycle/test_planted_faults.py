"""Faults that a search rarely finds, caught by fixed sequences of events."""

from __future__ import annotations

import pytest

from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.core.lifecycle.worker_holds import WorkerHolds
from kvferry.core.messages import Renewal
from kvferry.core.side_channel_messages import encode
from tests.core.lifecycle.fabric import Message, ProtocolViolation
from tests.core.lifecycle.producer import PrefillState
from tests.core.lifecycle.protocol_faults import (
    PLANTED_IN_TIME,
    HeartbeatsIgnored,
    NewestAnswerReclaimed,
)
from tests.core.lifecycle.simulation import PLANS, Components, Simulation


def reclaim_one_of_two(scheduler_holds: type[SchedulerHolds]) -> list[Hold]:
    """Hold two answers, let a prompt wait for the pages of one, and return the reclaimed holds."""
    components = Components(scheduler_holds=scheduler_holds)
    simulation = Simulation(ranks=1, plans=(PLANS[1][0],) * 2, slots=4, components=components)
    issues = [simulation.fresh(kind="conversation", ordered=True) for _ in range(2)]
    assert [issue.prompt.at for issue in issues if issue] == [PrefillState.HELD] * 2
    simulation.starve(3.0, slice(None))
    return simulation.producer.reclaimed


def test_one_of_two_answers_is_reclaimed() -> None:
    assert len(reclaim_one_of_two(SchedulerHolds)) == 1


def test_an_answer_reclaimed_before_an_older_one_is_caught() -> None:
    """A search rarely has two answers, and reclaims one of them."""
    with pytest.raises(ProtocolViolation):
        reclaim_one_of_two(NewestAnswerReclaimed)


def starve_two_claimed(worker_holds: type[WorkerHolds]) -> list[Hold]:
    """Let a prompt wait for pages that two loads claim for long; return the holds given up."""
    components = Components(worker_holds=worker_holds, strict=False)
    simulation = Simulation(ranks=1, plans=(PLANS[1][0],) * 2, slots=4, components=components)
    for engine in simulation.consumers:
        issue = simulation.fresh(kind="plain", ordered=True)
        assert issue is not None
        simulation.hand(engine, issue)
        simulation.pull(engine, 0)
    simulation.starve(12.0, slice(None))
    return simulation.producer.orphaned


def test_claimed_holds_are_not_given_up() -> None:
    assert not starve_two_claimed(WorkerHolds)


def test_heartbeats_ignored_are_caught() -> None:
    """A search rarely has two claimed holds while a prompt waits for pages, and for so long."""
    with pytest.raises(ProtocolViolation):
        starve_two_claimed(HeartbeatsIgnored)


def hold_an_answer(worker_holds: type[WorkerHolds], claimed: str) -> None:
    """Hold an answer that is claimed once, and compare every second with the protocol table."""
    components = Components(worker_holds=worker_holds)
    simulation = Simulation(ranks=1, plans=(PLANS[1][0],) * 2, slots=4, components=components)
    [rank] = simulation.producer.ranks
    issue = simulation.fresh(kind="conversation", ordered=False)
    assert issue is not None
    for moment in ("before the order", "before ready", "after ready"):
        if moment == "before ready":
            simulation.producer.schedule()
            rank.launch()
        elif moment == "after ready":
            while rank.stream:
                rank.device()
            rank.tick()
        if moment == claimed:
            hold = issue.ticket.hold
            renewal = Renewal(
                incarnation=issue.ticket.incarnation,
                slot=hold.slot,
                generation=hold.generation,
                engine="A",
                life=1,
            )
            payload = encode([renewal])
            rank.hear(Message(sender="A", rank=0, payload=payload, origins=(0,)))
        simulation.wait(2.0)
    while issue.ticket.hold in rank.table.active:
        simulation.wait(1.0)
        rank.tick()


MOMENTS = ("never", "before the order", "before ready", "after ready")


@pytest.mark.parametrize("claimed", MOMENTS)
def test_an_answer_is_held_as_the_protocol_table_says(claimed: str) -> None:
    hold_an_answer(WorkerHolds, claimed)


@pytest.mark.parametrize("fault", PLANTED_IN_TIME)
def test_planted_fault_in_time_is_caught(fault: str) -> None:
    def at_any_moment() -> None:
        for claimed in MOMENTS:
            hold_an_answer(PLANTED_IN_TIME[fault], claimed)

    with pytest.raises(ProtocolViolation):
        at_any_moment()
