"""Many requests between two endpoints whose driver fails at times use constant resources.

``KVFERRY_SOAK`` is the number of requests (1,500 by default; 200,000 take a quarter of an hour),
and ``KVFERRY_SOAK_SEED`` the seed of the faults.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.transport import Quiescence
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing import Fault, FaultyTransport, Schedule
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import Clock, Engine
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


class Usage(NamedTuple):
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


def pages_of(number: int) -> list[int]:
    """Return the pages of a request, on both sides."""
    place = number % BATCH_SIZE
    return [1 + 2 * place, 2 + 2 * place]


class Soak:
    """Runs batches of requests, each of which waits, loads, is aborted or needs nothing.

    With each batch, one more request is aborted before its handshake fails.
    """

    def __init__(self, prefill: Engine, decode: Engine, clock: Clock) -> None:
        self.prefill, self.decode, self.clock = prefill, decode, clock
        self.endpoint = decode.ranks[0].endpoint
        self.random = random.Random(SEED)
        self.outcomes: Counter[str] = Counter()
        self._numbers = itertools.count()

    def batch(self) -> Usage:
        """Run one batch, and return the resources in use afterwards."""
        waiting: set[str] = set()
        numbers = list(itertools.islice(self._numbers, BATCH_SIZE))
        for number in numbers:
            name, how = f"r-{number}", self.random.random()
            ticket = self.prefill.serve(name, pages_of(number), TOKENS)
            if number == numbers[0]:  # at an address where no engine listens
                self._abort(f"early-{number}", replace(ticket, engine="nobody", port=1))
            if how < 0.3:
                self.decode.prepare(ticket)
            if how > 0.95:
                self.decode.pull(name, ticket, pages_of(number), nothing=True)
                continue
            waiting.add(name)
            self.decode.pull(name, ticket, pages_of(number))
            if how > 0.85:
                self.endpoint.abort(RequestId(name))
        held = {f"r-{number}" for number in numbers}
        eventually(lambda: self._received(waiting), "all loads are reported", WAIT_SECONDS)
        polls = itertools.count(1)
        eventually(lambda: self._released(held, next(polls)), "all pages are back", WAIT_SECONDS)
        return usage()

    def _abort(self, name: str, ticket: Ticket) -> None:
        self.decode.pull(name, ticket, [], nothing=True)
        self.endpoint.abort(RequestId(name))

    def _received(self, waiting: set[str]) -> bool:
        results = self.decode.results()
        assert results.received <= waiting, "reported twice, or never asked for"
        waiting.difference_update(results.received)
        for request in results.received:
            pages, failed = pages_of(int(request.split("-")[1])), request in results.failed
            assert failed or not self.decode.wrong_bytes(pages, TOKENS), "bytes of something else"
            self.outcomes["failed" if failed else "loaded"] += 1
            self.decode.ranks[0].cache[:, pages] = -1.0
        return not waiting

    def _released(self, held: set[str], polls: int) -> bool:
        if polls % 20 == 0:  # a hold whose release was lost ends with its lease
            self.clock.skip(LEASE)
        sent = self.prefill.results().sent
        assert sent <= held, "given back twice"
        held.difference_update(sent)
        return not held


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
        for _ in range(0, min(WARM_UP_REQUESTS, REQUESTS // 2), BATCH_SIZE):
            soak.batch()
        # A sample may see a connection that is open, closed, or replaced while the old one closes.
        samples = [soak.batch() for _ in range(SAMPLES)]
        before = Usage(*map(max, zip(*samples, strict=True)))
        for _ in range(0, REQUESTS, BATCH_SIZE):
            soak.batch()
        eventually(lambda: usage().threads <= before.threads, "no thread is left over")
        eventually(lambda: usage().files <= before.files, "no file is left over")
        after = usage()
        assert after.memory <= before.memory + MEMORY
        assert soak.outcomes["loaded"] > soak.outcomes["failed"] > 0
        assert prefill.ranks[0].endpoint.held == 0
        assert (soak.endpoint.pending, soak.endpoint.healthy) == (0, True)
        clock.skip(LEASE)  # the last handshakes that nobody answers time out
        states = soak.endpoint._load_manager._states
        eventually(lambda: not states, "nothing is left of any load")
