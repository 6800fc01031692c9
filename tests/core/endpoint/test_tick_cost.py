"""What a tick of ``LoadManager`` costs with many producers that are idle, down or being closed."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import msgspec
import numpy as np

from kvferry.core.directory import EncodedReply, ProducerNews
from kvferry.core.driver_calls.connections import LONGEST_SECONDS
from kvferry.core.driver_calls.driver_calls import DriverCalls
from kvferry.core.endpoint import EndpointOptions, Load
from kvferry.core.endpoint.load_manager import TICK_SECONDS, LoadManager
from kvferry.core.endpoint.slot_reads import ScratchWords
from kvferry.core.errors import HandshakeError, KVFerryError, TransportError
from kvferry.core.lifecycle.holds import Incarnation, RequestId
from kvferry.core.lifecycle.ticket import PeerKey, Ticket
from kvferry.core.metrics import Metrics
from kvferry.core.planner.build_copies import Pages
from kvferry.core.planner.unwritten import zero_cpu
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport import PeerId
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import Engine, eventually
from tests.core.endpoint.test_peers import AnyAddressTransport


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

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.like = prefill.serve("p-1", [1], 4)
        self.payloads = [rank.endpoint.payload for rank in prefill.ranks]
        self.tickets: list[Ticket] = []
        self.now = 0.0
        self.commands: deque[Callable[[], None]] = deque()
        self.transport = ManyPeersTransport()
        calls = DriverCalls(self.transport, post=self.commands.append, clock=lambda: self.now)
        self.connections, own = calls.connections, decode.endpoint.payload
        self.loads = LoadManager(
            own=own,
            calls=calls,
            scratch=ScratchWords(),
            zero=zero_cpu,
            options=EndpointOptions(),
            metrics=Metrics(driver=own.driver, rank="0"),
            reported=lambda *_: None,
        )
        self.loads.peers.join([own])

    def meet(self, count: int, error: KVFerryError | None = None) -> None:
        """Connect to so many more producers; or fail, with an error."""
        for _ in range(count):
            ticket = replace(self.like, engine=f"prefill-{len(self.tickets)}")
            self.tickets.append(ticket)
            ranks = [
                msgspec.structs.replace(
                    each, engine=ticket.engine, address=f"{ticket.engine}/{each.rank}".encode()
                )
                for each in self.payloads
            ]
            reply = EncodedReply(
                address=PeerKey.of(ticket),
                incarnation=Incarnation(ticket.incarnation),
                ranks=tuple(map(encode, ranks)),
            )
            nothing = (Pages(ids=np.empty(0, dtype=np.int64)),)
            load = Load(
                request=RequestId("d"), ticket=ticket, ranges=(None,), local=nothing, report=False
            )
            self.loads.begin(load)
            news = ProducerNews(outcomes=((PeerKey.of(ticket), error or reply),))
            self.loads.peers.relay(news)
            eventually(self.is_at_rest, "it has answered")

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
        gone = tuple((PeerKey.of(each), each.incarnation, None) for each in self.tickets)
        self.loads.peers.relay(ProducerNews(gone=gone))
        self.tick()

    def effort(self) -> int:
        """Return how many lines of Python the most expensive of some ticks runs."""
        return max(lines_run(self.tick) for _ in range(60))


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


def test_a_tick_runs_no_more_lines_with_many_producers() -> None:
    """Idle ones; and some that are down, or whose connections do not close."""
    with Engine("prefill", CacheShape(tp=4)) as prefill, Engine("decode") as decode:
        manager = Manager(prefill, decode)
        manager.transport.does_quiesce, refused = False, HandshakeError("nobody listens")
        efforts = []
        for idle, down in ((1, 1), (50, 50)):
            manager.let_go()
            manager.meet(down, refused)
            manager.meet(idle)
            efforts.append(manager.effort())
        manager.let_go()
        manager.meet(1)
        efforts.append(manager.effort())
        assert (manager.connections.closing, manager.transport.open_connections) == (204, 208)
        assert len(set(efforts)) == 1
        manager.transport.does_quiesce = True
        manager.now += LONGEST_SECONDS
        manager.tick()
        manager.work()
        assert manager.connections.closing == 0
