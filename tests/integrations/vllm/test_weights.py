"""Versions of weights, as vLLM is told them and as tickets name them."""

from __future__ import annotations

import json

import pytest

from kvferry.core.errors import TicketError
from kvferry.integrations.vllm.weights import Weights


def test_other_weights_are_refused_by_name() -> None:
    here = Weights()
    here.set("step-17")
    here.check("step-17")
    with pytest.raises(TicketError, match="'step-16', and this engine has version 'step-17'"):
        here.check("step-16")


def test_weights_that_nobody_names_are_counted() -> None:
    there, here = Weights(), Weights()
    there.loaded()
    with pytest.raises(TicketError, match=r"'default, loaded once since', and .* 'default': load"):
        here.check(there.version)
    here.loaded()
    here.check(there.version)
    here.loaded()
    here.set("step-2")
    there.set("step-2")
    here.check(there.version)


def test_older_builds_name_no_weights() -> None:
    Weights().check("")


@pytest.mark.parametrize("version", ["\ud800", "x" * 10_000, 17, ""])
def test_whatever_a_client_calls_them_fits_into_a_ticket(version: object) -> None:
    there, here = Weights(), Weights()
    there.set(version)
    assert len(json.loads(json.dumps(there.version).encode())) <= 256
    here.set(version)
    here.check(there.version)


def test_long_versions_are_told_apart() -> None:
    there, here = Weights(), Weights()
    there.set("x" * 1000 + "1")
    here.set("x" * 1000 + "2")
    with pytest.raises(TicketError):
        here.check(there.version)
