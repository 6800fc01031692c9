"""Versions of weights, as vLLM is told them and as tickets name them."""

from __future__ import annotations

import json

import pytest

from kvferry.core.errors import TicketError
from kvferry.integrations.vllm.weights import Weights


def named(version: object, loads: int = 0) -> Weights:
    """The weights of a version, or others that were loaded since and have no name."""
    found = Weights()
    found.set(version)
    for _ in range(loads):
        found.loaded()
    return found


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        (named("step-16"), named("step-17"), "'step-16', and this engine has version 'step-17'"),
        (named("default", 1), Weights(), r"'default, loaded once since', and .* 'default': load"),
        (named("default", 1), named("default", 2), "loaded 2 times since"),
        (named("x" * 1000 + "1"), named("x" * 1000 + "2"), "this engine has version"),
    ],
)
def test_other_weights_are_refused_by_name(there: Weights, here: Weights, words: str) -> None:
    with pytest.raises(TicketError, match=words):
        here.check(there.version)
    for weights in (there, here):
        weights.loaded()
        weights.set("step-18")
    here.check(there.version)
    here.check("")  # older builds name none


@pytest.mark.parametrize("version", ["\ud800", "x" * 10_000, 17, ""])
def test_whatever_a_client_calls_them_fits_into_a_ticket(version: object) -> None:
    there = named(version)
    assert len(json.loads(json.dumps(there.version).encode())) <= 256
    named(version).check(there.version)
