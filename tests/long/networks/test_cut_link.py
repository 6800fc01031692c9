"""A link between two network namespaces is cut during a load over UCX and TCP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.faults.cable import STAGES
from tests.faults.engine_processes import (
    LEASE,
    LONG_LEASE,
    EngineProcess,
    engine_process,
    run_consumer,
    run_producer,
)
from tests.long.networks.namespaces import ADDRESSES, DEVICE, Networks, two_networks
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(180)

LOCAL = [3, 4]
# Both hosts share one kernel: UCX would take their loopback devices for the same one.
SETTINGS = {"transports": ["tcp"], "devices": [DEVICE], "deadline_seconds": 2.0}


@pytest.fixture(scope="module")
def networks() -> Iterator[Networks]:
    with two_networks() as made:
        yield made


@pytest.fixture
def prefill(networks: Networks) -> Iterator[EngineProcess]:
    """A producer in the other network namespace."""
    arguments = (0, "prefill", "ucx", SETTINGS, ADDRESSES["far"])
    with ExitStack() as stack:
        process = engine_process(run_producer, *arguments, networked=True)
        made: EngineProcess = networks.far(process.__enter__)
        stack.push(process)
        made.answer()
        yield made


@pytest.mark.parametrize("stage", STAGES)
def test_load_across_cut_link_is_correct_or_fails(
    networks: Networks, prefill: EngineProcess, stage: str
) -> None:
    with engine_process(run_consumer, stage, "ucx", SETTINGS, networked=True) as decode:
        assert decode.answer() == "ready"
        decode.pipe.send((prefill.ask("serve", "p-1", LEASE), LOCAL))
        assert decode.answer() == "here"
        networks.cut("far")
        decode.pipe.send("go on")
        outcome, is_right = decode.answer()
        assert (outcome == "loaded") is (stage == "finishing")
        assert is_right or outcome != "loaded"
    networks.restore()
    eventually(lambda: prefill.ask("held") == 0, "the pages are given back")
    with engine_process(run_consumer, "never", "ucx", SETTINGS, networked=True) as other:
        assert other.answer() == "ready"
        other.pipe.send((prefill.ask("serve", "p-2", LONG_LEASE), LOCAL))
        assert other.answer() == ("loaded", True)
    eventually(lambda: prefill.ask("held") == 0, "the pages are given back")
    assert prefill.ask("count") == {"p-1": 1, "p-2": 1}
