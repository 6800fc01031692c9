"""What becomes of a load when a driver fails in every way that its contract allows."""

from __future__ import annotations

import pytest

from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.transport import Quiescence
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing import Fault, FaultyTransport, Schedule
from tests.core.endpoint.engines import engine, until
from tests.faults.cells import Cell
from tests.faults.stages import OPTIONS, SHAPE, right, serve

pytestmark = pytest.mark.faults

LOCAL = [3, 4]
CALLS = {"reading": 0, "fencing": 1}
"""Of the driver, in a load."""
SURVIVED = {Fault.DELAY}
LATER = {Fault.DROP}
"""The load succeeds, and the producer does not hear of it: the lease ends its hold."""


@pytest.mark.parametrize("quiescence", Quiescence)
@pytest.mark.parametrize("stage", CALLS)
@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.LIE])
def test_a_fault_of_the_driver(fault: Fault, stage: str, quiescence: Quiescence) -> None:
    cell = Cell(side="driver", fault=fault.value, stage=stage, driver=quiescence.value)
    schedule = Schedule(at={CALLS[stage]: fault})
    driver = FaultyTransport(LoopbackTransport(), schedule, quiescence=quiescence)
    with (
        engine("prefill", SHAPE, options=OPTIONS) as prefill,
        engine("decode", SHAPE, options=OPTIONS, transport=lambda: driver) as decode,
    ):
        ticket = serve(prefill, "p-1")
        cell.strikes()
        decode.pull("d-1", ticket, LOCAL)
        failed = decode.outcome("d-1").failed.get(RequestId("d-1"))
        assert (failed is None) is (fault in SURVIVED | LATER)
        assert failed is not None or right(decode, LOCAL)
        cell.write("loaded" if failed is None else type(failed).__name__)
        prefill.released("p-1")
        assert prefill.ranks[0].endpoint.held == 0
        assert decode.ranks[0].endpoint.results().received == frozenset()
        if fault is not Fault.DIE:
            decode.pull("d-2", serve(prefill, "p-2"), LOCAL)
            assert not decode.outcome("d-2").failed
            assert right(decode, LOCAL)
            until(prefill.ranks[0].endpoint, lambda results: RequestId("p-2") in results.sent)
        assert decode.ranks[0].endpoint.healthy
