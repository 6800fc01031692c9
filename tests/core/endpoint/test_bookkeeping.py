"""The small books of an endpoint, each alone: who is up, what a load took, who waits for what."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvferry.core.endpoint import peers as peers_module
from kvferry.core.endpoint.device_sync import DeviceSync
from kvferry.core.endpoint.lease_renewal import SEARCH_SECONDS, LeaseRenewal, PendingTickets
from kvferry.core.endpoint.load import Load, LoadState
from kvferry.core.endpoint.peers import PeerStatus, PeerUse
from kvferry.core.endpoint.slot_reads import SlotRead
from kvferry.core.endpoint.transfers import Grace, Outcome, Read
from kvferry.core.errors import (
    DeadlineError,
    EndpointClosedError,
    KVFerryError,
    StaleError,
    TicketError,
    TransferCancelledError,
    TransportError,
)
from kvferry.core.layout import HOLE
from kvferry.core.lifecycle.holds import NOTHING, Hold, Incarnation, RequestId
from kvferry.core.lifecycle.loads import LoadId, RemoteRank
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.metrics import PEERS_DOWN, PEERS_UP, Stage
from kvferry.core.planner.build_copies import Pages
from kvferry.core.transport import PeerId

HOLD = Hold(slot=3, generation=7)


def ticket(request: str = "p-1", engine: str = "prefill", generation: int = 7) -> Ticket:
    return Ticket(
        engine=engine,
        incarnation=Incarnation(5),
        request=request,
        host="127.0.0.1",
        port=1,
        hold=Hold(slot=3, generation=generation),
        pages=((1, 2),),
        first_index=(4,),
        tokens=8,
        digest=b"0" * 16,
        computed=True,
        tp_size=1,
    )


def load(request: str = "d-1", **how: Any) -> Load:
    ids = np.array([5, HOLE, 6], dtype=np.int64)
    parts: dict[str, Any] = {
        "ranges": ((2, 8), None, (0, 4)),
        "local": (Pages(ids=ids, first_index=0),),
        **how,
    }
    return Load(request=RequestId(request), ticket=ticket(), **parts)


# Who is up.


class Gauges:
    """Figures, as far as who is up is told to them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.said: dict[object, float] = {}
        self.told = 0
        self.standing = PeerStatus(self, lambda: self.now, 10.0)  # type: ignore[arg-type]

    def set(self, figure: object, value: float) -> None:
        self.said[figure] = value
        self.told += 1

    @property
    def up_and_down(self) -> tuple[float, float]:
        return self.said[PEERS_UP], self.said[PEERS_DOWN]


def test_engines_are_up_by_start_and_down_by_name() -> None:
    gauges = Gauges()
    gauges.standing.connected("a", ("a", 1))
    gauges.standing.connected("a", ("a", 2))
    assert gauges.up_and_down == (2, 0)
    gauges.standing.lost("a")
    gauges.standing.lost("b")
    assert gauges.up_and_down == (2, 2)
    gauges.standing.released(("a", 1))
    gauges.standing.released(("never", 1))
    assert gauges.up_and_down == (1, 2)
    gauges.standing.connected("a", ("a", 3))
    assert gauges.up_and_down == (2, 1)


def test_who_is_down_is_forgotten_when_nobody_asks_for_it() -> None:
    gauges = Gauges()
    for now, engine in ((0.0, "a"), (4.0, "b"), (5.0, "a")):
        gauges.now = now
        gauges.standing.lost(engine)
    told = gauges.told
    gauges.standing.progress(13.9)
    assert gauges.told == told, "nothing is said while nothing changes"
    gauges.standing.progress(14.0)
    assert gauges.up_and_down == (0, 1)
    gauges.standing.progress(15.0)
    assert gauges.up_and_down == (0, 0)


def test_of_who_is_down_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "MAX_DOWN", 2)
    gauges = Gauges()
    for engine in "abac":
        gauges.standing.lost(engine)
    assert gauges.up_and_down == (0, 2)
    gauges.standing.connected("a", "a")
    assert gauges.up_and_down == (1, 1), "the one that was lost longest ago is forgotten"


# What a load took.


def outcome(**how: Any) -> Outcome:
    parts: dict[str, Any] = {
        "error": None, "copies": 2, "nbytes": 10, "begun": 5.0, "seconds": 3.0, "post_seconds": 1.0,
        **how,
    }  # fmt: skip
    return Outcome(**parts)


def test_of_several_ranks_bytes_are_added_and_the_longest_times_count() -> None:
    context = LoadState(load_id=LoadId(1), load=load(), begun=1.0, handshake_succeeded=2.0)
    context.add(outcome())
    context.add(outcome(begun=4.0, seconds=7.0, post_seconds=2.5))
    context.add(outcome(begun=0.0, seconds=100.0, post_seconds=50.0))  # never posted
    assert (context.copies, context.nbytes) == (6, 30)
    times = context.check_seconds, context.post_seconds, context.transfer_seconds
    assert times == (3.0, 2.5, 4.5)


def test_a_load_is_recorded_with_where_it_failed() -> None:
    context = LoadState(load_id=LoadId(1), load=load(), begun=1.0, handshake_succeeded=1.5)
    record = context.record(None, None)
    assert (record.request, record.engine, record.reached, record.path) == (
        "d-1", "prefill", False, "",
    )  # fmt: skip
    assert (record.error, record.stage, record.reads, record.tokens) == (None, None, True, 8 - 2)
    assert (record.handshake_seconds, record.fence_seconds) == (0.5, 0.0)
    assert record.seconds > 0
    error = StaleError("late")
    for stage in Stage:
        assert context.record(error, stage).stage is stage
    context.failed_at = Stage.WAIT
    assert context.record(error, Stage.TRANSFER).stage is Stage.WAIT
    context.handshake_succeeded = 0.0
    assert context.record(error, Stage.HANDSHAKE).handshake_seconds == 0.0
    assert context.record(error, Stage.HANDSHAKE).error is error


def test_a_load_that_reads_nothing_has_no_tokens() -> None:
    nothing = load(ranges=(None, None))
    assert not nothing.reads
    record = LoadState(load_id=LoadId(1), load=nothing, begun=0.0).record(None, None)
    assert (record.tokens, record.reads) == (0, False)


def test_holes_are_no_pages_of_a_load_and_its_request_names_the_tickets() -> None:
    context = LoadState(load_id=LoadId(1), load=load(), begun=0.0)
    assert context.pages == 2
    [remote] = context.request.remote
    assert (remote.ids.tolist(), remote.first_index) == ([1, 2], 4)
    assert context.request.ranges == load().ranges
    assert context.request is context.request
    with pytest.raises(EndpointClosedError, match="handshake is not over"):
        _ = context.known_peer


# Loads that wait for the device.


class Device:
    """Work that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.begun: list[tuple[str, KVFerryError | None]] = []
        self.awaiting = DeviceSync(self._begin, clock=lambda: self.now, patience=10.0)

    def _begin(self, load: Load, error: KVFerryError | None) -> None:
        self.begun.append((load.request, error))

    def add(self, request: str, passed: Callable[[], bool]) -> None:
        self.awaiting.add(load(request), passed)


def test_loads_begin_in_their_order_as_the_device_passes() -> None:
    device, passed = Device(), {"a": False, "b": True}
    for request in "ab":
        device.add(request, lambda request=request: passed[request])  # type: ignore[misc]
    assert not device.awaiting.progress()
    assert len(device.awaiting) == 2
    passed["a"] = True
    assert device.awaiting.progress()
    assert device.begun == [("a", None), ("b", None)]
    assert not device.awaiting.progress()


def test_a_device_has_so_much_time_for_each_load() -> None:
    device = Device()
    device.add("a", lambda: False)
    device.now = 5.0
    device.add("b", lambda: False)
    device.now = 9.9
    assert not device.awaiting.progress()
    device.now = 10.0
    assert device.awaiting.progress()
    [(request, error)] = device.begun
    assert request == "a"
    assert isinstance(error, DeadlineError)
    assert "after 10 s" in str(error)
    assert len(device.awaiting) == 1


def test_one_load_or_all_can_be_given_up() -> None:
    device = Device()
    for request in "abc":
        device.add(request, lambda: False)
    device.awaiting.give_up(RequestId("b"))
    assert [request for request, _ in device.begun] == ["b"]
    device.awaiting.give_up()
    assert [request for request, _ in device.begun] == ["b", "a", "c"]
    assert all(isinstance(error, EndpointClosedError) for _, error in device.begun)
    assert len(device.awaiting) == 0


# Renewals.


class FakePeer:
    """A producer, as far as waiting and renewing see it."""

    def __init__(self, lease: float | None = 30.0) -> None:
        self.lease = lease
        self.parties = (RemoteRank(rank=0, reads=True), RemoteRank(rank=2, reads=False))
        self.incarnation = 5
        self.waits = 0
        self.connected = True
        self.payloads = ()
        self.page_limits = ()
        self.heartbeats: dict[int, Any] = {}

    def acquire(self, use: PeerUse) -> None:
        assert use is PeerUse.TICKET
        self.waits += 1

    def release(self, use: PeerUse) -> None:
        assert use is PeerUse.TICKET
        self.waits -= 1


class Renewing:
    """A renewer whose reads the test answers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads: list[SlotRead] = []
        self.told: list[object] = []
        self.cancelled: list[object] = []
        self.graces: list[Grace] = []
        self.lost: list[tuple[object, int, KVFerryError]] = []
        self.failing: list[tuple[object, int, KVFerryError]] = []
        self.ended: list[KVFerryError] = []
        self.renewer = LeaseRenewal(
            engine="decode",
            life=5,
            notify=lambda peer, _: self.told.append(peer),
            slot_reads=self,  # type: ignore[arg-type]
            transfers=self,  # type: ignore[arg-type]
            lost=lambda *what: self.lost.append(what),
            failing=lambda *what: self.failing.append(what),
        )

    def add(self, read: SlotRead) -> None:
        self.reads.append(read)

    def cancel(self, tag: object, grace: Grace) -> None:
        self.cancelled.append(tag)
        self.graces.append(grace)

    def begin(self, peer: Any, *, at_once: bool = True) -> Any:
        return self.renewer.begin(
            peer, HOLD, now=self.now, at_once=at_once, ended=self.ended.append
        )

    def due(self, now: float) -> list[SlotRead]:
        """What is read now."""
        self.now = now
        known = len(self.reads)
        self.renewer.progress(now)
        return self.reads[known:]


def test_a_hold_is_renewed_with_every_rank_and_ends_when_one_that_is_read_lost_it() -> None:
    renewing, peer = Renewing(), FakePeer()
    renewal = renewing.begin(peer)
    reads = renewing.due(0.0)
    assert [(read.rank, read.slot) for read in reads] == [(0, 3), (2, 3)]
    assert {id(read.peer) for read in reads} == {id(peer)}
    note: Any = reads[0].note
    assert (note.incarnation, note.slot, note.generation) == (5, 3, 7)
    reads[1].landed(NOTHING, 0.1)
    assert not renewing.ended, "a replica's pages are not needed"
    reads[0].landed(HOLD.ready, 0.1)
    assert renewing.due(9.9) == []
    again = renewing.due(10.0)
    assert len(again) == 2
    again[0].landed(NOTHING, 0.1)
    assert isinstance(renewing.ended[0], StaleError)
    assert len(renewing.renewer) == 0
    again[1].landed(NOTHING, 0.1)
    assert len(renewing.ended) == 1
    renewing.renewer.end(renewal)
    assert renewing.due(100.0) == []


def test_a_heartbeat_a_second_tells_whoever_knows_them_and_none_is_for_a_short_load() -> None:
    renewing, peer = Renewing(), FakePeer()
    peer.heartbeats = {0: "first rank", 2: "second rank"}
    renewing.now = 100.0
    short = renewing.begin(peer, at_once=False)
    renewing.due(100.9)
    renewing.renewer.end(short)
    renewing.due(101.5)
    assert renewing.told == []
    renewing.begin(peer)
    renewing.begin(FakePeer())
    renewing.due(102.4)
    assert renewing.told == []
    for now in (102.5, 103.4, 103.5):
        renewing.due(now)
    assert renewing.told == ["first rank", "second rank"] * 2


def test_who_knows_no_renewals_is_not_asked_for_any() -> None:
    renewing = Renewing()
    assert renewing.begin(FakePeer(lease=None)) is None
    renewing.renewer.end(None)
    renewing.renewer.settle(None, 0)
    assert renewing.due(0.0) == []
    assert len(renewing.renewer) == 0


def test_a_rank_whose_fence_is_posted_is_renewed_no_more() -> None:
    renewing = Renewing()
    renewal = renewing.begin(FakePeer(), at_once=False)
    assert renewing.due(0.9) == []
    renewing.renewer.settle(renewal, 0)
    assert [read.rank for read in renewing.due(1.0)] == [2]


def under_way(failure: KVFerryError | None) -> Read:
    """A read of a renewal that goes on after its grace."""

    def never(*_: object) -> Any:
        raise AssertionError("the renewal does not ask")

    return Read(peer=PeerId(1), build=never, finished=never, failing=never, failure=failure)


def test_a_renewal_that_is_not_answered_is_cancelled_and_has_its_grace_to_end() -> None:
    renewing, peer = Renewing(), FakePeer()
    renewing.begin(peer)
    first, second = renewing.due(0.0)
    assert renewing.due(10.0) == []
    assert renewing.cancelled == [first.tag, second.tag]
    cancelled = TransferCancelledError("cancelled")
    first.failing(cancelled)
    second.failing(cancelled)
    second.lost(cancelled)
    assert not renewing.failing
    assert not renewing.graces[0].escalate([under_way(cancelled)]), "that is said once"
    assert renewing.failing == [(peer, 0, cancelled)]
    assert renewing.lost == [(peer, 2, cancelled)]
    assert [read.rank for read in renewing.due(20.0)] == [2], "the other is still under way"


def test_a_renewal_that_goes_on_is_left_alone_until_the_driver_says_that_it_will_fail() -> None:
    renewing, peer = Renewing(), FakePeer()
    renewing.begin(peer)
    renewing.due(0.0)
    renewing.due(10.0)
    assert renewing.graces[1].escalate([under_way(None)]), "it is looked at again"
    assert not renewing.failing
    cancelled = TransferCancelledError("cancelled")
    assert not renewing.graces[1].escalate([under_way(cancelled)])
    assert renewing.failing == [(peer, 2, cancelled)]


def test_a_renewal_that_fails_without_being_cancelled_is_said_at_once() -> None:
    renewing, peer = Renewing(), FakePeer()
    renewing.begin(peer)
    first, _ = renewing.due(0.0)
    error = TransportError("out")
    first.failing(error)
    assert renewing.failing == [(peer, 0, error)]


# Tickets that wait.


class Reaching:
    """Tickets that wait; the test says when their producers are reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[Any, Any]] = []
        self.renewing = Renewing()
        self.denies: Exception | None = None
        monkeypatch.setattr(FakePeer, "check", self._check, raising=False)
        self.waiting = PendingTickets(self, self.renewing.renewer, lambda: 0.0)  # type: ignore[arg-type]

    def _check(self, *_: object) -> None:
        if self.denies is not None:
            raise self.denies

    def reach(self, ticket: Ticket, ready: Any, failed: Any) -> None:
        self.asked.append((ready, failed))


def test_requests_with_one_ticket_wait_together(monkeypatch: pytest.MonkeyPatch) -> None:
    reaching, peer = Reaching(monkeypatch), FakePeer()
    for _ in range(2):
        reaching.waiting.add(ticket())
    reaching.waiting.add(ticket(generation=8))
    assert len(reaching.asked) == 2
    reaching.asked[0][0](peer)
    assert (peer.waits, len(reaching.renewing.renewer)) == (1, 1)
    waited, gone = reaching.waiting.take(ticket())
    assert waited >= 0
    assert gone is None
    assert peer.waits == 1
    reaching.waiting.take(ticket())
    assert (peer.waits, len(reaching.renewing.renewer)) == (0, 0)
    assert reaching.waiting.take(ticket()) == (0.0, None)
    reaching.asked[1][0](peer)
    assert peer.waits == 1


def test_a_hold_that_is_gone_is_known_when_its_request_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reaching, peer = Reaching(monkeypatch), FakePeer()
    reaching.waiting.add(ticket())
    reaching.asked[0][0](peer)
    for read in reaching.renewing.due(0.0):
        read.landed(NOTHING, 0.1)
    assert peer.waits == 0
    reaching.waiting.progress(1.0)
    assert len(reaching.asked) == 1, "there is nothing to renew"
    assert isinstance(reaching.waiting.take(ticket())[1], StaleError)


def test_a_producer_is_reached_again_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    reaching, peer = Reaching(monkeypatch), FakePeer()
    reaching.waiting.add(ticket())
    reaching.waiting.progress(1.0)
    assert len(reaching.asked) == 1, "it is being reached"
    reaching.asked[0][1](TransportError("no"))
    reaching.waiting.progress(1.0 + SEARCH_SECONDS / 2)
    assert len(reaching.asked) == 1, "not too often"
    reaching.waiting.progress(1.0 + SEARCH_SECONDS)
    assert len(reaching.asked) == 2
    reaching.asked[1][0](peer)
    reaching.waiting.progress(2.0)
    assert len(reaching.asked) == 2
    peer.connected = False
    reaching.waiting.progress(3.0)
    assert (peer.waits, len(reaching.renewing.renewer), len(reaching.asked)) == (0, 0, 3)


def test_a_ticket_that_its_producer_denies_is_renewed_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reaching, peer = Reaching(monkeypatch), FakePeer()
    reaching.denies = TicketError("no")
    reaching.waiting.add(ticket())
    reaching.asked[0][0](peer)
    reaching.waiting.progress(1.0)
    assert (peer.waits, len(reaching.renewing.renewer), len(reaching.asked)) == (0, 0, 1)
    assert reaching.waiting.take(ticket())[1] is None, "the load will say so"


def test_a_producer_that_is_reached_too_late_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reaching, peer = Reaching(monkeypatch), FakePeer()
    reaching.waiting.add(ticket())
    reaching.waiting.take(ticket())
    reaching.asked[0][0](peer)
    assert (peer.waits, len(reaching.renewing.renewer)) == (0, 0)
    reaching.waiting.add(ticket())
    reaching.asked[0][0](peer)
    assert peer.waits == 0, "that was asked for another wait"
    reaching.asked[1][0](peer)
    assert peer.waits == 1


def test_loads_are_values() -> None:
    assert dataclasses.replace(load(), report=False).report is False
    assert load().report
