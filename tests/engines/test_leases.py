"""For how long pages are kept, and for how many: a consumer that waits, clients, a shutdown."""

from __future__ import annotations

import time

import pytest

from examples.tiny_llama import prompt
from kvferry.core.side_channel import health
from tests.engines import probes
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import eventually, hand_over, idle_blocks, texts
from tests.faults.cells import Cell

pytestmark = pytest.mark.timeout(300)

LEASE = 2.0
OTHERS = 10
"""Requests of 1,000 tokens each: no machine runs them all within a few leases."""


def test_a_request_that_waits_its_turn_keeps_its_pages(
    reference: Engine, start_engine: StartEngine
) -> None:
    """Decode runs one request at a time, and those before it take longer than some leases."""
    prefill = start_engine("hasty", "kv_producer", extra={"kv_lease_duration": LEASE})
    decode = start_engine("narrow", "kv_consumer", max_num_seqs=1)
    free = idle_blocks(prefill)
    [ticket] = prefill.prefill(prompt(100))
    cell = Cell(side="consumer", fault="busy", stage="waiting", driver="vllm")
    others = decode.submit(*[prompt(10)] * OTHERS, max_tokens=1000)
    [waiting] = decode.submit(prompt(100), params=ticket)
    until = time.monotonic() + 2 * LEASE
    while time.monotonic() < until:
        assert prefill.run(probes.free_blocks) < free
        time.sleep(0.1)
    for other in others:
        decode.abort(other)
    [completion] = decode.results([waiting])
    assert completion.text == texts(reference, prompt(100))[0]
    cell.write("loaded")
    eventually(lambda: prefill.run(probes.free_blocks) == free)
    assert "nobody read its pages within the lease" not in prefill.log()


def test_clients_cannot_pin_the_whole_cache(decode: Engine, start_engine: StartEngine) -> None:
    """What they do not fetch goes first, and a request of its own gets no ticket."""
    prefill = start_engine("limited", "kv_producer", extra={"max_held_fraction": 0.02})
    free = idle_blocks(prefill)
    cell = Cell(side="producer", fault="out of blocks", stage="before the read", driver="vllm")
    tickets = prefill.prefill(*(prompt(100, seed=seed) for seed in range(4)))
    eventually(lambda: free - prefill.run(probes.free_blocks) <= 0.02 * (free + 1))
    first, *_, last = range(4)
    [late] = decode.generate(prompt(100, seed=first), params=tickets[first])
    assert late.finish_reason == "error"
    cell.write("stale")
    [good] = decode.generate(prompt(100, seed=last), params=tickets[last])
    assert good.finish_reason == "length"
    assert "max_held_fraction" in prefill.log()
    assert prefill.prefill(prompt(511)) == [{}]


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_an_engine_that_is_shut_down_serves_what_it_holds(
    reference: Engine, decode: Engine, start_engine: StartEngine, staged: bool
) -> None:
    """If its cache is staged, from host pages."""
    prefill = start_engine(
        "leaving", "kv_producer", extra={"drain_timeout": 20.0, "staging": staged}
    )
    assert hand_over(prefill, decode, prompt(70))[0] == texts(reference, prompt(70))
    [ticket] = prefill.prefill(prompt(100))
    condition = health(ticket["remote_host"], ticket["remote_port"], timeout=20.0)
    assert condition.problems == []
    cell = Cell(side="producer", fault="shut down", stage="before the read", driver="vllm")
    prefill.begin_close()
    [completion] = decode.generate(prompt(100), params=ticket)
    assert completion.text == texts(reference, prompt(100))[0]
    cell.write("loaded")
    prefill.close()
