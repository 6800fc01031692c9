"""Prefill's cache is full of pages that nobody will read: who waits for blocks gets them soon."""

from __future__ import annotations

import os
import signal
import time

import pytest

from examples.tiny_llama import prompt
from kvferry.core.lifecycle.silent_holds import GONE_SECONDS
from tests.engines import probes
from tests.engines.engines import PREFILL, Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import eventually, texts

pytestmark = pytest.mark.timeout(300)

LEASE = 600.0
"""So long that no test waits for its end."""
BLOCKS = 65
"""Of 32 tokens each, the null block included: room for eight prompts of 250 tokens."""
FITTING = 8
LONG = 250
OTHERS = 100
"""Requests of 1,000 tokens each, which decode runs one by one: it gets to nothing else."""
LINE = "(stage held, cause orphaned)"


@pytest.fixture
def small(start_engine: StartEngine) -> Engine:
    """A prefill engine whose cache is full with eight prompts."""
    return start_engine(
        "small",
        "kv_producer",
        extra={"kv_lease_duration": LEASE},
        num_gpu_blocks_override=BLOCKS,
    )


def prompts(count: int, first: int = 0) -> list[list[int]]:
    return [prompt(LONG, seed=first + i) for i in range(count)]


def orphaned(engine: Engine) -> float:
    """How many holds were given up, by the engine's metric."""
    samples: dict[str, float] = engine.run(probes.exposed)
    return samples['holds_total{driver="loopback",outcome="orphaned"}']


def test_tickets_that_nobody_uses_make_room(reference: Engine, small: Engine) -> None:
    small.prefill(*prompts(FITTING))
    [waiting] = small.submit(prompt(LONG, seed=50), max_tokens=1, params=PREFILL)
    assert small.results([waiting])[0].finish_reason == "length"
    eventually(lambda: orphaned(small) > 0)
    lines = [line for line in small.log().splitlines() if LINE in line]
    assert len(lines) == 1
    assert "decode gave no sign of life" in lines[0]
    [text] = texts(small, prompt(LONG, seed=51), max_tokens=4)
    assert text == texts(reference, prompt(LONG, seed=51), max_tokens=4)[0]


def test_a_decode_engine_that_died_makes_room(small: Engine, start_engine: StartEngine) -> None:
    """While it lives and waits for all that prefill holds, nothing is given up."""
    decode, _, _ = _waiting(small, start_engine, "mortal")
    [waiting] = small.submit(prompt(LONG, seed=50), max_tokens=1, params=PREFILL)
    _pass(2 * GONE_SECONDS)
    assert small.finished == []
    assert LINE not in small.log()
    decode.kill()
    assert small.results([waiting])[0].finish_reason == "length"
    [line] = [line for line in small.log().splitlines() if LINE in line]
    assert "engine mortal gave no sign of life" in line


def test_a_decode_engine_that_stood_still_reads_nothing_wrong(
    reference: Engine, small: Engine, start_engine: StartEngine
) -> None:
    """It comes back when some of what it waited for is another prompt's: that fails as stale."""
    decode, others, requests = _waiting(small, start_engine, "stopped")
    pid = decode.run(_pid)
    os.kill(pid, signal.SIGSTOP)
    try:
        [waiting] = small.submit(prompt(LONG, seed=50), max_tokens=1, params=PREFILL)
        assert small.results([waiting])[0].finish_reason == "length"
    finally:
        os.kill(pid, signal.SIGCONT)
    for other in others:
        decode.abort(other)
    completions = decode.results(requests)
    expected = texts(reference, *prompts(FITTING))
    failed = [each for each in completions if each.finish_reason == "error"]
    assert len(failed) == 1
    assert [each.text for each in completions if each not in failed] == [
        text for text, each in zip(expected, completions, strict=True) if each not in failed
    ]


def _waiting(
    small: Engine, start_engine: StartEngine, name: str
) -> tuple[Engine, list[str], list[str]]:
    """A decode engine that waits for all that prefill holds, and runs others one by one."""
    decode = start_engine(name, "kv_consumer", transfer={"engine_id": name}, max_num_seqs=1)
    tickets = small.prefill(*prompts(FITTING))
    others = decode.submit(*[prompt(10)] * OTHERS, max_tokens=1000)
    requests = decode.submit(*prompts(FITTING), params=tickets)
    eventually(lambda: small.run(probes.claimed) == FITTING)
    return decode, others, requests


def _pid(engine: object) -> int:
    return os.getpid()


def _pass(seconds: float) -> None:
    """Real time has to pass: it is what this is about."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.05)
