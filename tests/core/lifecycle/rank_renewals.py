"""Renewals of a consumer's simulated rank, sent as the endpoint sends them."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.core.errors import PeerLostError
from kvferry.core.lifecycle.load_machine import LoadId, gone
from kvferry.core.lifecycle.renewal_schedule import RenewalId, RenewalRequest, Renewals
from kvferry.core.lifecycle.silent_holds import HEARTBEAT_SECONDS
from kvferry.core.messages import Heartbeat, Renewal, decode_notes
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport import State
from tests.core.lifecycle.fabric import Link, Message, ProtocolViolation, Transfer, require
from tests.core.lifecycle.turns import LEASE, STALE, Issue, Turn

if TYPE_CHECKING:
    from tests.core.lifecycle.consumer_rank import ConsumerRank, Pull


def is_renewal(message: Message) -> bool:
    return all(isinstance(note, Renewal | Heartbeat) for note in decode_notes(message.payload))


@dataclass(slots=True, kw_only=True, eq=False)
class Wait:
    """A request that waits or loads with a ticket, and the renewal of that.

    Attributes:
        load: the load, if it has begun.
        settled: producer ranks whose fence is posted.
        gone: whether a renewal found its hold gone.
    """

    turn: Turn
    issue: Issue
    link: Link | None = None
    renewal: RenewalId | None = None
    load: LoadId | None = None
    settled: set[int] = field(default_factory=set)
    gone: bool = False


class RankRenewals:
    def __init__(self, rank: ConsumerRank, renewals: Renewals) -> None:
        self._rank = rank
        self._renewals = renewals
        self._waits: list[Wait] = []
        self._next_heartbeat = -math.inf

    @property
    def waiting(self) -> list[Wait]:
        """Return the requests that wait, whose load has not begun."""
        return [wait for wait in self._waits if wait.load is None]

    def renewed(self) -> list[Wait]:
        """Return what is renewed over an open connection."""
        return [w for w in self._waits if w.link is not None and not w.link.broken]

    def prepare(self, turn: Turn, issue: Issue) -> None:
        self._waits.append(Wait(turn=turn, issue=issue))

    def take(self, turn: Turn) -> bool:
        """End the wait of a request; return whether its hold was found gone."""
        found = [wait for wait in self.waiting if wait.turn is turn]
        require(len(found) == 1, "a load of a request that was not prepared")
        self._waits.remove(found[0])
        self._stop(found[0])
        return found[0].gone

    def begin(self, load_id: LoadId, pull: Pull) -> None:
        self._waits.append(wait := Wait(turn=pull.turn, issue=pull.issue, load=load_id))
        self._start(wait, at_once=False)

    def end_rank(self, load_id: LoadId, rank: int) -> None:
        """Stop renewing a load on a rank, because its fence is posted."""
        for wait in self._waits:
            if wait.load == load_id and wait.renewal is not None:
                wait.settled.add(rank)
                self._renewals.end_rank(wait.renewal, rank)

    def end(self, load_id: LoadId) -> None:
        for wait in [each for each in self._waits if each.load == load_id]:
            self._waits.remove(wait)
            self._stop(wait)

    def tick(self) -> None:
        """Connect producers, and send the renewals and heartbeats that are due."""
        rank = self._rank
        for wait in self.waiting:
            if wait.link is not None and wait.link.broken:
                self._stop(wait)
            if wait.renewal is None and not wait.gone:
                rank.reach()
                known = rank.knows(wait.issue.ticket.incarnation)
                if known and rank.may_renew(wait.turn, wait.issue):
                    self._start(wait, at_once=True)
        due, overdue = self._renewals.take_due(rank.now())
        for transfer in rank.transfers:
            if transfer.op is None and any(ask in transfer.loads for ask in overdue):
                transfer.cancelled = True
        batches: dict[tuple[Link, int], dict[RenewalRequest, Wait]] = defaultdict(dict)
        for ask in due:
            found = self._find(ask)
            if found is not None and found.link is not None:
                batches[found.link, ask.rank][ask] = found
        for (link, remote), asks in batches.items():
            self._post(link, remote, asks)
        self._say_alive()

    def hear(self, transfer: Transfer) -> None:
        for ask in transfer.loads:
            if transfer.state is State.FAILED:
                self._renewals.read_ended(ask)
            else:
                self._answered(ask, transfer)

    def _find(self, ask: RenewalRequest) -> Wait | None:
        return next((wait for wait in self._waits if wait.renewal == ask.renewal), None)

    def _start(self, wait: Wait, *, at_once: bool) -> None:
        rank = self._rank
        wait.link = rank.link
        wait.renewal = self._renewals.begin(
            rank.remote_ranks, lease=LEASE, now=rank.now(), at_once=at_once
        )

    def _stop(self, wait: Wait) -> None:
        if wait.renewal is not None:
            self._renewals.end(wait.renewal)
        wait.renewal = wait.link = None

    def _say_alive(self) -> None:
        """Send a heartbeat to every renewed rank once a second."""
        rank, renewed = self._rank, self.renewed()
        if not renewed or rank.now() < self._next_heartbeat:
            return
        self._next_heartbeat = rank.now() + HEARTBEAT_SECONDS
        for incarnation in sorted({wait.issue.ticket.incarnation for wait in renewed}):
            engine = rank.engine
            note = Heartbeat(incarnation=incarnation, engine=engine.name, life=engine.life)
            for remote in rank.remote_ranks:
                rank.world.fabric.messages.append(rank.note(remote.rank, encode([note]), (0,)))

    def _post(self, link: Link, remote: int, asks: dict[RenewalRequest, Wait]) -> None:
        rank, words = self._rank, dict[RenewalRequest, int]()

        def take(ask: RenewalRequest, source: int) -> None:
            slot = asks[ask].issue.ticket.hold.slot
            words[ask] = rank.producer().ranks[source].producer.words[slot]

        notes = [
            Renewal(
                incarnation=wait.issue.ticket.incarnation,
                slot=wait.issue.ticket.hold.slot,
                generation=wait.issue.ticket.hold.generation,
                engine=rank.engine.name,
                life=rank.engine.life,
            )
            for wait in asks.values()
        ]
        origins = tuple(wait.turn.uid for wait in asks.values())
        transfer = Transfer(
            op=None,
            link=link,
            rank=remote,
            loads=tuple(asks),
            items=list(asks),
            take=take,
            words=words,
            message=rank.note(remote, encode(notes), origins),
        )
        try:
            rank.world.fabric.post(transfer)
        except PeerLostError:
            transfer.state = State.FAILED
            self.hear(transfer)
        else:
            rank.transfers.append(transfer)

    def _answered(self, ask: RenewalRequest, transfer: Transfer) -> None:
        wait = self._find(ask)
        stands = wait is not None and wait.issue.ticket.hold.stands(transfer.words[ask])
        if not self._renewals.answered(ask, stands=stands):
            return
        if wait is None:
            raise ProtocolViolation("a renewal that has ended was answered")
        self._rank.check_gone(wait.turn, wait.issue, transfer.rank)
        wait.gone = True
        self._stop(wait)
        if wait.load is not None:
            self._rank.abort(wait.load, STALE, gone())
