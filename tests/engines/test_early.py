"""Decode reads the pages of finished chunks while prefill computes the next ones.

Moments and aborts are varied in ``tests/vllm/geometry/test_early.py``, without a model.
"""

from __future__ import annotations

import pytest

from examples.tiny_llama import prompt
from tests.engines.early import Legs, check_early, early_loads
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


def test_samples_wait_for_the_ticket(reference: Engine, engines: Engines, decode: Engine) -> None:
    begun = early_loads(decode)
    legs = Legs(engines["prefill"], decode, prompt(300, seed=22), **SAMPLES)
    legs.begin_prefill()
    legs.begin_decode()
    [completion] = decode.results(legs.here)
    assert completion.samples == 2 * texts(reference, prompt(300, seed=22))
    assert early_loads(decode) == begun
