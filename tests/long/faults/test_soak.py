"""Many requests between two endpoints whose driver fails at times use constant resources.

``KVFERRY_SOAK`` is the number of requests (1,500 by default; 200,000 take a quarter of an hour),
and ``KVFERRY_SOAK_SEED`` the seed of the faults.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.transport import Quiescence
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing import Fault, FaultyTransport, Schedule
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import Clock, Engine
from tests.faults.cells import figure
from tests.faults.engine_processes import TOKENS
from tests.waiting import eventually

REQUESTS = int(os.environ.get("KVFERRY_SOAK", "1500"))
SEED = int(os.environ.get("KVFERRY_SOAK_SEED", "1"))
FAULTS = (Fault.DELAY, Fault.FAIL, Fault.TRUNCATE, Fault.DOOM, Fault.DROP)
RATE = 0.03
BATCH_SIZE = 8
WARM_UP_REQUESTS = 500
"""Requests before the first sample, by which everything that is made once exists."""
SAMPLES = 20
MEMORY = 16 << 20
LEASE = 100.0
WAIT_SECONDS = 240.0
"""Seconds; long enough for a busy machine."""

pytestmark = pytest.mark.timeout(600 + REQUESTS // 20)


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that this process uses."""

    memory: int
    files: int
    threads: int


def usage() -> Usage:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Usage(
        memory=pages * os.sysconf("SC_PAGE_SIZE"),
        files=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
    )


def maximum(samples: Iterable[Usage]) -> Usage:
    """Return the maximum of each resource over some samples."""
    return Usage(*map(max, zip(*map(astuple, samples), strict=True)))


class Soak:
    """Runs batches of requests, each of which waits, loads, is aborted or needs nothing.

    With each batch, one more request is aborted before its handshake fails.
    """

    def __init__(self, prefill: Engine, decode: Engine, clock: Clock) -> None:
        self.prefill, self.decode, self.clock = prefill, decode, clock
        self.random = random.Random(SEED)
        self.outcomes: Counter[str] = Counter()
        self._number = 0

    def run(self, requests: int) -> None:
        for _ in range(0, requests, BATCH_SIZE):
            self._batch()

    def samples(self, batches: int) -> list[Usage]:
        """Run some batches and return the resources in use after each."""
        samples = []
        for _ in range(batches):
            self._batch()
            samples.append(usage())
        return samples

    def _batch(self) -> None:
        waiting: set[RequestId] = set()
        held: set[RequestId] = set()
        tickets: list[Ticket] = []
        for place in range(BATCH_SIZE):
            name, pages = f"r-{self._number}", [1 + 2 * place, 2 + 2 * place]
            self._number += 1
            ticket = self.prefill.serve(name, pages, TOKENS)
            held.add(RequestId(name))
            tickets.append(ticket)
            how = self.random.random()
            if how < 0.3:
                self.decode.prepare(ticket)
            self.decode.pull(name, ticket, pages, nothing=how > 0.95)
            if how <= 0.95:
                waiting.add(RequestId(name))
            if 0.85 < how <= 0.95:
                self.decode.ranks[0].endpoint.abort(RequestId(name))
        self._abort_before_handshake(tickets[0])
        self._receive(waiting)
        self._release(held)

    def _abort_before_handshake(self, ticket: Ticket) -> None:
        """Abort a load at once whose ticket names an address where no engine listens."""
        name = f"early-{self._number}"
        nowhere = replace(ticket, engine="nobody", port=1)
        self.decode.pull(name, nowhere, [], nothing=True)
        self.decode.ranks[0].endpoint.abort(RequestId(name))

    def _receive(self, waiting: set[RequestId]) -> None:
        def received() -> bool:
            results = self.decode.results()
            assert results.received <= waiting, "reported twice, or never asked for"
            waiting.difference_update(results.received)
            for request in results.received:
                self._check(request, request in results.failed)
            return not waiting

        eventually(received, f"all loads are reported: {waiting}", seconds=WAIT_SECONDS)

    def _check(self, request: RequestId, failed: bool) -> None:
        place = int(request.split("-")[1]) % BATCH_SIZE
        pages = [1 + 2 * place, 2 + 2 * place]
        assert failed or not self.decode.wrong_bytes(pages, TOKENS), "bytes of something else"
        self.outcomes["failed" if failed else "loaded"] += 1
        self.decode.ranks[0].cache[:, pages] = -1.0

    def _release(self, held: set[RequestId]) -> None:
        polls = 0

        def released() -> bool:
            nonlocal polls
            polls += 1
            if polls % 20 == 0:  # a hold whose release was lost ends with its lease
                self.clock.skip(LEASE)
            sent = self.prefill.results().sent
            assert sent <= held, "given back twice"
            held.difference_update(sent)
            return not held

        eventually(released, f"all pages are given back: {held}", seconds=WAIT_SECONDS)


@pytest.fixture(autouse=True)
def disable_logging() -> Iterator[None]:
    """Disable logging: pytest would keep the log record of every failure in memory."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("quiescence", Quiescence)
def test_resource_use_stays_constant(quiescence: Quiescence) -> None:
    clock, shape = Clock(), CacheShape(pages=2 * BATCH_SIZE + 1)
    options = EndpointOptions(lease=LEASE, load_timeout=1e6, engine_ttl=1e6)
    schedule = Schedule(seed=SEED, rate=RATE, faults=FAULTS)
    driver = FaultyTransport(LoopbackTransport(), schedule, quiescence=quiescence)
    with (
        Engine("prefill", shape, clock=clock) as prefill,
        Engine("decode", shape, options=options, transport=lambda: driver, clock=clock) as decode,
    ):
        soak = Soak(prefill, decode, clock)
        soak.run(min(WARM_UP_REQUESTS, REQUESTS // 2))
        # A sample may see a connection that is open, closed, or replaced while the old one closes.
        before = maximum(soak.samples(SAMPLES))
        begun = time.monotonic()
        soak.run(REQUESTS)
        eventually(lambda: usage().threads <= before.threads, "no thread is left over")
        eventually(lambda: usage().files <= before.files, "no file is left over")
        after, seconds = usage(), time.monotonic() - begun
        assert after.memory <= before.memory + MEMORY
        assert soak.outcomes["loaded"] > soak.outcomes["failed"] > 0
        assert prefill.ranks[0].endpoint.held == 0
        assert decode.ranks[0].endpoint.pending == 0
        assert decode.ranks[0].endpoint.healthy
        clock.skip(LEASE)  # the last handshakes that nobody answers time out
        states = decode.ranks[0].endpoint._load_manager._states
        eventually(lambda: not states, "nothing is left of any load")
        figure(
            "soak",
            seconds,
            quiescence=quiescence.value,
            requests=REQUESTS,
            loaded=soak.outcomes["loaded"],
            failed=soak.outcomes["failed"],
            memory=round((after.memory - before.memory) / (1 << 20), 1),
            files=after.files - before.files,
            threads=after.threads - before.threads,
        )
