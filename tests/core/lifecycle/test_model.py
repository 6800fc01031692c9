"""The model test: the real state machines with simulated engines, events in any order."""

from __future__ import annotations

import pytest

from tests.core.lifecycle.machine import Protocol
from tests.core.lifecycle.searches import search


@pytest.mark.timeout(300)
def test_the_protocol_holds_in_every_order_of_events() -> None:
    search(Protocol, examples=600, steps=25)
