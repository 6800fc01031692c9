"""Leases: renewals, heartbeats, tickets whose requests wait for pages, and shared holds."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.endpoint.lease_renewal import SEARCH_SECONDS, LeaseRenewal, PendingTickets
from kvferry.core.endpoint.slot_reads import SlotRead
from kvferry.core.errors import (
    KVFerryError,
    StaleError,
    TicketError,
    TransportError,
)
from kvferry.core.lifecycle.holds import NOTHING, Hold
from kvferry.core.lifecycle.load_machine import RemoteRank
from kvferry.core.lifecycle.silent_holds import GONE_SECONDS
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import Region
from kvferry.core.messages import Release, Renewal
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import Clock, Engine, RecordingTransport, eventually, until
from tests.core.messages import ticket

HOLD = Hold(slot=3, generation=7)
SLOTS = Region(address=1 << 40, nbytes=1 << 10)


class PeerStub:
    """The attributes of a ``Peer`` that renewals and pending tickets use."""

    def __init__(self, denies: Exception | None = None) -> None:
        self.lease, self.incarnation, self.uses, self.connected = 30.0, 5, 0, True
        self.ranks = (RemoteRank(rank=0, reads=True), RemoteRank(rank=2, reads=False))
        self.payloads = [SimpleNamespace(slots=SLOTS)] * 3
        self.key = SimpleNamespace(engine="prefill")
        self.connections: dict[int, Any] = {}
        self.denies = denies

    def check(self, *_: object) -> None:
        if self.denies is not None:
            raise self.denies

    def acquire(self) -> None:
        self.uses += 1


class Harness:
    """``LeaseRenewal`` and ``PendingTickets``, and all that they use."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads: list[SlotRead] = []
        self.heartbeats: list[object] = []
        self.cancelled: list[object] = []
        self.ended: list[KVFerryError] = []
        self.connects: list[tuple[Any, Any]] = []
        driver = SimpleNamespace(notify=self._notify)
        own: Any = SimpleNamespace(engine="decode", incarnation=5)
        calls: Any = SimpleNamespace(clock=lambda: self.now, transfers=self, transport=driver)
        self.renewal = LeaseRenewal(own, calls, self)  # type: ignore[arg-type]
        self.pending = PendingTickets(self, self.renewal)  # type: ignore[arg-type]

    # As ``SlotReads``, ``Transfers`` and ``Peers``.

    def add(self, read: SlotRead) -> None:
        self.reads.append(read)

    def cancel(self, tag: object) -> None:
        self.cancelled.append(tag)

    def connect(self, _: Ticket, ready: Any, failed: Any) -> None:
        self.connects.append((ready, failed))

    def release(self, peer: PeerStub) -> None:
        peer.uses -= 1

    # As the driver, which cannot send to one rank.

    def _notify(self, peer: object, _: bytes) -> None:
        self.heartbeats.append(peer)
        if peer == "first rank":
            raise TransportError("the queue is full")

    # As the test.

    def begin(self, peer: Any, *, at_once: bool = True) -> Any:
        return self.renewal.begin(peer, HOLD, at_once=at_once, ended=self.ended.append)

    def due(self, now: float) -> list[SlotRead]:
        """Let time pass until ``now``; return the slot reads that were added."""
        self.now, known = now, len(self.reads)
        self.renewal.progress(now)
        return self.reads[known:]


@pytest.fixture
def harness() -> Harness:
    return Harness()


@pytest.fixture
def peer() -> PeerStub:
    return PeerStub()


def test_a_hold_is_renewed_on_every_rank_and_ends_when_a_rank_that_is_read_has_lost_it(
    harness: Harness, peer: PeerStub
) -> None:
    renewal = harness.begin(peer)
    reads = harness.due(0.0)
    assert [(read.rank, read.slot, id(read.peer)) for read in reads] == [
        (rank, 3, id(peer)) for rank in (0, 2)
    ]
    note: Any = reads[0].note
    assert (note.incarnation, note.slot, note.generation) == (5, 3, 7)
    reads[1].landed(NOTHING, 0.1)
    assert not harness.ended, "the pages of a rank that is only notified are not needed"
    reads[0].landed(HOLD.ready, 0.1)
    assert harness.due(9.9) == []
    again = harness.due(10.0)
    for read in again:
        read.landed(NOTHING, 0.1)
    assert [type(error) for error in harness.ended] == [StaleError]
    assert len(harness.renewal) == 0
    harness.renewal.end(renewal)
    assert harness.due(100.0) == []


def test_a_rank_that_has_a_fence_is_renewed_no_more(harness: Harness, peer: PeerStub) -> None:
    renewal = harness.begin(peer)
    for read in harness.due(0.0):
        read.landed(HOLD.ready, 0.1)
    harness.renewal.end_rank(renewal, 0)
    assert [read.rank for read in harness.due(10.0)] == [2]
    harness.renewal.end_rank(None, 2)  # of a load that is not renewed


def test_ranks_get_a_heartbeat_a_second_and_none_during_a_short_load(
    harness: Harness, peer: PeerStub
) -> None:
    peer.connections = {0: "first rank", 2: "second rank"}
    harness.now = 100.0
    short = harness.begin(peer, at_once=False)
    harness.due(100.9)
    harness.renewal.end(short)
    harness.due(101.5)
    harness.begin(peer)
    harness.due(102.4)
    assert harness.heartbeats == []
    harness.begin(PeerStub())  # puts no heartbeat off
    for now in (102.5, 103.4, 103.5):
        harness.due(now)
    assert harness.heartbeats == ["first rank", "second rank"] * 2


def test_an_unanswered_renewal_is_cancelled_and_repeated_once_it_has_ended(
    harness: Harness, peer: PeerStub
) -> None:
    harness.begin(peer)
    first, second = harness.due(0.0)
    assert harness.due(10.0) == []
    assert harness.cancelled == [first.tag, second.tag]
    second.lost(TransportError("cancelled"))
    assert [read.rank for read in harness.due(20.0)] == [2], "the other is still under way"


# Pending tickets.


def test_requests_with_the_same_ticket_share_one_renewal(harness: Harness, peer: PeerStub) -> None:
    for generation in (7, 7, 8):
        harness.pending.add(ticket(generation))
    [(ready, _), (other_ready, _)] = harness.connects
    ready(peer)
    for _ in range(2):
        assert (peer.uses, len(harness.renewal)) == (1, 1)
        waited, gone = harness.pending.take(ticket(7))
        assert waited >= 0
        assert gone is None
    assert (peer.uses, len(harness.renewal)) == (0, 0)
    assert harness.pending.take(ticket(7)) == (0.0, None)
    harness.pending.add(ticket(7))
    ready(peer)
    assert peer.uses == 0, "that call was for the earlier wait"
    other_ready(peer)
    assert peer.uses == 1


@pytest.mark.parametrize("denied", [False, True])
def test_a_ticket_that_is_denied_or_lost_is_renewed_no_more(harness: Harness, denied: bool) -> None:
    peer = PeerStub(TicketError("no") if denied else None)
    harness.pending.add(ticket())
    [(ready, failed)] = harness.connects
    if denied:
        with pytest.raises(TicketError) as refused:
            ready(peer)
        failed(refused.value)
    else:
        ready(peer)
        for read in harness.due(0.0):
            read.landed(NOTHING, 0.1)
    harness.pending.progress(1.0)
    assert (peer.uses, len(harness.renewal), len(harness.connects)) == (0, 0, 1)
    gone = harness.pending.take(ticket())[1]
    assert gone is None if denied else isinstance(gone, StaleError), "the load says so if denied"


def test_a_producer_that_could_not_be_reached_or_is_lost_is_tried_again_at_intervals(
    harness: Harness, peer: PeerStub
) -> None:
    def tries(now: float) -> int:
        harness.pending.progress(now)
        return len(harness.connects)

    harness.pending.add(ticket())
    assert tries(1.0) == 1, "it is being reached"
    harness.connects[0][1](TransportError("no"))
    assert tries(1.0 + SEARCH_SECONDS / 2) == 1, "not too often"
    assert tries(1.0 + SEARCH_SECONDS) == 2
    harness.connects[1][0](peer)
    assert tries(2.0) == 2
    peer.connected = False
    assert tries(3.0) == 3
    assert (peer.uses, len(harness.renewal)) == (0, 0)


# Between real endpoints.

LEASE = 30.0
OPTIONS = EndpointOptions(liveness_interval=0, lease=LEASE, load_timeout=1000.0)


class Drivers(list[RecordingTransport]):
    """The transports of a producer's ranks."""

    def wait_for_renewals(self, known: Sequence[int] = (0, 0)) -> None:
        """Wait until each driver has got more renewals than were known."""
        pairs = list(zip(self, known, strict=False))
        eventually(lambda: all(len(d.notes(Renewal)) > n for d, n in pairs), "renewals arrive")

    def pass_time(self, clock: Clock, steps: int, seconds: float) -> None:
        """Let time pass, in steps in each of which a renewal arrives at every rank."""
        for _ in range(steps):
            counts = [len(driver.notes(Renewal)) for driver in self]
            clock.skip(seconds)
            self.wait_for_renewals(counts)


@contextlib.contextmanager
def pair(clock: Clock, ranks: int = 1) -> Iterator[tuple[Engine, Engine, Drivers]]:
    """Run two engines; yield them and the transports of the producer's ranks."""
    drivers = Drivers(RecordingTransport() for _ in range(ranks))
    made, shape = iter(drivers), CacheShape(tp=ranks, pages=32)
    with (
        Engine(
            "prefill", shape, transport=lambda: next(made), options=OPTIONS, clock=clock
        ) as prefill,
        Engine("decode", options=OPTIONS, clock=clock) as decode,
    ):
        yield prefill, decode, drivers


@pytest.mark.parametrize("is_load", [False, True])
def test_a_request_that_waits_for_pages_or_the_device_keeps_its_hold_on_every_rank(
    clock: Clock, is_load: bool
) -> None:
    with pair(clock, ranks=2) as (prefill, decode, drivers):
        ticket = prefill.serve_later("p-1", [1, 2], 8)
        if is_load:
            decode.pull("d-1", ticket, [3, 4])
            eventually(lambda: decode.endpoint.pending == 1, "the load is under way")
            clock.skip(2.0)
        else:
            decode.prepare(ticket)
        drivers.wait_for_renewals()
        drivers.pass_time(clock, 4, LEASE / 2)
        prefill.step()
        if not is_load:
            decode.pull("d-1", ticket, [3, 4])
        assert decode.error("d-1") is None
        prefill.released("p-1")


def test_a_lost_hold_fails_its_request_before_anything_is_read(clock: Clock) -> None:
    with pair(clock) as (prefill, decode, drivers):
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.prepare(ticket)
        drivers.wait_for_renewals()
        prefill.reset("p-1")
        drivers.pass_time(clock, 1, LEASE / 2)
        error = decode.load("d-1", ticket, [3, 4])
        assert "when their lease was to be renewed" in str(error)
        assert np.isnan(decode.ranks[0].cache).all()


def silent(prefill: Engine) -> list[int]:
    return [len(rank.endpoint.silent()) for rank in prefill.ranks]


def test_holds_of_a_dead_consumer_are_silent_after_three_seconds_and_can_be_ended(
    clock: Clock,
) -> None:
    with pair(clock) as (prefill, decode, drivers):
        server = prefill.endpoint._hold_server
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.prepare(ticket)
        drivers.wait_for_renewals()
        decode.close()
        clock.skip(GONE_SECONDS - 1.0)
        listened = server._listened
        eventually(lambda: server._listened > listened, "it looks for notifications once more")
        assert silent(prefill) == [0]
        clock.skip(1.5)
        eventually(lambda: silent(prefill) == [1], "the hold is silent")
        [silent_hold] = prefill.endpoint.silent()
        assert silent_hold.engines == ("decode",)
        assert prefill.scheduler_holds.give_up([silent_hold], 1) == [silent_hold]
        prefill.step()
        prefill.released("p-1")
        with Engine("decode", options=OPTIONS, clock=clock) as successor:
            assert isinstance(successor.load("d-1", ticket, [3, 4]), StaleError)


# Requests of one engine that share a hold.


@contextlib.contextmanager
def two_ranks(clock: Clock) -> Iterator[tuple[Engine, Engine]]:
    """Run two engines of two ranks; in the end, each rank has got one "done", and no "abandon"."""
    with (
        pair(clock, ranks=2) as (prefill, _, drivers),
        Engine("two", CacheShape(tp=2), options=OPTIONS) as decode,
    ):
        yield prefill, decode
        prefill.released("p-1")
        for driver in drivers:
            assert [release.abandoned for release in driver.notes(Release)] == [False]


def test_several_requests_load_and_one_done_ends_the_hold(clock: Clock) -> None:
    """The ranks start the loads in different orders."""
    with two_ranks(clock) as (prefill, decode):
        ticket = prefill.serve("p-1", [1, 2], 8)
        loads = {"d-1": [3, 4], "d-2": [5, 6], "d-3": [7, 8]}
        for index, rank in enumerate(decode.ranks):
            alone = copy.copy(decode)
            alone.endpoints = (rank.endpoint,)
            for name in list(loads)[:: 1 if index else -1]:
                alone.pull(name, ticket, loads[name], shared=True)
        assert not any(map(decode.error, loads))
        assert not any(decode.wrong_bytes(pages, 8) for pages in loads.values())
        decode.pull("done", ticket, [], nothing=True)


def test_a_shared_request_that_needs_nothing_connects_to_no_producer(clock: Clock) -> None:
    with pair(clock) as (prefill, decode, _):
        ticket = prefill.serve("p-1", [1], 4)
        decode.pull("d-1", ticket, [], nothing=True, shared=True)
        decode.pull("d-2", ticket, [2])
        results = until(decode.endpoint, lambda results: bool(results.loads))
        assert [record.request for record in results.loads] == ["d-2"]
