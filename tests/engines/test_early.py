"""Decode reads the pages of finished chunks while prefill computes the next ones.

Moments and aborts are varied in ``tests/vllm/geometry/test_early.py``, without a model.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import families, probes
from tests.engines.early import SENTINEL, Legs, early_loads, hand_over_early
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.fleet import fleet
from tests.engines.ranks import at_rest, come_to
from tests.engines.steps import SAMPLES, eventually, pulled, texts

pytestmark = pytest.mark.timeout(300)

LENGTHS = (1, 2, 31, 64, 65, 130, 255, 256, 257, 600, 1000)
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
    one_by_one = [hand_over_early(chunked, decode, each, max_tokens=8)[0] for each in prompts]
    assert one_by_one == wanted
    assert hand_over_early(chunked, decode, *prompts, max_tokens=8) == wanted
    assert decode.run(probes.metrics)[TOKENS] - before == 2 * sum(LENGTHS)
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


def test_cached_prefixes_and_steps_ahead(reference: Engine, start_engine: StartEngine) -> None:
    """Decode pulls what it has not cached, of what prefill has cached, too."""
    options: dict[str, Any] = {"enable_prefix_caching": True, "async_scheduling": True}
    options |= {"max_num_batched_tokens": 96}
    engines = (
        start_engine("ahead-prefill", "kv_producer", **options),
        start_engine("ahead-decode", "kv_consumer", **options),
    )
    common = prompt(200, seed=24)
    prompts = [[*common, *prompt(length, seed=25)] for length in (1, 60, 500, 780)]
    assert hand_over_early(*engines, common) == texts(reference, common)
    for each in prompts:
        before = pulled(engines[1].run(probes.metrics))
        assert hand_over_early(*engines, each) == texts(reference, each)
        assert pulled(engines[1].run(probes.metrics)) - before == len(each) - 192
    free = engines[0].run(probes.free_blocks)
    assert hand_over_early(*engines, common[:192]) == texts(reference, common[:192])
    eventually(lambda: engines[0].run(probes.free_blocks) == free)
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("split", ["prefill", "decode"])
def test_tensor_parallel(
    reference: Engine, chunked: Engine, decode: Engine, start_engine: StartEngine, split: str
) -> None:
    role = "kv_producer" if split == "prefill" else "kv_consumer"
    engine = start_engine(f"early-tp2-{split}", role, tensor_parallel_size=2, **CHUNK)
    there, here = (engine, decode) if split == "prefill" else (chunked, engine)
    rest, begun = at_rest(there, here), early_loads(here)
    with there.paused():
        legs = Legs(there, here, prompt(300, seed=28))
        legs.begin_prefill()
        legs.begin_decode()
        there.step(3)
        legs.wait_begun()
    assert legs.texts() == texts(reference, prompt(300, seed=28))
    assert early_loads(here) == begun + 1
    prompts = [prompt(length, seed=29) for length in LENGTHS[::3]]
    assert hand_over_early(there, here, *prompts) == texts(reference, *prompts)
    come_to(rest, there, here)
    engine.close()


def test_drafters_on_both_sides(
    reference: Engine, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Their layers have caches, too, which drafts write behind a chunk."""
    model, drafting = families.drafting(checkpoints, "eagle", tokens=2)
    with fleet(model, tmp_path_factory.mktemp("eagle"), **drafting) as engines:
        there = engines.launch("prefill", "kv_producer", **CHUNK)
        here = engines.launch("decode", "kv_consumer")
        engines.wait_started()
        rest = at_rest(there, here)
        legs = Legs(there, here, prompt(600, seed=32))
        with there.paused():
            legs.begin_prefill()
            legs.begin_decode()
            there.step(3)
            legs.wait_begun()
        assert legs.texts() == texts(reference, prompt(600, seed=32))
        assert early_loads(here) == 1
        come_to(rest, there, here)
