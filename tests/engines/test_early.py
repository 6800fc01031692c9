"""Decode reads the pages of finished chunks while prefill computes the next ones.

Moments and aborts are varied in ``tests/vllm/geometry/test_early.py``, without a model.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.early import SENTINEL, Legs, early_loads, hand_over_early
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.ranks import at_rest, come_to
from tests.engines.steps import SAMPLES, texts

pytestmark = pytest.mark.timeout(300)

LENGTHS = (1, 2, 31, 64, 65, 130, 255, 256, 600)
CHUNK: dict[str, Any] = {"max_num_batched_tokens": 64}
TOKENS = "vllm:kvferry_tokens"


@pytest.fixture(scope="module")
def chunked(start_engine: StartEngine) -> Engine:
    """Prefills in chunks, and holds pages for longer than any test."""
    extra = {"kv_lease_duration": 600.0}
    return start_engine("early-prefill", "kv_producer", extra=extra, **CHUNK)


def test_prompts_of_all_lengths(reference: Engine, chunked: Engine, decode: Engine) -> None:
    rest = at_rest(chunked, decode)
    before, begun = decode.run(probes.metrics)[TOKENS], early_loads(decode)
    prompts = [prompt(length, seed=64) for length in LENGTHS]
    wanted = texts(reference, *prompts, max_tokens=8)
    alone = LENGTHS.index(130)
    assert (
        hand_over_early(chunked, decode, prompts[alone], max_tokens=8) == wanted[alone : alone + 1]
    )
    assert hand_over_early(chunked, decode, *prompts, max_tokens=8) == wanted
    assert decode.run(probes.metrics)[TOKENS] - before == 130 + sum(LENGTHS)
    assert early_loads(decode) > begun
    come_to(rest, chunked, decode)


def test_pages_cross_while_prefill_computes(
    reference: Engine, chunked: Engine, decode: Engine
) -> None:
    """One log line says how much, and the metrics."""
    rest, begun = at_rest(chunked, decode), early_loads(decode)
    legs = Legs(chunked, decode, prompt(300, seed=1))
    decode.run(probes.fill_caches, SENTINEL)
    with chunked.paused():
        legs.begin_decode()
        legs.begin_prefill()
        for chunk in range(1, 5):
            chunked.step()
            if chunk > 1:
                legs.wait_read(64 * (chunk - 1))
    assert legs.texts() == texts(reference, prompt(300, seed=1))
    assert early_loads(decode) == begun + 1
    assert re.search(r"loaded 300 tokens, [0-9.]+ MiB \([0-9.]*[1-9][0-9.]* early\)", decode.log())
    come_to(rest, chunked, decode)


def test_samples_wait_for_the_ticket(reference: Engine, chunked: Engine, decode: Engine) -> None:
    rest, begun = at_rest(chunked, decode), early_loads(decode)
    legs = Legs(chunked, decode, prompt(300, seed=22), **SAMPLES)
    legs.begin_prefill()
    legs.begin_decode()
    [completion] = decode.results(legs.here)
    assert completion.samples == 2 * texts(reference, prompt(300, seed=22))
    assert early_loads(decode) == begun
    come_to(rest, chunked, decode)


def test_tensor_parallel(
    reference: Engine, chunked: Engine, decode: Engine, start_engine: StartEngine
) -> None:
    """On prefill, and on decode."""
    engine = start_engine("early-tp2", "kv_both", tensor_parallel_size=2, **CHUNK)
    for seed, there, here in ((28, engine, decode), (30, chunked, engine)):
        rest, begun = at_rest(there, here), early_loads(here)
        with there.paused():
            legs = Legs(there, here, prompt(300, seed))
            legs.begin_prefill()
            legs.begin_decode()
            there.step(3)
            legs.wait_begun()
        assert legs.texts() == texts(reference, prompt(300, seed))
        assert early_loads(here) == begun + 1
        prompts = [prompt(length, seed + 1) for length in (1, 64, 256)]
        assert hand_over_early(there, here, *prompts) == texts(reference, *prompts)
        come_to(rest, there, here)
    engine.close()
