"""Producers and consumers in processes of their own, which take commands."""

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.transport.registry import create
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import Engine
from tests.faults.cable import staged_transport
from tests.free_port import free_port
from tests.waiting import eventually

TOKENS = 8
HELD_PAGES = [1, 2]
"""The producer's pages of the request under test."""
OTHER_PAGES = [5, 6]
"""The producer's pages of another request."""
LEASE = 3.0
"""Seconds; short, because tests wait until the lease of a hold that is not released ends."""
LONG_LEASE = 60.0
"""Seconds; no test lasts as long, so only a release gives the pages back."""
OPTIONS = EndpointOptions(
    lease=LEASE, handshake_timeout=5.0, load_timeout=15.0, liveness_interval=1.0, liveness_misses=3
)
LONG_TIMEOUTS = replace(OPTIONS, handshake_timeout=60.0, load_timeout=120.0, liveness_interval=60.0)
"""Timeouts that no test reaches: only a fault ends a load."""
SHAPE = CacheShape(pages=16)

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


@dataclass(kw_only=True)
class EngineProcess:
    """An engine in a process of its own, and the pipe for its commands."""

    process: BaseProcess
    pipe: Connection

    def ask(self, *order: object) -> Any:
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
        # The thread that gets SIGSTOP may have to wait for a core; until then, the others go on.
        if number == signal.SIGSTOP:
            eventually(self._is_stopped, "the process stops")

    def _is_stopped(self) -> bool:
        try:
            tasks = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
            stats = [task.read_text() for task in tasks]
        except OSError:  # a thread has just ended
            return False
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


@contextlib.contextmanager
def engine_process(target: Callable[..., None], *arguments: object) -> Iterator[EngineProcess]:
    """Run ``target(pipe, *arguments)`` in a process, and kill it at the end."""
    ours, theirs = _processes.Pipe()
    process = _processes.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    made = EngineProcess(process=process, pipe=ours)
    try:
        yield made
    finally:
        made.kill()
        ours.close()


class ProducerCommands:
    """Commands of a producer process: each public method is one."""

    def __init__(self, prefill: Engine) -> None:
        self.prefill = prefill
        prefill.scheduler_holds = SchedulerHolds(SHAPE.pages, max_pages=len(HELD_PAGES))
        self._sent: Counter[str] = Counter()

    def serve(self, request: str, lease: float) -> Ticket:
        self.count()
        return serve_request(self.prefill, request, lease)

    def serve_uncomputed(self, request: str, lease: float) -> Ticket:
        """Return a ticket whose pages never become ready, as if a draft model never finished."""
        self.count()
        self.prefill.compute(request, HELD_PAGES, TOKENS)
        return self.prefill.finish(
            request, HELD_PAGES, TOKENS, computed=False, lease=lease, order=False
        )

    def held(self) -> int:
        return sum(rank.endpoint.held for rank in self.prefill.ranks)

    def count(self) -> dict[str, int]:
        self._sent.update(self.prefill.results().sent)
        return dict(self._sent)

    def reset(self) -> None:
        self.prefill.scheduler_holds.reset()
        self.prefill.step()

    def reuse_pages(self, spin: float = 0.0) -> None:
        """Give up all holds, and overwrite the pages as soon as they are released.

        For ``spin`` seconds before, keep the other threads of this process from running.
        """
        until = time.perf_counter() + spin
        while time.perf_counter() < until:
            pass
        self.reset()
        self.overwrite_pages()

    def hold_other_pages(self, request: str) -> None:
        """Take on another request with other pages, which exceeds the limit of held pages."""
        self.prefill.compute(request, OTHER_PAGES, TOKENS)
        self.prefill.finish(request, OTHER_PAGES, TOKENS, lease=LEASE)
        self.overwrite_pages(without=request)

    def overwrite_pages(self, without: str = "") -> None:
        """Overwrite the pages as another request would, once only ``without`` is held."""
        eventually(lambda: self.held() == bool(without), "the pages are released")
        self.count()
        for rank in self.prefill.ranks:
            rank.cache[:, HELD_PAGES] += 1.0

    def corrupt_slot_table(self) -> None:
        table = self.prefill.ranks[0].endpoint.payload.slots
        noise = random.Random(1).randbytes(table.nbytes)
        ctypes.memmove(table.address, noise, table.nbytes)


def run_producer(
    pipe: Connection, port: int = 0, name: str = "prefill", driver: str = "loopback"
) -> None:
    """Run a producer that takes commands."""
    transport = partial(create, driver)
    port = port or free_port()  # one that no connection takes before a restart
    with Engine(name, SHAPE, options=OPTIONS, port=port, transport=transport) as prefill:
        commands = ProducerCommands(prefill)
        pipe.send(prefill.server.port)
        while (order := pipe.recv()) is not None:
            name, *rest = order
            pipe.send(getattr(commands, name)(*rest))


def serve_request(prefill: Engine, request: str, lease: float = LEASE) -> Ticket:
    prefill.compute(request, HELD_PAGES, TOKENS)
    return prefill.finish(request, HELD_PAGES, TOKENS, lease=lease)


def run_consumer(pipe: Connection, stage: str, driver: str = "loopback") -> None:
    """Run a consumer that stops once at a stage until it gets a message to go on."""
    made = staged_transport(driver)

    def stop() -> None:
        pipe.send("here")
        pipe.recv()

    made.at = {stage: stop}
    with Engine("decode", SHAPE, options=OPTIONS, transport=lambda: made) as decode:
        pipe.send("ready")
        ticket, pages = pipe.recv()
        if stage == "waiting":
            decode.prepare(ticket)
        if stage in ("waiting", "before the handshake"):
            stop()
        decode.pull("d-1", ticket, pages)
        failed = decode.outcome("d-1").failed.get(RequestId("d-1"))
        pipe.send(
            (type(failed).__name__ if failed else "loaded", not decode.wrong_bytes(pages, TOKENS))
        )
        pipe.recv()


def handshake_in_progress() -> bool:
    """Return whether a handshake of this process is under way."""
    return any(thread.name == "kvferry-side-channels" for thread in threading.enumerate())
