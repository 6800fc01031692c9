"""Engines in processes of their own, and a driver that stops at a stage for something to happen."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.core.copies import Copies
from kvferry.core.endpoint import EndpointOptions
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.transport import PeerId, TransferId
from kvferry.drivers.loopback import LoopbackTransport
from tests.core.endpoint.engines import LAYERS, Engine, Shape, engine, expected

TOKENS = 8
HELD = [1, 2]
"""The producer's pages of a request."""
LEASE = 3.0
"""Short: where nobody says that a hold is over, its end is waited for."""
OPTIONS = EndpointOptions(
    lease=LEASE, handshake_timeout=5.0, load_timeout=15.0, liveness_interval=1.0, liveness_misses=3
)
SHAPE = Shape(pages=16)

REPORT = "KVFERRY_FAULTS_REPORT"
"""Names a file that gets a line of JSON for each cell."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


class Staged(LoopbackTransport):
    """Does what it is told before the first read of pages, or the first fence."""

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[str, Callable[[], None]] = {}
        self.words = 0
        """Reads of slot words so far."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        words = copies.total == 8 * len(copies)
        self.words += words
        act = self.at.pop("fencing" if words else "reading", None)
        if act is not None:
            act()
        return super().read(peer, copies, notify)


@dataclass(kw_only=True)
class Remote:
    """An engine in a process of its own."""

    process: BaseProcess
    pipe: Connection

    def ask(self, *order: object) -> Any:
        """Let it do something, and wait for the answer."""
        self.pipe.send(order)
        return self.answer()

    def answer(self, seconds: float = 60.0) -> Any:
        assert self.pipe.poll(seconds), "the other process does not answer"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextlib.contextmanager
def remote(target: Callable[..., None], *arguments: object) -> Iterator[Remote]:
    """Run ``target(pipe, *arguments)`` in a process, and kill it in the end."""
    ours, theirs = _processes.Pipe()
    process = _processes.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    made = Remote(process=process, pipe=ours)
    try:
        yield made
    finally:
        made.kill()
        ours.close()


def produce(pipe: Connection, port: int = 0) -> None:
    """A producer: makes tickets, says what it holds, gives pages back and fills them anew."""
    with engine("prefill", SHAPE, options=OPTIONS, port=port) as prefill:
        pipe.send(prefill.server.port)
        while (order := pipe.recv()) is not None:
            pipe.send(_produced(prefill, *order))


def _produced(prefill: Engine, what: str, *rest: str) -> Any:
    if what == "serve":
        return serve(prefill, rest[0])
    if what == "promise":  # a drafter is still at work, and never ends
        prefill.compute(rest[0], HELD, TOKENS)
        return prefill.finish(rest[0], HELD, TOKENS, computed=False, lease=LEASE, order=False)
    if what == "reset":
        prefill.ledger.reset()
        prefill.step()
    return sum(rank.endpoint.held for rank in prefill.ranks)


def serve(prefill: Engine, request: str) -> Ticket:
    """A ticket whose lease is short."""
    prefill.compute(request, HELD, TOKENS)
    return prefill.finish(request, HELD, TOKENS, lease=LEASE)


def consume(pipe: Connection, stage: str) -> None:
    """A consumer that, once, stops at a stage until it is told to go on."""
    driver = Staged()

    def stop() -> None:
        pipe.send("here")
        pipe.recv()

    driver.at = {stage: stop}
    with engine("decode", SHAPE, options=OPTIONS, transport=lambda: driver) as decode:
        pipe.send("ready")
        ticket, pages = pipe.recv()
        if stage == "waiting":
            decode.prepare(ticket)
            stop()
        decode.pull("d-1", ticket, pages)
        failed = decode.outcome("d-1").failed.get(RequestId("d-1"))
        pipe.send((type(failed).__name__ if failed else "loaded", right(decode, pages)))
        pipe.recv()


def right(decode: Engine, pages: list[int]) -> bool:
    """Whether these pages hold what a producer computed for the first of its requests."""
    (rank,) = decode.ranks
    return all(
        np.array_equal(rank.tokens(pages, layer)[:TOKENS], expected(decode.shape, TOKENS, layer, 0))
        for layer in range(LAYERS)
    )


def shaking() -> bool:
    """Whether a handshake of this process is under way."""
    return any(thread.name.startswith("kvferry-shake") for thread in threading.enumerate())


@dataclass(kw_only=True)
class Cell:
    """One place in the table, while it is tried."""

    side: str
    fault: str
    stage: str
    driver: str = "loopback"
    begun: float = field(default_factory=time.monotonic)

    def write(self, outcome: str) -> None:
        """Add a line to the report, if somebody wants one."""
        if path := os.environ.get(REPORT):
            line = {
                "side": self.side,
                "fault": self.fault,
                "stage": self.stage,
                "driver": self.driver,
                "outcome": outcome,
                "seconds": round(time.monotonic() - self.begun, 2),
            }
            with Path(path).open("a") as report:
                report.write(json.dumps(line) + "\n")
