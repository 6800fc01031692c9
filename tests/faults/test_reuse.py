"""A producer's pages are reused, on purpose, while a consumer reads them: it finds out every time.

On each driver that needs no special hardware. ``KVFERRY_REUSE`` is how often, in each test (300
unless set).
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.ticket import Ticket
from tests.core.endpoint.engines import Engine, engine, until
from tests.faults.cable import Staged, staged
from tests.faults.cells import figure
from tests.faults.stages import SHAPE, Remote, produce, remote, right

TRIES = int(os.environ.get("KVFERRY_REUSE", "300"))
LOCAL = [3, 4]
LEASE = 600.0
OPTIONS = EndpointOptions(liveness_interval=0, lease=LEASE)
DRIVERS = [
    "loopback",
    pytest.param("nixl", marks=pytest.mark.nixl),
    pytest.param("ucx", marks=pytest.mark.ucx),
]
RACE_SECONDS = 0.001
"""More than a load of these takes from its first read to its fence."""

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120 + TRIES // 5)]


class World:
    """A producer in a process of its own, and a consumer here."""

    def __init__(self, decode: Engine, driver: Staged, far: Remote) -> None:
        self.decode, self.driver, self.far = decode, driver, far

    def serve(self, request: str) -> Ticket:
        ticket: Ticket = self.far.ask("serve", request, LEASE)
        return ticket

    def load(self, request: str, ticket: Ticket) -> str:
        """How it ended; bytes of another request are no success."""
        self.decode.ranks[0].cache[:, LOCAL] = -1.0
        self.decode.pull(request, ticket, LOCAL)
        name = RequestId(request)
        results = until(self.decode.ranks[0].endpoint, lambda results: name in results.received)
        error = results.failed.get(name)
        assert error is not None or right(self.decode, LOCAL), "another request's bytes"
        return "loaded" if error is None else type(error).__name__


@contextmanager
def world(driver: str) -> Iterator[World]:
    near = staged(driver)
    with (
        remote(produce, 0, "prefill", driver) as far,
        engine("decode", SHAPE, options=OPTIONS, transport=lambda: near) as decode,
    ):
        far.answer()
        yield World(decode, near, far)


@pytest.mark.parametrize("stage", ["reading", "fencing"])
@pytest.mark.parametrize("driver", DRIVERS)
def test_pages_that_were_reused_are_never_taken(driver: str, stage: str) -> None:
    begun = time.monotonic()
    with world(driver) as bench:
        for number in range(TRIES):
            ticket = bench.serve(f"r-{number}")
            bench.driver.at[stage] = lambda: bench.far.ask("reuse")
            assert bench.load(f"r-{number}", ticket) == "StaleError", number
        counts = bench.far.ask("count")
        assert len(counts) == TRIES
        assert set(counts.values()) == {1}
    seconds = time.monotonic() - begun
    figure("reuse", seconds, driver=driver, how=stage, tries=TRIES, stale=TRIES)


@pytest.mark.parametrize("driver", DRIVERS)
def test_pages_that_are_reused_at_any_moment(driver: str) -> None:
    """While both go on: a load has its own bytes, or says that it has not."""
    begun, outcomes, chance = time.monotonic(), Counter[str](), random.Random(1)
    with world(driver) as bench:
        for number in range(TRIES):
            ticket = bench.serve(f"r-{number}")
            wait = chance.random() * RACE_SECONDS
            bench.driver.at["reading"] = lambda: bench.far.pipe.send(("reuse", wait))  # noqa: B023
            outcomes[bench.load(f"r-{number}", ticket)] += 1
            bench.far.answer()
    assert set(outcomes) <= {"loaded", "StaleError"}
    stale, seconds = outcomes["StaleError"], time.monotonic() - begun
    figure("reuse", seconds, driver=driver, how="any moment", tries=TRIES, stale=stale)
