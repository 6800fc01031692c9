"""A cable between two networks that is pulled: TCP of the kernel, UCX, and a real side channel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.core.endpoint.engines import eventually
from tests.drivers.network_namespaces import ADDRESSES, DEVICE, Networks, two_networks
from tests.faults.cells import CABLE, STAGES, Cell
from tests.faults.stages import LEASE, Remote, consume, produce, remote

pytestmark = [pytest.mark.faults, pytest.mark.ucx, pytest.mark.timeout(180)]

LOCAL = [3, 4]
# One kernel serves both hosts: UCX would take their loopback devices for one and the same.
SETTINGS = {"transports": ["tcp"], "devices": [DEVICE], "deadline_seconds": 2.0}


@pytest.fixture(scope="module")
def networks() -> Iterator[Networks]:
    with two_networks() as made:
        yield made


@pytest.fixture
def prefill(networks: Networks) -> Iterator[Remote]:
    """A producer on the other host."""
    arguments = (0, "prefill", "ucx", SETTINGS, ADDRESSES["far"])
    with ExitStack() as stack:
        far = remote(produce, *arguments, networked=True)
        made: Remote = networks.far(far.__enter__)
        stack.push(far)
        made.answer()
        yield made


@pytest.mark.parametrize("stage", STAGES)
def test_a_cable_that_is_pulled(networks: Networks, prefill: Remote, stage: str) -> None:
    cell = Cell(side="producer", fault="cut off", stage=stage, driver=CABLE)
    with remote(consume, stage, "ucx", SETTINGS, networked=True) as decode:
        assert decode.answer() == "ready"
        decode.pipe.send((prefill.ask("serve", "p-1", LEASE), LOCAL))
        assert decode.answer() == "here"
        networks.cut("far")
        cell.strikes()
        decode.pipe.send("go on")
        outcome, is_right = decode.answer()
        cell.write(outcome)
        assert (outcome == "loaded") is (stage == "finishing")
        assert is_right or outcome != "loaded"
    networks.restore()
    eventually(lambda: prefill.ask("held") == 0, "the pages are given back")
    with remote(consume, "never", "ucx", SETTINGS, networked=True) as other:
        assert other.answer() == "ready"
        other.pipe.send((prefill.ask("serve", "p-2", LEASE), LOCAL))
        assert other.answer() == ("loaded", True)
    eventually(lambda: prefill.ask("held") == 0, "the pages are given back")
    assert prefill.ask("count") == {"p-1": 1, "p-2": 1}
