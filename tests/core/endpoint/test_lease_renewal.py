"""``LeaseRenewal`` renews holds; ``PendingTickets`` renews those of requests that wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.endpoint.lease_renewal import SEARCH_SECONDS, LeaseRenewal, PendingTickets
from kvferry.core.endpoint.slot_reads import SlotRead
from kvferry.core.errors import KVFerryError, StaleError, TicketError, TransportError
from kvferry.core.lifecycle.holds import NOTHING, Hold
from kvferry.core.lifecycle.load_machine import RemoteRank
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import Region
from tests.core.messages import ticket

HOLD = Hold(slot=3, generation=7)
SLOTS = Region(address=1 << 40, nbytes=1 << 10)


class PeerStub:
    """The attributes of a ``Peer`` that renewals and pending tickets use."""

    def __init__(self, lease: float = 30.0) -> None:
        self.lease = lease
        self.ranks = (RemoteRank(rank=0, reads=True), RemoteRank(rank=2, reads=False))
        self.incarnation = 5
        self.uses = 0
        self.connected = True
        self.payloads = [SimpleNamespace(slots=SLOTS)] * 3
        self.connections: dict[int, Any] = {}
        self.denies: Exception | None = None
        """What ``check`` raises."""

    def check(self, *_: object) -> None:
        if self.denies is not None:
            raise self.denies

    def acquire(self) -> None:
        self.uses += 1


class RenewalHarness:
    """A ``LeaseRenewal`` whose slot reads the test answers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads: list[SlotRead] = []
        self.heartbeats_sent: list[object] = []
        self.cancelled: list[object] = []
        self.ended: list[KVFerryError] = []
        own: Any = SimpleNamespace(engine="decode", incarnation=5)
        driver = SimpleNamespace(notify=lambda peer, _: self.heartbeats_sent.append(peer))
        calls: Any = SimpleNamespace(clock=lambda: self.now, transfers=self, transport=driver)
        self.renewal = LeaseRenewal(own, calls, self)  # type: ignore[arg-type]

    def add(self, read: SlotRead) -> None:
        self.reads.append(read)

    def cancel(self, tag: object) -> None:
        self.cancelled.append(tag)

    def begin(self, peer: Any, *, at_once: bool = True) -> Any:
        return self.renewal.begin(peer, HOLD, at_once=at_once, ended=self.ended.append)

    def due(self, now: float) -> list[SlotRead]:
        """Let time pass until ``now``; return the slot reads that were added."""
        self.now = now
        known = len(self.reads)
        self.renewal.progress(now)
        return self.reads[known:]


def test_a_hold_is_renewed_on_every_rank_and_ends_when_a_rank_that_is_read_has_lost_it() -> None:
    harness, peer = RenewalHarness(), PeerStub()
    renewal = harness.begin(peer)
    reads = harness.due(0.0)
    assert [(read.rank, read.slot) for read in reads] == [(0, 3), (2, 3)]
    assert {id(read.peer) for read in reads} == {id(peer)}
    note: Any = reads[0].note
    assert (note.incarnation, note.slot, note.generation) == (5, 3, 7)
    reads[1].landed(NOTHING, 0.1)
    assert not harness.ended, "the pages of a rank that is only notified are not needed"
    reads[0].landed(HOLD.ready, 0.1)
    assert harness.due(9.9) == []
    again = harness.due(10.0)
    assert len(again) == 2
    again[0].landed(NOTHING, 0.1)
    assert isinstance(harness.ended[0], StaleError)
    assert len(harness.renewal) == 0
    again[1].landed(NOTHING, 0.1)
    assert len(harness.ended) == 1
    harness.renewal.end(renewal)
    assert harness.due(100.0) == []


def test_ranks_get_a_heartbeat_a_second_and_none_during_a_short_load() -> None:
    harness, peer = RenewalHarness(), PeerStub()
    peer.connections = {0: "first rank", 2: "second rank"}
    harness.now = 100.0
    short = harness.begin(peer, at_once=False)
    harness.due(100.9)
    harness.renewal.end(short)
    harness.due(101.5)
    assert harness.heartbeats_sent == []
    harness.begin(peer)
    harness.due(102.4)
    assert harness.heartbeats_sent == []
    harness.begin(PeerStub())  # puts no heartbeat off
    for now in (102.5, 103.4, 103.5):
        harness.due(now)
    assert harness.heartbeats_sent == ["first rank", "second rank"] * 2


def test_an_unanswered_renewal_is_cancelled_and_repeated_once_it_has_ended() -> None:
    harness, peer = RenewalHarness(), PeerStub()
    harness.begin(peer)
    first, second = harness.due(0.0)
    assert harness.due(10.0) == []
    assert harness.cancelled == [first.tag, second.tag]
    second.lost(TransportError("cancelled"))
    assert [read.rank for read in harness.due(20.0)] == [2], "the other is still under way"


# Pending tickets.


class PendingTicketsHarness:
    """``PendingTickets`` whose producers are reached when the test says so."""

    def __init__(self) -> None:
        self.reach_calls: list[tuple[Any, Any]] = []
        self.renewals = RenewalHarness()
        self.pending_tickets = PendingTickets(self, self.renewals.renewal)  # type: ignore[arg-type]

    def connect(self, _: Ticket, ready: Any, failed: Any) -> None:
        self.reach_calls.append((ready, failed))

    def release(self, peer: PeerStub) -> None:
        peer.uses -= 1


def test_requests_with_the_same_ticket_share_one_renewal() -> None:
    harness, peer = PendingTicketsHarness(), PeerStub()
    for _ in range(2):
        harness.pending_tickets.add(ticket())
    harness.pending_tickets.add(ticket(generation=8))
    assert len(harness.reach_calls) == 2
    harness.reach_calls[0][0](peer)
    assert (peer.uses, len(harness.renewals.renewal)) == (1, 1)
    waited, gone = harness.pending_tickets.take(ticket())
    assert waited >= 0
    assert gone is None
    assert peer.uses == 1
    harness.pending_tickets.take(ticket())
    assert (peer.uses, len(harness.renewals.renewal)) == (0, 0)
    assert harness.pending_tickets.take(ticket()) == (0.0, None)
    harness.reach_calls[1][0](peer)
    assert peer.uses == 1


def test_a_lost_hold_is_reported_when_its_request_is_taken() -> None:
    harness, peer = PendingTicketsHarness(), PeerStub()
    harness.pending_tickets.add(ticket())
    harness.reach_calls[0][0](peer)
    for read in harness.renewals.due(0.0):
        read.landed(NOTHING, 0.1)
    assert peer.uses == 0
    harness.pending_tickets.progress(1.0)
    assert len(harness.reach_calls) == 1, "there is nothing to renew"
    assert isinstance(harness.pending_tickets.take(ticket())[1], StaleError)


def test_a_producer_that_could_not_be_reached_is_tried_again_at_intervals() -> None:
    harness, peer = PendingTicketsHarness(), PeerStub()
    harness.pending_tickets.add(ticket())
    harness.pending_tickets.progress(1.0)
    assert len(harness.reach_calls) == 1, "it is being reached"
    harness.reach_calls[0][1](TransportError("no"))
    harness.pending_tickets.progress(1.0 + SEARCH_SECONDS / 2)
    assert len(harness.reach_calls) == 1, "not too often"
    harness.pending_tickets.progress(1.0 + SEARCH_SECONDS)
    assert len(harness.reach_calls) == 2
    harness.reach_calls[1][0](peer)
    harness.pending_tickets.progress(2.0)
    assert len(harness.reach_calls) == 2
    peer.connected = False
    harness.pending_tickets.progress(3.0)
    assert (peer.uses, len(harness.renewals.renewal), len(harness.reach_calls)) == (0, 0, 3)


def test_a_ticket_that_its_producer_denies_is_not_renewed() -> None:
    harness, peer = PendingTicketsHarness(), PeerStub()
    peer.denies = TicketError("no")
    harness.pending_tickets.add(ticket())
    ready, failed = harness.reach_calls[0]
    with pytest.raises(TicketError) as refused:
        ready(peer)
    failed(refused.value)
    harness.pending_tickets.progress(1.0)
    assert (peer.uses, len(harness.renewals.renewal), len(harness.reach_calls)) == (0, 0, 1)
    assert harness.pending_tickets.take(ticket())[1] is None, "the load will say so"


def test_a_producer_reached_after_its_ticket_was_taken_is_not_renewed() -> None:
    harness, peer = PendingTicketsHarness(), PeerStub()
    harness.pending_tickets.add(ticket())
    harness.pending_tickets.take(ticket())
    harness.reach_calls[0][0](peer)
    assert (peer.uses, len(harness.renewals.renewal)) == (0, 0)
    harness.pending_tickets.add(ticket())
    harness.reach_calls[0][0](peer)
    assert peer.uses == 0, "that call was for the earlier wait"
    harness.reach_calls[1][0](peer)
    assert peer.uses == 1
