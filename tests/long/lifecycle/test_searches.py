"""Searches for orders of events that break the protocol, with and without planted faults.

``KVFERRY_MODEL_STEPS`` is the number of steps (100,000 by default) of the search that has other
examples in each run; each step is a few actions with all their consequences.
``KVFERRY_MODEL_EXAMPLES=20000 pytest tests/long/lifecycle -k every_order`` searches longer, with
new examples each time; without it, a search is always the same.
"""

from __future__ import annotations

import itertools
import os
import secrets

import pytest

from tests.core.lifecycle.fabric import Components
from tests.core.lifecycle.faults import PLANTED
from tests.core.lifecycle.model import KINDS, draw_options, search, walk

STEPS = int(os.environ.get("KVFERRY_MODEL_STEPS", "100000"))
EXAMPLES = os.environ.get("KVFERRY_MODEL_EXAMPLES")
FAULT_EXAMPLES = 10_000
"""Most faults are caught in some hundred."""
RARELY_FOUND = {
    "a claim before ready does not count",
    "a watermark read before its generation",
    "a watermark not zeroed at take-on",
}
"""Faults that only their sequences find reliably."""

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("kind", KINDS)
def test_model_holds_in_every_order_of_events(kind: str) -> None:
    seed = secrets.token_hex(8) if EXAMPLES else ""
    assert next(search(kind, int(EXAMPLES or 600), seed=seed), None) is None


@pytest.mark.parametrize("fault", sorted(PLANTED.keys() - RARELY_FOUND))
def test_planted_fault_is_caught(fault: str) -> None:
    planted = PLANTED[fault]
    kind = planted.walk.options.kind
    assert next(search(kind, FAULT_EXAMPLES, planted.components()), None) is not None


@pytest.mark.timeout(600 + STEPS // 20)
def test_protocol_holds_for_many_steps() -> None:
    taken, run = 0, secrets.token_hex(8)
    for example in itertools.count():
        options = draw_options(KINDS[example % len(KINDS)], seed := f"{run} {example}")
        taken += walk(Components(), options, seed)
        if taken >= STEPS:
            return
