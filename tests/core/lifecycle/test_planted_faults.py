"""Faults that show only if an answer is claimed at one moment, and then not renewed for long."""

from __future__ import annotations

import pytest

from kvferry.core.lifecycle.worker_holds import WorkerHolds
from kvferry.core.messages import Renewal
from kvferry.core.side_channel_messages import encode
from tests.core.lifecycle.fabric import Message, ProtocolViolation
from tests.core.lifecycle.protocol_faults import PLANTED_IN_TIME
from tests.core.lifecycle.simulation import PLANS, Components, Simulation


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
