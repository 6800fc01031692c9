"""Prefill's cache is full of pages that nobody will read: who waits for blocks gets them soon."""

from __future__ import annotations

import time

import pytest

from examples.tiny_llama import prompt
from kvferry.core.lifecycle.silent_holds import GONE_SECONDS
from tests.engines import ranks
from tests.engines.engines import PREFILL, Engine
from tests.engines.fixtures import StartEngine
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

BLOCKS = 65
"""Of 32 tokens each, the null block included: room for eight prompts of 250 tokens."""
FITTING = 8
PROMPTS = [prompt(250, seed=seed) for seed in range(FITTING)]
LATE = prompt(250, seed=50)
OTHERS = 100
"""Requests of 1,000 tokens each, which decode runs one by one: it gets to nothing else."""
LINE = "(stage held, cause orphaned)"


@pytest.fixture
def small(start_engine: StartEngine) -> Engine:
    """A prefill engine whose cache is full with eight prompts; no test waits for its leases."""
    extra = {"kv_lease_duration": 600.0}
    return start_engine("small", "kv_producer", extra=extra, num_gpu_blocks_override=BLOCKS)


def lines(engine: Engine) -> list[str]:
    return [line for line in engine.log().splitlines() if LINE in line]


def test_a_decode_engine_that_is_gone_makes_room(small: Engine, start_engine: StartEngine) -> None:
    """While it lives and waits for all that prefill holds, nothing is given up."""
    decode = start_engine("gone", "kv_consumer", transfer={"engine_id": "gone"}, max_num_seqs=1)
    tickets = small.prefill(*PROMPTS)
    decode.submit(*[prompt(10)] * OTHERS, max_tokens=1000)
    decode.submit(*PROMPTS, params=tickets)
    eventually(lambda: small.run(ranks.claimed) == FITTING)
    [waiting] = small.submit(LATE, max_tokens=1, params=PREFILL)
    until = time.monotonic() + 2 * GONE_SECONDS  # real time: it is what this is about
    while time.monotonic() < until:
        time.sleep(0.05)
    assert (small.finished, lines(small)) == ([], [])
    decode.kill()
    assert small.results([waiting])[0].finish_reason == "length"
    [line] = lines(small)
    assert "engine gone gave no sign of life" in line
