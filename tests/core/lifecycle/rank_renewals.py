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
from tests.core.lifecycle.fabric import Link, Message, Transfer, renewal, require
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
        self._loading: dict[LoadId, Wait] = {}
        self._by_id: dict[RenewalId, Wait] = {}
        self._next_heartbeat = -math.inf

    @property
    def waiting(self) -> bool:
        return bool(self._waits)

    def renewed(self) -> list[Wait]:
        """Return the waits that are renewed over an open connection."""
        return [w for w in self._by_id.values() if w.link is not None and not w.link.broken]

    # Requests that wait.

    def prepare(self, turn: Turn, issue: Issue) -> None:
        self._waits.append(Wait(turn=turn, issue=issue))

    def take(self, turn: Turn) -> bool:
        """End the wait of a request; return whether its hold was found gone."""
        for wait in self._waits:
            if wait.turn is turn:
                self._waits.remove(wait)
                self._end(wait)
                return wait.gone
        require(False, "a load of a request that was not prepared")
        return False

    # Loads.

    def begin(self, load_id: LoadId, pull: Pull) -> None:
        wait = Wait(turn=pull.turn, issue=pull.issue, load=load_id)
        self._loading[load_id] = wait
        self._start(wait, at_once=False)

    def end_rank(self, load_id: LoadId, rank: int) -> None:
        """Stop renewing a load on a rank, because its fence is posted."""
        wait = self._loading.get(load_id)
        if wait is not None and wait.renewal is not None:
            wait.settled.add(rank)
            self._renewals.end_rank(wait.renewal, rank)

    def end(self, load_id: LoadId) -> None:
        wait = self._loading.pop(load_id, None)
        if wait is not None:
            self._end(wait)

    # Progress.

    def tick(self) -> None:
        """Connect producers, and send the renewals and heartbeats that are due."""
        for wait in self._waits:
            if wait.link is not None and wait.link.broken:
                self._end(wait)
            if wait.renewal is None and not wait.gone:
                self._rank.reach()
                known = self._rank.knows(wait.issue.ticket.incarnation)
                if known and self._rank.may_renew(wait.turn, wait.issue):
                    self._start(wait, at_once=True)
        due, overdue = self._renewals.take_due(self._rank.now())
        for transfer in self._rank.transfers:
            if transfer.op is None and any(ask in transfer.loads for ask in overdue):
                transfer.cancelled = True
        self._ask(due)
        self._say_alive()

    def hear(self, transfer: Transfer) -> None:
        for ask in transfer.loads:
            if transfer.state is State.FAILED:
                self._renewals.read_ended(ask)
            else:
                self._answered(ask, transfer)

    def _start(self, wait: Wait, *, at_once: bool) -> None:
        rank = self._rank
        wait.link = rank.link
        wait.renewal = self._renewals.begin(
            rank.remote_ranks, lease=LEASE, now=rank.now(), at_once=at_once
        )
        self._by_id[wait.renewal] = wait

    def _end(self, wait: Wait) -> None:
        if wait.renewal is not None:
            self._renewals.end(wait.renewal)
            self._by_id.pop(wait.renewal, None)
        wait.renewal = wait.link = None

    def _ask(self, due: list[RenewalRequest]) -> None:
        batches: dict[tuple[Link, int], list[RenewalRequest]] = defaultdict(list)
        for ask in due:
            link = self._by_id[ask.renewal].link
            if link is not None:
                batches[link, ask.rank].append(ask)
        for (link, rank), asks in batches.items():
            self._post(link, rank, asks)

    def _say_alive(self) -> None:
        """Send a heartbeat to every renewed rank once a second; older builds send none."""
        rank, renewed = self._rank, self.renewed()
        if not renewed or rank.now() < self._next_heartbeat or not rank.engine.life:
            return
        self._next_heartbeat = rank.now() + HEARTBEAT_SECONDS
        incarnations = {wait.issue.ticket.incarnation for wait in renewed}
        for incarnation in sorted(incarnations):
            engine = rank.engine
            note = Heartbeat(incarnation=incarnation, engine=engine.name, life=engine.life)
            rank.world.fabric.messages += [
                rank.note(remote.rank, encode([note]), (0,)) for remote in rank.remote_ranks
            ]

    def _post(self, link: Link, rank: int, asks: list[RenewalRequest]) -> None:
        words: dict[RenewalRequest, int] = {}
        slots = {ask: self._by_id[ask.renewal].issue.ticket.hold.slot for ask in asks}

        def take(ask: RenewalRequest, source: int) -> None:
            words[ask] = self._rank.producer().ranks[source].producer.words[slots[ask]]

        transfer = Transfer(
            op=None,
            link=link,
            rank=rank,
            loads=tuple(asks),
            items=list(asks),
            take=take,
            words=words,
            message=self._message(rank, asks),
        )
        try:
            self._rank.world.fabric.post(transfer)
        except PeerLostError:
            transfer.state = State.FAILED
            self.hear(transfer)
        else:
            self._rank.transfers.append(transfer)

    def _message(self, rank: int, asks: list[RenewalRequest]) -> Message:
        waits = [self._by_id[ask.renewal] for ask in asks]
        engine = self._rank.engine
        name = engine.name if engine.life else ""
        notes = [renewal(wait.issue.ticket, engine=name, life=engine.life) for wait in waits]
        return self._rank.note(rank, encode(notes), tuple(wait.turn.uid for wait in waits))

    def _answered(self, ask: RenewalRequest, transfer: Transfer) -> None:
        wait = self._by_id.get(ask.renewal)
        word = transfer.words[ask]
        stands = wait is not None and wait.issue.ticket.hold.stands(word)
        if not self._renewals.answered(ask, stands=stands):
            return
        if wait is None:
            require(False, "a renewal that has ended was answered")
            return
        self._rank.check_gone(wait.turn, wait.issue, transfer.rank)
        wait.gone = True
        load_id = wait.load
        self._end(wait)
        if load_id is not None:
            self._rank.abort(load_id, STALE, gone())
