"""A producer reuses pages while a consumer reads them, and the consumer always notices.

``KVFERRY_FAULTS_OVER`` names the driver; ``KVFERRY_REUSE`` is the number of
loads in each test (300 by default).
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
from kvferry.core.lifecycle.ticket import Ticket
from tests.core.endpoint.engines import Engine
from tests.faults.cable import StagedTransport, staged_transport
from tests.faults.cells import OVER, figure
from tests.faults.engine_processes import SHAPE, TOKENS, EngineProcess, engine_process, run_producer

LOADS = int(os.environ.get("KVFERRY_REUSE", "300"))
LOCAL = [3, 4]
LEASE = 600.0
OPTIONS = EndpointOptions(liveness_interval=0, lease=LEASE)
RACE_SECONDS = 0.001
"""Longer than one of these loads takes from its first read to its fence."""

pytestmark = pytest.mark.timeout(120 + LOADS // 5)


class ReuseBench:
    """A producer in a process of its own and a consumer in this process."""

    def __init__(self, decode: Engine, driver: StagedTransport, producer: EngineProcess) -> None:
        self.decode, self.driver, self.producer = decode, driver, producer

    def serve(self, request: str) -> Ticket:
        ticket: Ticket = self.producer.ask("serve", request, LEASE)
        return ticket

    def load(self, request: str, ticket: Ticket) -> str:
        """Run a load and return its outcome; check the bytes of loaded pages."""
        self.decode.ranks[0].cache[:, LOCAL] = -1.0
        self.decode.pull(request, ticket, LOCAL)
        error = self.decode.error(request)
        assert error is not None or not self.decode.wrong_bytes(LOCAL, TOKENS), (
            "another request's bytes"
        )
        return "loaded" if error is None else type(error).__name__


@contextmanager
def reuse_bench(driver: str) -> Iterator[ReuseBench]:
    near = staged_transport(driver)
    with (
        engine_process(run_producer, 0, "prefill", driver) as producer,
        Engine("decode", SHAPE, options=OPTIONS, transport=lambda: near) as decode,
    ):
        producer.answer()
        yield ReuseBench(decode, near, producer)


@pytest.mark.parametrize("stage", ["reading", "fencing"])
@pytest.mark.parametrize("driver", [OVER])
def test_pages_reused_before_the_fence_are_stale(driver: str, stage: str) -> None:
    begun = time.monotonic()
    with reuse_bench(driver) as bench:
        for number in range(LOADS):
            ticket = bench.serve(f"r-{number}")
            bench.driver.at[stage] = lambda: bench.producer.ask("reuse_pages")
            assert bench.load(f"r-{number}", ticket) == "StaleError", number
        counts = bench.producer.ask("count")
        assert len(counts) == LOADS
        assert set(counts.values()) == {1}
    seconds = time.monotonic() - begun
    figure("reuse", seconds, driver=driver, how=stage, tries=LOADS, stale=LOADS)


@pytest.mark.parametrize("driver", [OVER])
def test_pages_reused_at_any_moment_are_never_accepted(driver: str) -> None:
    """With producer and consumer both running, a load has its own bytes or is stale."""
    begun, outcomes, chance = time.monotonic(), Counter[str](), random.Random(1)
    with reuse_bench(driver) as bench:
        for number in range(LOADS):
            ticket = bench.serve(f"r-{number}")
            wait = chance.random() * RACE_SECONDS
            bench.driver.at["reading"] = lambda: bench.producer.pipe.send(("reuse_pages", wait))  # noqa: B023
            outcomes[bench.load(f"r-{number}", ticket)] += 1
            bench.producer.answer()
    assert set(outcomes) <= {"loaded", "StaleError"}
    stale, seconds = outcomes["StaleError"], time.monotonic() - begun
    figure("reuse", seconds, driver=driver, how="any moment", tries=LOADS, stale=stale)
