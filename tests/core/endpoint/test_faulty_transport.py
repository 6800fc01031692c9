"""Loads over ``FaultyTransport``: delayed, failed and truncated reads, and its death."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.transport import Quiescence, Transport
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing import Fault, FaultyTransport, Schedule
from tests.core.endpoint.engines import Engine

TOKENS = 8
LOADS = 12
WITHIN_THE_CONTRACT = (Fault.DELAY, Fault.FAIL, Fault.TRUNCATE, Fault.DOOM)


def faulty_transport(seed: int, quiescence: Quiescence) -> Callable[[], Transport]:
    schedule = Schedule(seed=seed, rate=0.3, faults=WITHIN_THE_CONTRACT)
    return lambda: FaultyTransport(LoopbackTransport(), schedule, quiescence=quiescence)


@pytest.mark.parametrize("quiescence", Quiescence)
@pytest.mark.parametrize("seed", range(2))
def test_a_load_has_the_right_bytes_or_fails(
    prefill: Engine, seed: int, quiescence: Quiescence
) -> None:
    options = EndpointOptions(load_timeout=0.5)
    with Engine("decode", transport=faulty_transport(seed, quiescence), options=options) as decode:
        outcomes = set()
        for index in range(LOADS):
            decode.ranks[0].cache[:] = np.nan
            ticket = prefill.serve(f"p-{index}", [1, 2], TOKENS)
            decode.pull(f"d-{index}", ticket, [3, 4])
            failed = decode.outcome(f"d-{index}").failed
            assert failed or not decode.wrong_bytes([3, 4], TOKENS)
            outcomes.add(bool(failed))
        assert False in outcomes, "no load succeeded"


def test_loads_fail_when_the_consumers_transport_dies(prefill: Engine) -> None:
    transport = FaultyTransport(LoopbackTransport())
    with Engine("decode", transport=lambda: transport) as decode:
        assert decode.load("d-1", prefill.serve("p-1", [1, 2], TOKENS), [3, 4]) is None
        transport.die()
        decode.pull("d-2", prefill.serve("p-2", [5, 6], TOKENS), [7, 8])
        assert RequestId("d-2") in decode.outcome("d-2").failed


def test_the_death_of_a_producers_transport_fails_only_its_loads(decode: Engine) -> None:
    transport = FaultyTransport(LoopbackTransport())
    with (
        Engine("one", transport=lambda: transport) as one,
        Engine("other") as other,
    ):
        ticket = one.serve("p-1", [1, 2], TOKENS)
        transport.die()
        decode.pull("d-1", ticket, [3, 4])
        assert decode.outcome("d-1").failed
        assert decode.load("d-2", other.serve("p-2", [1, 2], TOKENS), [3, 4]) is None
        assert not decode.wrong_bytes([3, 4], TOKENS)
