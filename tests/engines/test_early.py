"""Decode reads the pages of finished chunks while prefill computes the next ones.

Moments and aborts are varied in ``tests/vllm/geometry/test_early.py``, without a model.
"""

from __future__ import annotations

import re

import pytest

from examples.tiny_llama import prompt
from tests.engines import contents
from tests.engines.early import SENTINEL, Legs, check_early, early_loads
from tests.engines.engines import Engine
from tests.engines.fleet import DOES_BOTH, PREFILLS, Engines, cast
from tests.engines.steps import SAMPLES, texts

pytestmark = pytest.mark.timeout(300)

CHUNK = 64

engines = cast(
    "llama",
    {"max_num_batched_tokens": CHUNK},
    prefill=PREFILLS | {"extra": {"kv_lease_duration": 600.0}},
    two=DOES_BOTH | {"tensor_parallel_size": 2},
)


@pytest.mark.parametrize(
    ("source", "target"), [("prefill", "decode"), ("two", "decode"), ("prefill", "two")]
)
def test_prompts_of_all_lengths(
    reference: Engine, engines: Engines, decode: Engine, source: str, target: str
) -> None:
    here = engines.get(target, decode)
    check_early(reference, engines[source], here, CHUNK, seed=ord(source[0]) + ord(target[0]))


def test_pages_cross_while_prefill_computes(
    reference: Engine, engines: Engines, decode: Engine
) -> None:
    """One log line says how much, and the metrics."""
    prefill, begun = engines["prefill"], early_loads(decode)
    legs = Legs(prefill, decode, prompt(300, seed=1))
    decode.run(contents.fill, SENTINEL)
    with prefill.paused():
        legs.begin_decode()
        legs.begin_prefill()
        for chunk in range(1, 5):
            prefill.step()
            if chunk > 1:
                legs.wait_read(CHUNK * (chunk - 1))
    assert legs.texts() == texts(reference, prompt(300, seed=1))
    assert early_loads(decode) == begun + 1
    assert re.search(r"loaded 300 tokens, [0-9.]+ MiB \([0-9.]*[1-9][0-9.]* early\)", decode.log())


def test_samples_wait_for_the_ticket(reference: Engine, engines: Engines, decode: Engine) -> None:
    begun = early_loads(decode)
    legs = Legs(engines["prefill"], decode, prompt(300, seed=22), **SAMPLES)
    legs.begin_prefill()
    legs.begin_decode()
    [completion] = decode.results(legs.here)
    assert completion.samples == 2 * texts(reference, prompt(300, seed=22))
    assert early_loads(decode) == begun
