"""Searches for orders of events that break the protocol, with and without planted faults."""

from __future__ import annotations

import pytest

from tests.core.lifecycle.planted import MODELS, PLANTED, RARELY_FOUND, catch, plant, search

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("model", MODELS)
def test_model_holds_in_every_order_of_events(model: str) -> None:
    search(MODELS[model], MODELS[model].examples)


FAULTS = {(model, fault) for model in PLANTED for fault in PLANTED[model]} - RARELY_FOUND


@pytest.mark.parametrize(("model", "fault"), sorted(FAULTS))
def test_planted_fault_is_caught(model: str, fault: str) -> None:
    assert catch(plant(model, fault)) is not None
