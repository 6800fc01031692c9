"""Loads over a transport that delays, fails, dooms and truncates, by seed, or dies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.transport import Quiescence, Transport
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing import Fault, FaultyTransport, Schedule
from tests.core.endpoint.engines import LAYERS, POISON, Engine, engine, expected

TOKENS = 8
LOADS = 12
WITHIN_THE_CONTRACT = (Fault.DELAY, Fault.FAIL, Fault.TRUNCATE, Fault.DOOM)


def faulty(seed: int, quiescence: Quiescence) -> Callable[[], Transport]:
    schedule = Schedule(seed=seed, rate=0.3, faults=WITHIN_THE_CONTRACT)
    return lambda: FaultyTransport(LoopbackTransport(), schedule, quiescence=quiescence)


def right(decode: Engine, pages: list[int]) -> bool:
    (rank,) = decode.ranks
    return all(
        np.array_equal(rank.tokens(pages, layer)[:TOKENS], expected(decode.shape, TOKENS, layer, 0))
        for layer in range(LAYERS)
    )


@pytest.mark.parametrize("quiescence", Quiescence)
@pytest.mark.parametrize("seed", range(4))
def test_a_load_has_its_bytes_or_has_failed(seed: int, quiescence: Quiescence) -> None:
    options = EndpointOptions(load_timeout=0.5)
    with (
        engine("prefill") as prefill,
        engine("decode", transport=faulty(seed, quiescence), options=options) as decode,
    ):
        outcomes = set()
        for index in range(LOADS):
            decode.ranks[0].cache[:] = POISON
            ticket = prefill.serve(f"p-{index}", [1, 2], TOKENS)
            decode.pull(f"d-{index}", ticket, [3, 4])
            failed = decode.outcome(f"d-{index}").failed
            assert failed or right(decode, [3, 4])
            outcomes.add(bool(failed))
        assert False in outcomes, "not one load came through"


def test_a_transport_that_dies_fails_its_loads() -> None:
    made: list[FaultyTransport] = []

    def mortal() -> Transport:
        made.append(FaultyTransport(LoopbackTransport()))
        return made[-1]

    with engine("prefill") as prefill, engine("decode", transport=mortal) as decode:
        decode.pull("d-1", prefill.serve("p-1", [1, 2], TOKENS), [3, 4])
        assert not decode.outcome("d-1").failed
        made[0].die()
        decode.pull("d-2", prefill.serve("p-2", [5, 6], TOKENS), [7, 8])
        assert RequestId("d-2") in decode.outcome("d-2").failed


def test_a_producer_that_dies_fails_the_load_and_not_the_engine() -> None:
    made: list[FaultyTransport] = []

    def mortal() -> Transport:
        made.append(FaultyTransport(LoopbackTransport()))
        return made[-1]

    with (
        engine("one", transport=mortal) as one,
        engine("other") as other,
        engine("decode") as decode,
    ):
        ticket = one.serve("p-1", [1, 2], TOKENS)
        made[0].die()
        decode.pull("d-1", ticket, [3, 4])
        assert decode.outcome("d-1").failed
        decode.pull("d-2", other.serve("p-2", [1, 2], TOKENS), [3, 4])
        assert not decode.outcome("d-2").failed
        assert right(decode, [3, 4])
