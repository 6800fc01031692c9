"""Engines in processes of their own, to which things happen."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import MappingProxyType
from typing import Any

import numpy as np

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.transport import Transport
from kvferry.core.transport.registry import create
from tests.core.endpoint.engines import LAYERS, Engine, Shape, engine, eventually, expected
from tests.faults.cable import staged

TOKENS = 8
HELD = [1, 2]
"""The producer's pages of a request."""
OTHERS = [5, 6]
"""Those of another one."""
LEASE = 3.0
"""Short: where nobody says that a hold is over, its end is waited for."""
LONG = 60.0
"""Ends in no test: only a word gives these pages back."""
OPTIONS = EndpointOptions(
    lease=LEASE, handshake_timeout=5.0, load_timeout=15.0, liveness_interval=1.0, liveness_misses=3
)
PATIENT = replace(OPTIONS, handshake_timeout=60.0, load_timeout=120.0, liveness_interval=60.0)
"""Nothing ends a load but what happens to it."""
SHAPE = Shape(pages=16)

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


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
def remote(
    target: Callable[..., None], *arguments: object, networked: bool = False
) -> Iterator[Remote]:
    """Run ``target(pipe, *arguments)`` in a process, and kill it in the end.

    ``networked``: in the network of this thread, which costs a second; otherwise in the first one.
    """
    processes = multiprocessing.get_context("spawn") if networked else _processes
    ours, theirs = processes.Pipe()
    process = processes.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    made = Remote(process=process, pipe=ours)
    try:
        yield made
    finally:
        made.kill()
        ours.close()


class Produced:
    """A producer, and what it does when it is asked to by name."""

    def __init__(self, prefill: Engine) -> None:
        self.prefill = prefill
        prefill.scheduler_holds = SchedulerHolds(SHAPE.pages, max_pages=len(HELD))
        self._sent: Counter[str] = Counter()

    def serve(self, request: str, lease: float) -> Ticket:
        self.count()
        return serve(self.prefill, request, lease)

    def promise(self, request: str, lease: float) -> Ticket:
        """One whose pages are never ready: a drafter is still at work, and never ends."""
        self.count()
        self.prefill.compute(request, HELD, TOKENS)
        return self.prefill.finish(request, HELD, TOKENS, computed=False, lease=lease, order=False)

    def held(self) -> int:
        return sum(rank.endpoint.held for rank in self.prefill.ranks)

    def count(self) -> dict[str, int]:
        """How often each request was reported sent so far."""
        for rank in self.prefill.ranks:
            sent = rank.endpoint.results().sent
            self._sent.update(sent)
            for request in sent:
                self.prefill.scheduler_holds.sent(request)
        return dict(self._sent)

    def reset(self) -> None:
        """Give all pages up."""
        self.prefill.scheduler_holds.reset()
        self.prefill.step()

    def reuse(self, spin: float = 0.0) -> None:
        """Give all pages up, and let another request have them as soon as they are back.

        After so many seconds, in which this process lets no other thread of it do anything.
        """
        until = time.perf_counter() + spin
        while time.perf_counter() < until:
            pass
        self.reset()
        self.scribble()

    def crowd(self, request: str) -> None:
        """Take another request on, with other pages: not both may be held."""
        self.prefill.compute(request, OTHERS, TOKENS)
        self.prefill.finish(request, OTHERS, TOKENS, lease=LEASE)
        self.scribble(without=request)

    def scribble(self, without: str = "") -> None:
        """Another request's pages lie there now, once nothing but ``without`` is held."""
        eventually(lambda: self.held() == bool(without), "the pages are back")
        self.count()
        for rank in self.prefill.ranks:
            rank.cache[:, HELD] += 1.0

    def babble(self) -> None:
        """Noise in the slot table."""
        table = self.prefill.ranks[0].endpoint.payload.slots
        noise = random.Random(1).randbytes(table.nbytes)
        ctypes.memmove(table.address, noise, table.nbytes)


def produce(
    pipe: Connection,
    port: int = 0,
    name: str = "prefill",
    driver: str = "loopback",
    settings: Mapping[str, object] = MappingProxyType({}),
    host: str = "127.0.0.1",
) -> None:
    """A producer that does what it is told; ``settings`` are its driver's."""

    def transport() -> Transport:
        return create(driver, settings)

    with engine(name, SHAPE, options=OPTIONS, host=host, port=port, transport=transport) as prefill:
        produced = Produced(prefill)
        pipe.send(prefill.server.port)
        while (order := pipe.recv()) is not None:
            name, *rest = order
            pipe.send(getattr(produced, name)(*rest))


def serve(prefill: Engine, request: str, lease: float = LEASE) -> Ticket:
    """A ticket whose lease is short."""
    prefill.compute(request, HELD, TOKENS)
    return prefill.finish(request, HELD, TOKENS, lease=lease)


def consume(
    pipe: Connection,
    stage: str,
    driver: str = "loopback",
    settings: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """A consumer that, once, stops at a stage until it is told to go on."""
    made = staged(driver, settings)

    def stop() -> None:
        pipe.send("here")
        pipe.recv()

    made.at = {stage: stop}
    with engine("decode", SHAPE, options=OPTIONS, transport=lambda: made) as decode:
        pipe.send("ready")
        ticket, pages = pipe.recv()
        if stage == "waiting":
            decode.prepare(ticket)
        if stage in ("waiting", "before the handshake"):
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
    return any(thread.name.startswith("kvferry-handshake") for thread in threading.enumerate())
