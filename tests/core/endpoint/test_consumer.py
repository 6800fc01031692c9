"""``LoadManager``: what it does about producers that are idle, and what that costs."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.core.directory import EncodedReply, ProducerNews
from kvferry.core.driver_calls.connections import LONGEST_SECONDS
from kvferry.core.driver_calls.driver_calls import DriverCalls
from kvferry.core.endpoint import EndpointOptions, Load
from kvferry.core.endpoint.load_manager import TICK_SECONDS, LoadManager
from kvferry.core.endpoint.slot_reads import ScratchWords
from kvferry.core.errors import HandshakeError, KVFerryError, TransportError
from kvferry.core.lifecycle.holds import Incarnation, RequestId
from kvferry.core.lifecycle.ticket import PeerKey, Ticket
from kvferry.core.messages import RankPayload
from kvferry.core.metrics import Metrics
from kvferry.core.planner.build_copies import Pages
from kvferry.core.planner.unwritten import zero_cpu
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport import PeerId
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import Engine, eventually
from tests.core.endpoint.test_peers import AnyAddressTransport

OPTIONS = EndpointOptions()
AT_ONCE = 50
"""Producers that become known at once."""


class ManyPeersTransport(AnyAddressTransport):
    """A transport to any peer, which drops notifications, and may fail to disconnect."""

    does_quiesce = True

    def notify(self, peer: PeerId, payload: bytes) -> None:
        """Drop it: nobody is there."""

    def disconnect(self, peer: PeerId) -> None:
        if not self.does_quiesce:
            raise TransportError("still copying")
        super().disconnect(peer)


class Manager:
    """A ``LoadManager`` on this thread, and producers like one, known by relayed replies."""

    def __init__(self, own: RankPayload, ticket: Ticket, payloads: Sequence[RankPayload]) -> None:
        self.ticket, self.payloads = ticket, payloads
        self.asked = 0
        self.now = 0.0
        self.commands: deque[Callable[[], None]] = deque()
        self.transport = ManyPeersTransport()
        calls = DriverCalls(self.transport, post=self.commands.append, clock=lambda: self.now)
        self.connections = calls.connections
        self.loads = LoadManager(
            own=own,
            calls=calls,
            scratch=ScratchWords(),
            zero=zero_cpu,
            options=OPTIONS,
            metrics=Metrics(driver=own.driver, rank="0"),
            reported=lambda *_: None,
        )
        self.loads.peers.join([own])

    def meet(self, count: int, error: KVFerryError | None = None) -> None:
        """Connect to so many more producers; or fail, with an error."""
        for index in range(count):
            self.asked += 1
            ticket = replace(self.ticket, engine=f"prefill-{self.asked}")
            outcome = error or self.reply(ticket)
            self.loads.begin(nothing(ticket))
            self.loads.peers.relay(ProducerNews(outcomes=((PeerKey.of(ticket), outcome),)))
            if index % AT_ONCE == AT_ONCE - 1 or index == count - 1:
                eventually(self.is_at_rest, "all have answered")

    def reply(self, ticket: Ticket) -> EncodedReply:
        ranks = [
            msgspec.structs.replace(
                each, engine=ticket.engine, address=f"{ticket.engine}/{each.rank}".encode()
            )
            for each in self.payloads
        ]
        return EncodedReply(
            address=PeerKey.of(ticket),
            incarnation=Incarnation(ticket.incarnation),
            ranks=tuple(map(encode, ranks)),
        )

    def is_at_rest(self) -> bool:
        self.work()
        return not len(self.loads)

    def tick(self) -> None:
        self.now += TICK_SECONDS
        self.work()

    def work(self) -> None:
        """Do what an endpoint's thread does with it in a round."""
        while self.commands:
            self.commands.popleft()()
        self.loads.progress()
        _ = self.connections.closing  # for the pause before the next round

    def let_go(self) -> None:
        """Have the directory let all producers go, which it does when they were long unused."""
        tickets = [replace(self.ticket, engine=f"prefill-{n + 1}") for n in range(self.asked)]
        gone = tuple((PeerKey.of(each), each.incarnation, None) for each in tickets)
        self.loads.peers.relay(ProducerNews(gone=gone))
        self.tick()

    def effort(self) -> int:
        """Return how many lines of Python the most expensive of some ticks runs."""
        return max(lines_run(self.tick) for _ in range(20))


def nothing(ticket: Ticket, *, shared: bool = False) -> Load:
    return Load(
        request=RequestId("d"),
        ticket=ticket,
        ranges=(None,),
        local=(Pages(ids=np.empty(0, dtype=np.int64)),),
        report=False,
        shared=shared,
    )


def lines_run(call: Callable[[], object]) -> int:
    """Return how many lines of Python a call runs, those of a loop once for each turn."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # what it calls runs lines, too
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return lines


@pytest.fixture
def manager() -> Iterator[Manager]:
    """Return a manager that knows one producer, of four ranks."""
    with Engine("prefill", CacheShape(tp=4)) as prefill, Engine("decode") as decode:
        ticket = prefill.serve("p-1", [1], 4)
        payloads = [rank.endpoint.payload for rank in prefill.ranks]
        made = Manager(decode.endpoint.payload, ticket, payloads)
        made.meet(1)
        yield made


def test_a_tick_runs_no_more_lines_with_many_idle_producers(manager: Manager) -> None:
    alone = manager.effort()
    manager.meet(199)
    assert manager.transport.open_connections == 800
    assert manager.effort() == alone


def test_a_tick_runs_no_more_lines_with_producers_that_are_down_or_being_closed(
    manager: Manager,
) -> None:
    manager.transport.does_quiesce = False
    manager.let_go()
    manager.meet(1, HandshakeError("nobody listens"))
    one = manager.effort()
    manager.meet(49)
    manager.let_go()
    manager.meet(50, HandshakeError("nobody listens"))
    assert manager.connections.closing == 200
    assert manager.effort() == one
    manager.transport.does_quiesce = True
    manager.now += LONGEST_SECONDS
    manager.tick()
    manager.work()
    assert manager.connections.closing == 0
