"""What a tick costs an endpoint with many producers that are idle, down or being closed."""

from __future__ import annotations

import gc
import queue
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

from kvferry.core.directory import ProducerNews
from kvferry.core.driver_calls.connections import LONGEST_SECONDS
from kvferry.core.endpoint import LoadRecord
from kvferry.core.endpoint.load_manager import TICK_SECONDS
from kvferry.core.errors import TransportError
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.transport import PeerId
from tests.core.endpoint.engines import Clock, Engine, eventually
from tests.core.endpoint.test_peers import AnyAddressTransport, any_engine
from tests.free_port import free_port


class ManyPeersTransport(AnyAddressTransport):
    """A transport to any peer, which drops notifications, and may fail to disconnect."""

    does_quiesce = True

    def notify(self, peer: PeerId, payload: bytes) -> None:
        """Drop it: nobody is there."""

    def disconnect(self, peer: PeerId) -> None:
        if not self.does_quiesce:
            raise TransportError("still copying")
        super().disconnect(peer)


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


def effort(decode: Engine, clock: Clock) -> int:
    """Return how many lines of Python a tick runs, at least: in some, something is due."""
    manager, found = decode.endpoint._load_manager, queue.SimpleQueue[int]()

    def tick() -> None:
        clock.skip(TICK_SECONDS)
        manager._tick(clock())

    decode.endpoint._post(lambda: found.put(min(lines_run(tick) for _ in range(20))))
    return found.get(timeout=60)


def test_a_tick_runs_no_more_lines_with_many_producers(prefill: Engine, clock: Clock) -> None:
    driver = ManyPeersTransport()
    ticket, names, nobody = prefill.serve("p-1", [1], 4), iter(range(1000)), free_port()
    with (
        any_engine(prefill) as port,
        Engine("decode", transport=lambda: driver, clock=clock) as decode,
    ):
        connections = decode.endpoint._calls.connections

        def meet(count: int, at_port: int) -> ProducerNews:
            """Reach so many more producers, and return what lets them go."""
            tickets = [
                replace(ticket, engine=f"e-{next(names)}", port=at_port) for _ in range(count)
            ]
            for number, each in enumerate(tickets):
                decode.pull(f"d-{number}", each, [], nothing=True)
            answers: list[LoadRecord] = []

            def have_answered() -> bool:
                answers.extend(decode.endpoint.results().loads)
                return len(answers) == count

            eventually(have_answered, "all have answered")
            gone = [(PeerKey.of(each), each.incarnation, None) for each in tickets]
            return ProducerNews(gone=tuple(gone))

        driver.does_quiesce = False
        efforts = []
        for closing, down, idle in ((1, 1, 1), (20, 20, 20)):
            let_go = meet(closing, port)
            decode.endpoint.relay(let_go)
            eventually(lambda: connections.closing >= closing, "they are being closed")  # noqa: B023
            meet(down, nobody)
            meet(idle, port)
            efforts.append(effort(decode, clock))
        assert (connections.closing, driver.open_connections) == (21, 42)
        assert efforts[0] == efforts[1]
        driver.does_quiesce = True
        clock.skip(LONGEST_SECONDS)
        eventually(lambda: not connections.closing, "all are closed")
