"""Many requests through two endpoints whose driver fails now and then: nothing grows.

``KVFERRY_SOAK`` is how many (1,500 unless set; 200,000 take a quarter of an hour), and
``KVFERRY_SOAK_SEED`` where the faults start.
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
from tests.core.endpoint.engines import Clock, Engine, Shape, engine, eventually
from tests.faults.cells import figure
from tests.faults.stages import TOKENS, right

REQUESTS = int(os.environ.get("KVFERRY_SOAK", "1500"))
SEED = int(os.environ.get("KVFERRY_SOAK_SEED", "1"))
FAULTS = (Fault.DELAY, Fault.FAIL, Fault.TRUNCATE, Fault.DOOM, Fault.DROP)
RATE = 0.03
AT_ONCE = 8
WARM = 500
"""Requests before the first look: what is made once is there by then."""
LOOKS = 20
MEMORY = 16 << 20
LEASE = 100.0
PATIENCE = 240.0
"""Seconds, on a machine that has much else to do."""

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600 + REQUESTS // 20)]


@dataclass(frozen=True, slots=True)
class Usage:
    """What this process has."""

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


def most(looks: Iterable[Usage]) -> Usage:
    """The most of each that was seen."""
    return Usage(*map(max, zip(*map(astuple, looks), strict=True)))


class Soak:
    """Batches of requests, each of which waits, loads, is aborted or needs nothing; and with each
    batch one that is given up before its handshake fails."""

    def __init__(self, prefill: Engine, decode: Engine, clock: Clock) -> None:
        self.prefill, self.decode, self.clock = prefill, decode, clock
        self.random = random.Random(SEED)
        self.outcomes: Counter[str] = Counter()
        self._number = 0

    def run(self, requests: int) -> None:
        for _ in range(0, requests, AT_ONCE):
            self._batch()

    def looks(self, batches: int) -> list[Usage]:
        """What is in use after each of so many batches."""
        looks = []
        for _ in range(batches):
            self._batch()
            looks.append(usage())
        return looks

    def _batch(self) -> None:
        waiting: set[RequestId] = set()
        held: set[RequestId] = set()
        tickets: list[Ticket] = []
        for place in range(AT_ONCE):
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
        self._give_up_early(tickets[0])
        self._receive(waiting)
        self._release(held)

    def _give_up_early(self, ticket: Ticket) -> None:
        """It is told of nothing that is reported; nobody listens where its ticket says."""
        name = f"early-{self._number}"
        nowhere = replace(ticket, engine="nobody", port=1)
        self.decode.pull(name, nowhere, [], nothing=True)
        self.decode.ranks[0].endpoint.abort(RequestId(name))

    def _receive(self, waiting: set[RequestId]) -> None:
        endpoint = self.decode.ranks[0].endpoint

        def received() -> bool:
            results = endpoint.results()
            assert results.received <= waiting, "reported twice, or never asked for"
            waiting.difference_update(results.received)
            for request in results.received:
                self._judge(request, request in results.failed)
            return not waiting

        eventually(received, f"all loads are reported: {waiting}", seconds=PATIENCE)

    def _judge(self, request: RequestId, failed: bool) -> None:
        place = int(request.split("-")[1]) % AT_ONCE
        pages = [1 + 2 * place, 2 + 2 * place]
        assert failed or right(self.decode, pages), "bytes of something else"
        self.outcomes["failed" if failed else "loaded"] += 1
        self.decode.ranks[0].cache[:, pages] = -1.0

    def _release(self, held: set[RequestId]) -> None:
        endpoint = self.prefill.ranks[0].endpoint
        looks = 0

        def released() -> bool:
            nonlocal looks
            looks += 1
            if looks % 20 == 0:  # who was not told of the end waits for the lease
                self.clock.skip(LEASE)
            sent = endpoint.results().sent
            assert sent <= held, "given back twice"
            held.difference_update(sent)
            for request in sent:
                self.prefill.scheduler_holds.sent(request)
            return not held

        eventually(released, f"all pages are given back: {held}", seconds=PATIENCE)


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """Every failure is logged, and pytest keeps all that is: that would grow."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("quiescence", Quiescence)
def test_nothing_grows(quiescence: Quiescence) -> None:
    clock, shape = Clock(), Shape(pages=2 * AT_ONCE + 1)
    options = EndpointOptions(lease=LEASE, load_timeout=1e6, engine_ttl=1e6)
    schedule = Schedule(seed=SEED, rate=RATE, faults=FAULTS)
    driver = FaultyTransport(LoopbackTransport(), schedule, quiescence=quiescence)
    with (
        engine("prefill", shape, clock=clock) as prefill,
        engine("decode", shape, options=options, transport=lambda: driver, clock=clock) as decode,
    ):
        soak = Soak(prefill, decode, clock)
        soak.run(min(WARM, REQUESTS // 2))
        # A look may find a connection up, down, or down and up at once while an old one parts.
        before = most(soak.looks(LOOKS))
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
        clock.skip(LEASE)  # the last handshakes with nobody are due
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
