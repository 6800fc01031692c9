"""A producer's pages are reused, on purpose, while a consumer reads them: it finds out every time.

``KVFERRY_REUSE`` is how often (300 unless set).
"""

from __future__ import annotations

import os

import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import StaleError
from kvferry.core.lifecycle.holds import RequestId
from tests.core.endpoint.engines import Engine, engine
from tests.faults.stages import HELD, SHAPE, Staged, serve

TRIES = int(os.environ.get("KVFERRY_REUSE", "300"))
LOCAL = [3, 4]
OPTIONS = EndpointOptions(liveness_interval=0)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120 + TRIES // 10)]


def reuse(prefill: Engine) -> None:
    """Give the pages back, and let another request have them, in the same slot."""
    prefill.ledger.reset()
    prefill.step()
    for rank in prefill.ranks:
        rank.cache[:, HELD] += 1.0


@pytest.mark.parametrize("stage", ["reading", "fencing"])
def test_pages_that_were_reused_are_never_taken(stage: str) -> None:
    driver = Staged()
    with (
        engine("prefill", SHAPE) as prefill,
        engine("decode", SHAPE, options=OPTIONS, transport=lambda: driver) as decode,
    ):
        for number in range(TRIES):
            name = RequestId(f"r-{number}")
            driver.at[stage] = lambda: reuse(prefill)
            decode.pull(name, serve(prefill, name), LOCAL)
            assert isinstance(decode.outcome(name).failed.get(name), StaleError)
            prefill.released(name)
