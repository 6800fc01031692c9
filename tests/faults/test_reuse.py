"""A producer reuses pages while a consumer reads them, and the consumer always notices.

``KVFERRY_FAULTS_OVER`` names the driver; ``KVFERRY_REUSE`` is the number of loads (300 by default).
"""

from __future__ import annotations

import os
import random

import pytest

from kvferry.core.endpoint import EndpointOptions
from tests.faults.cable import OVER
from tests.faults.engine_pair import engine_pair

LOADS = int(os.environ.get("KVFERRY_REUSE", "300"))
LEASE = 600.0
OPTIONS = EndpointOptions(liveness_interval=0, lease=LEASE)
RACE_SECONDS = 0.001
"""Longer than one of these loads takes from its first read to its fence."""

pytestmark = pytest.mark.timeout(120 + LOADS // 5)


def test_pages_reused_at_any_moment_are_never_accepted() -> None:
    """With producer and consumer both running, a load has its own bytes or is stale."""
    outcomes, chance = set[str](), random.Random(1)
    with engine_pair(OPTIONS, driver=OVER, proxied=False) as found:
        found.producer.lease, producer = LEASE, found.producer.process
        for number in range(LOADS):
            ticket = found.producer.serve(f"r-{number}")
            wait = chance.random() * RACE_SECONDS
            found.driver.at["reading"] = lambda: producer.pipe.send(("reuse_pages", wait))  # noqa: B023
            outcomes.add(found.load(f"r-{number}", ticket))
            producer.answer()
    assert outcomes <= {"loaded", "StaleError"}
