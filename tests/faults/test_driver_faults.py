"""Loads over a driver that fails in every way that its contract allows."""

from __future__ import annotations

import pytest

from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.transport import Quiescence
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing import Fault, FaultyTransport, Schedule
from tests.core.endpoint.engines import Engine
from tests.faults.engine_processes import LEASE, OPTIONS, SHAPE, TOKENS, serve_request

LOCAL = [3, 4]
CALL_INDEX = {"reading": 0, "fencing": 1}
"""The index of the driver's read in a load, by stage."""
HARMLESS = {Fault.DELAY}
HARMLESS_TO_LOAD = {Fault.DROP}
"""The load succeeds, but the producer gets no release, so the hold ends with its lease."""
UNRELEASED = {Fault.DIE, Fault.DOOM, *HARMLESS_TO_LOAD}
SHORT_LEASE = 1.0
"""Seconds of the lease of a hold that may get no release."""


@pytest.mark.parametrize("quiescence", Quiescence)
@pytest.mark.parametrize("stage", CALL_INDEX)
@pytest.mark.parametrize("fault", Fault)
def test_load_survives_or_fails_with_faulty_driver(
    fault: Fault, stage: str, quiescence: Quiescence
) -> None:
    schedule = Schedule(at={CALL_INDEX[stage]: fault})
    driver = FaultyTransport(LoopbackTransport(), schedule, quiescence=quiescence)
    with (
        Engine("prefill", SHAPE, options=OPTIONS) as prefill,
        Engine("decode", SHAPE, options=OPTIONS, transport=lambda: driver) as decode,
    ):
        ticket = serve_request(prefill, "p-1", SHORT_LEASE if fault in UNRELEASED else LEASE)
        decode.pull("d-1", ticket, LOCAL)
        failed = decode.outcome("d-1").failed.get(RequestId("d-1"))
        assert (failed is None) is (fault in HARMLESS | HARMLESS_TO_LOAD)
        assert failed is not None or not decode.wrong_bytes(LOCAL, TOKENS)
        prefill.released("p-1")
        assert prefill.ranks[0].endpoint.held == 0
        assert decode.ranks[0].endpoint.results().received == frozenset()
        if fault is not Fault.DIE:
            decode.pull("d-2", serve_request(prefill, "p-2"), LOCAL)
            assert not decode.outcome("d-2").failed
            assert not decode.wrong_bytes(LOCAL, TOKENS)
            prefill.released("p-2")
        assert decode.ranks[0].endpoint.healthy
