"""What must be so in the model's world: always, at rest, and in the end.

What must be so at a certain event (a page given back, a load reported) is asked for where that
event happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.core.lifecycle.holds import NOTHING, RequestId
from tests.core.lifecycle.fabric import require
from tests.core.lifecycle.producer import PAGES, At

if TYPE_CHECKING:
    from tests.core.lifecycle.consumer_rank import ConsumerRank
    from tests.core.lifecycle.model import World
    from tests.core.lifecycle.producer import Issue


def check_ledger(world: World) -> None:
    """Always: the ledger holds what the scheduler holds."""
    holds = sum(p.hold is not None for p in world.producer.requests.values())
    require(world.producer.ledger.held == holds, "the ledger is to hold", holds)


def check_rest(world: World) -> None:
    """When nothing is under way: all loads are over, and who had to be told was told.

    No time has passed, so that no lease stands in for a message that was never sent.
    """
    for engine in world.consumers:
        require(not engine.requests, "never reported:", engine.requests)
        require(len(engine.users) == 0, "holds that are used by nobody:", len(engine.users))
        for rank in engine.ranks:
            _check_rank(world, rank)
    for prompt in world.producer.at(At.HELD):
        over = all(prompt.hold in rank.book.over for rank in world.producer.ranks)
        require(not over, "over on every rank, but its pages never came back:", prompt)
        reset = prompt.hold in world.producer.reset_holds
        require(not reset, "reset, but still held:", prompt)


def _check_rank(world: World, rank: ConsumerRank) -> None:
    rank.echo(len(rank.heard))
    rank.heard.clear()
    require(rank.transfers == [] == world.fabric.messages, "what is over has an echo")
    require(len(rank.loads) == 0, "loads that are never over:", len(rank.loads))
    for load_id, pull in rank.pulls.items():
        require(pull.reported and load_id not in rank.loads, "a load that is never over")
        issue, link = pull.request.issue, pull.link
        if pull.shared:
            _check_done_is_said(rank, issue)
            continue
        if link is None or link.broken or issue.producer is not world.producer:
            continue
        for party in rank.parties:
            book = world.producer.ranks[party.rank].book
            knows = book.knows(issue.ticket.hold, rank.engine, rank.rank)
            require(knows, "a producer rank was never told:", party)


def _check_done_is_said(rank: ConsumerRank, issue: Issue) -> None:
    """Of those that share a hold, or after them, one load tells the producer."""
    tells = any(not p.shared and p.request.issue is issue for p in rank.pulls.values())
    require(tells, "nothing says done about a hold that was shared:", issue.ticket.hold)


def check_end(world: World) -> None:
    """When all leases are over too: nothing is left, and everything can be used again."""
    producer = world.producer
    require(not producer.requests, "never released:", producer.requests)
    require(sorted(producer.free) == list(range(1, PAGES + 1)), "pages lost:", producer.free)
    for rank in producer.ranks:
        require(rank.keeper.held == 0, "the keeper still holds", rank.keeper.held)
        require(set(rank.words) == {NOTHING}, "words left:", rank.words)
    for engine in world.consumers:
        require(len(engine.free) == PAGES, "pages lost:", engine.free)
    ledger = producer.ledger
    require(ledger.held == 0, "the ledger still holds", ledger.held)
    taken = [ledger.take_on(RequestId(f"after-{i}")) for i in range(world.slots + 1)]
    slots = {hold.slot for hold in taken if hold is not None}
    require(len(slots) == world.slots, "slots lost, or given twice:", slots)
