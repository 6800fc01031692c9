"""What must hold in the simulation: always, at rest, and at the end.

What must hold at an event (a page is given back, a load is reported) is checked where the event
happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.core.lifecycle.holds import NOTHING
from tests.core.lifecycle.fabric import require
from tests.core.lifecycle.producer import PAGES, PrefillState
from tests.core.lifecycle.schedulers import check_unused

if TYPE_CHECKING:
    from tests.core.lifecycle.consumer_rank import ConsumerRank
    from tests.core.lifecycle.producer import IssuedTicket
    from tests.core.lifecycle.simulation import Simulation


def check_scheduler_holds(simulation: Simulation) -> None:
    """Check that as many holds are held as the scheduler's requests have."""
    holds = sum(p.hold is not None for p in simulation.producer.requests.values())
    require(simulation.producer.scheduler_holds.held == holds, "the scheduler must hold", holds)


def check_rest(simulation: Simulation) -> None:
    """Check that all loads are over and all due messages were sent, when nothing is under way."""
    for engine in simulation.consumers:
        require(not engine.requests, "never reported:", engine.requests)
        require(len(engine.users) == 0, "holds without users:", len(engine.users))
        for rank in engine.ranks:
            _check_rank(simulation, rank)
    for prompt in simulation.producer.at(PrefillState.HELD):
        over = all(prompt.hold in rank.table.over for rank in simulation.producer.ranks)
        require(not over, "over on every rank, but its pages never came back:", prompt)
        reset = prompt.hold in simulation.producer.reset_holds
        require(not reset, "reset, but still held:", prompt)


def _check_rank(simulation: Simulation, rank: ConsumerRank) -> None:
    rank.echo(len(rank.heard))
    rank.heard.clear()
    require(
        rank.transfers == [] == simulation.fabric.messages,
        "a repeated event of a load that is over had an effect",
    )
    require(not rank.loads.open, "loads that are never over:", rank.loads.open)
    for load_id, pull in rank.pulls.items():
        require(pull.reported and rank.loads[load_id].is_over, "a load that is never over")
        issue, link = pull.request.issue, pull.link
        if pull.shared:
            _check_done_is_said(rank, issue)
            continue
        if link is None or link.broken or issue.producer is not simulation.producer:
            continue
        for remote in rank.remote_ranks:
            table = simulation.producer.ranks[remote.rank].table
            knows = table.knows(issue.ticket.hold, rank.engine, rank.rank)
            require(knows, "no message was sent to a producer rank:", remote)


def _check_done_is_said(rank: ConsumerRank, issue: IssuedTicket) -> None:
    """Check that one of the loads that share a hold, or one after them, sends "done"."""
    tells = any(not p.shared and p.request.issue is issue for p in rank.pulls.values())
    require(tells, "no done was sent for a shared hold:", issue.ticket.hold)


def check_end(simulation: Simulation) -> None:
    """Check that nothing is left and everything can be used again, when all leases are over."""
    producer = simulation.producer
    require(not producer.requests, "never released:", producer.requests)
    require(sorted(producer.free) == list(range(1, PAGES + 1)), "pages lost:", producer.free)
    for rank in producer.ranks:
        require(rank.worker_holds.held == 0, "the worker still holds", rank.worker_holds.held)
        require(set(rank.words) == {NOTHING}, "words left:", rank.words)
    for engine in simulation.consumers:
        require(len(engine.free) == PAGES, "pages lost:", engine.free)
    check_unused(producer.scheduler_holds, simulation.slots)
