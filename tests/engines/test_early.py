"""Decode reads the pages of finished chunks while prefill computes the next ones.

What varies cheaply is tested in ``geometry/test_early.py``, under vLLM's scheduler without a model.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import build, prompt
from tests.engines import probes
from tests.engines.early import (
    SENTINEL,
    Legs,
    early_loads,
    hand_over_early,
    preempt,
)
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.fleet import fleet
from tests.engines.ranks import at_rest, come_to
from tests.engines.steps import SAMPLES, eventually, pulled, texts

pytestmark = pytest.mark.timeout(300)

LONGEST = 4096
LONG: dict[str, Any] = {"max_model_len": LONGEST}
LENGTHS = (1, 2, 31, 64, 65, 130, 255, 256, 257, 600, 1025, 2047, 3840)
CHUNKS = (64, 512)
"""The sequential way is what a prompt of one chunk takes."""
TOKENS = "vllm:kvferry_tokens"
PATIENT = {"kv_lease_duration": 600.0}
"""Options of a prefill engine whose leases outlast any test."""


@pytest.fixture(scope="module")
def model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama for prompts of up to 4,096 tokens."""
    folder = tmp_path_factory.mktemp("long_llama")
    context = multiprocessing.get_context("forkserver")
    builder = context.Process(target=_build, args=(folder,))
    builder.start()
    builder.join()
    assert builder.exitcode == 0
    return folder


def _build(folder: Path) -> None:
    build(folder, max_tokens=LONGEST)


@pytest.fixture(scope="module")
def ordinary(start_engine: StartEngine, model: Path) -> Engine:
    """An ordinary engine: what the others must agree with."""
    return start_engine("ordinary", model=model, **LONG)


@pytest.fixture(scope="module")
def decode(start_engine: StartEngine, model: Path) -> Engine:
    return start_engine(
        "early-decode", "kv_consumer", model=model, extra={"log_requests": True}, **LONG
    )


@pytest.fixture(scope="module")
def prefill(start_engine: StartEngine, model: Path) -> Engine:
    """Computes chunks of 64 tokens."""
    options = LONG | {"max_num_batched_tokens": 64}
    return start_engine("early-prefill", "kv_producer", model=model, extra=PATIENT, **options)


@pytest.fixture(scope="module", params=CHUNKS)
def chunked(
    request: pytest.FixtureRequest, start_engine: StartEngine, model: Path, prefill: Engine
) -> Iterator[Engine]:
    """Prefills in chunks of so many tokens."""
    if request.param == prefill_chunk(prefill):
        yield prefill
        return
    options = LONG | {"max_num_batched_tokens": request.param}
    engine = start_engine(f"early-{request.param}", "kv_producer", model=model, **options)
    yield engine
    engine.close()


def prefill_chunk(engine: Engine) -> int:
    """How many tokens an engine computes in a step."""
    size: int = engine.run(_chunk)
    return size


def _chunk(engine: Any) -> int:
    size: int = engine.vllm_config.scheduler_config.max_num_batched_tokens
    return size


def new_prompts(seed: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [prompt(length, seed=seed) for length in lengths]


def test_prompts_of_all_lengths(ordinary: Engine, chunked: Engine, decode: Engine) -> None:
    rest = at_rest(chunked, decode)
    before, begun = decode.run(probes.metrics)[TOKENS], early_loads(decode)
    prompts = new_prompts(prefill_chunk(chunked))
    wanted = texts(ordinary, *prompts, max_tokens=8)
    one_by_one = [hand_over_early(chunked, decode, each, max_tokens=8)[0] for each in prompts]
    assert one_by_one == wanted
    assert hand_over_early(chunked, decode, *prompts, max_tokens=8) == wanted
    assert decode.run(probes.metrics)[TOKENS] - before == 2 * sum(LENGTHS)
    assert early_loads(decode) > begun
    come_to(rest, chunked, decode)


def test_pages_cross_while_prefill_computes(
    ordinary: Engine, prefill: Engine, decode: Engine
) -> None:
    """One log line says how much, and the metrics."""
    rest, begun = at_rest(prefill, decode), early_loads(decode)
    legs = Legs(prefill, decode, prompt(300, seed=1))
    decode.run(probes.fill_caches, SENTINEL)
    with prefill.paused():
        legs.begin_decode()
        legs.begin_prefill()
        for chunk in range(1, 5):
            prefill.step()
            if chunk > 1:
                legs.wait_read(64 * (chunk - 1))
    assert legs.texts() == texts(ordinary, prompt(300, seed=1))
    assert early_loads(decode) == begun + 1
    assert re.search(r"loaded 300 tokens, [0-9.]+ MiB \([0-9.]*[1-9][0-9.]* early\)", decode.log())
    come_to(rest, prefill, decode)


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 5])
def test_decode_that_comes_later(
    ordinary: Engine, prefill: Engine, decode: Engine, steps: int
) -> None:
    rest = at_rest(prefill, decode)
    legs = Legs(prefill, decode, prompt(300, seed=steps + 2))
    with prefill.paused():
        legs.begin_prefill()
        prefill.step(steps)
        legs.begin_decode()
        if 1 < steps < 5:
            legs.wait_begun()
    assert legs.texts() == texts(ordinary, prompt(300, seed=steps + 2))
    come_to(rest, prefill, decode)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_aborts_at_each_chunk(ordinary: Engine, prefill: Engine, decode: Engine, side: str) -> None:
    """Everything is given back, on prefill long before a lease is over."""
    rest = at_rest(prefill, decode)
    for steps in range(6):
        legs = Legs(prefill, decode, prompt(300, seed=10 + steps))
        with prefill.paused():
            legs.begin_prefill()
            legs.begin_decode()
            prefill.step(steps)
            if 1 < steps < 5:
                legs.wait_begun()
            elif steps < 5:
                eventually(lambda: decode.run(probes.statuses) == ["WAITING"])
            if side == "decode":
                decode.abort(legs.here[0])
            else:
                prefill.abort(legs.there[0])
        if side == "prefill" and steps < 5:
            [completion] = decode.results(legs.here)
            assert completion.finish_reason == "error"
        come_to(rest, prefill, decode)
    assert hand_over_early(prefill, decode, prompt(300, seed=20)) == texts(
        ordinary, prompt(300, seed=20)
    )
    come_to(rest, prefill, decode)


def test_poisoned_caches(ordinary: Engine, prefill: Engine, decode: Engine) -> None:
    """Decoding stays inside the loaded pages: see ``test_hand_over.test_poisoned_cache``."""
    rest = at_rest(prefill, decode)
    for length in (127, 250, 479):
        tokens = -length % 32 + 1
        decode.run(probes.fill_caches, float("nan"))
        got = hand_over_early(prefill, decode, prompt(length, seed=21), max_tokens=tokens)
        decode.run(probes.fill_caches, 0.0)
        assert got == texts(ordinary, prompt(length, seed=21), max_tokens=tokens)
    come_to(rest, prefill, decode)


def test_samples_wait_for_the_ticket(ordinary: Engine, prefill: Engine, decode: Engine) -> None:
    rest, begun = at_rest(prefill, decode), early_loads(decode)
    legs = Legs(prefill, decode, prompt(300, seed=22), **SAMPLES)
    legs.begin_prefill()
    legs.begin_decode()
    [completion] = decode.results(legs.here)
    assert completion.samples == 2 * texts(ordinary, prompt(300, seed=22))
    assert early_loads(decode) == begun
    come_to(rest, prefill, decode)


def test_preempted_in_mid_stream(ordinary: Engine, prefill: Engine, decode: Engine) -> None:
    """What prefill computes again is read again."""
    rest, begun = at_rest(prefill, decode), early_loads(decode)
    for steps in range(1, 5):
        legs = Legs(prefill, decode, prompt(300, seed=30 + steps))
        with prefill.paused():
            legs.begin_prefill()
            legs.begin_decode()
            prefill.step(steps)
            if steps > 1:
                legs.wait_begun()
            prefill.run(preempt)
        assert legs.texts() == texts(ordinary, prompt(300, seed=30 + steps))
    assert early_loads(decode) == begun + 4
    come_to(rest, prefill, decode)


def test_cached_prefixes_and_steps_ahead(
    ordinary: Engine, model: Path, start_engine: StartEngine
) -> None:
    """Decode pulls what it has not cached, of what prefill has cached, too."""
    options = LONG | {"enable_prefix_caching": True, "async_scheduling": True}
    options |= {"max_num_batched_tokens": 96}
    engines = (
        start_engine("ahead-prefill", "kv_producer", model=model, **options),
        start_engine("ahead-decode", "kv_consumer", model=model, **options),
    )
    common = prompt(200, seed=24)
    prompts = [[*common, *prompt(length, seed=25)] for length in (1, 60, 500, 900)]
    assert hand_over_early(*engines, common) == texts(ordinary, common)
    for each in prompts:
        before = pulled(engines[1].run(probes.metrics))
        assert hand_over_early(*engines, each) == texts(ordinary, each)
        assert pulled(engines[1].run(probes.metrics)) - before == len(each) - 192
    free = engines[0].run(probes.free_blocks)
    assert hand_over_early(*engines, common[:192]) == texts(ordinary, common[:192])
    eventually(lambda: engines[0].run(probes.free_blocks) == free)
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("split", ["prefill", "decode"])
def test_tensor_parallel(
    ordinary: Engine,
    prefill: Engine,
    decode: Engine,
    model: Path,
    start_engine: StartEngine,
    split: str,
) -> None:
    options = LONG | {"max_num_batched_tokens": 64, "tensor_parallel_size": 2}
    role = "kv_producer" if split == "prefill" else "kv_consumer"
    engine = start_engine(f"early-tp2-{split}", role, model=model, **options)
    there, here = (engine, decode) if split == "prefill" else (prefill, engine)
    rest, begun = at_rest(there, here), early_loads(here)
    with there.paused():
        legs = Legs(there, here, prompt(300, seed=28))
        legs.begin_prefill()
        legs.begin_decode()
        there.step(3)
        legs.wait_begun()
    assert legs.texts() == texts(ordinary, prompt(300, seed=28))
    assert early_loads(here) == begun + 1
    prompts = new_prompts(29, LENGTHS[::3])
    assert hand_over_early(there, here, *prompts) == texts(ordinary, *prompts)
    come_to(rest, there, here)
    engine.close()


@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_drafters_on_both_sides(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, method: str
) -> None:
    """Their layers have caches, too, which drafts write behind a chunk."""
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    if method == "eagle":
        speculation |= {"model": str(checkpoints["drafter"]), "max_model_len": 1024}
    model = checkpoints["llama" if method == "eagle" else "predictor"]
    drafting: dict[str, Any] = {"speculative_config": speculation}
    with fleet(model, tmp_path_factory.mktemp(method)) as engines:
        plain = engines.launch("ordinary")
        chunks = drafting | {"max_num_batched_tokens": 64}
        there = engines.launch("prefill", "kv_producer", **chunks)
        here = engines.launch("decode", "kv_consumer", **drafting)
        engines.wait_started()
        rest = at_rest(there, here)
        legs = Legs(there, here, prompt(600, seed=32))
        with there.paused():
            legs.begin_prefill()
            legs.begin_decode()
            there.step(3)
            legs.wait_begun()
        assert legs.texts() == texts(plain, prompt(600, seed=32))
        assert early_loads(here) == 1
        come_to(rest, there, here)
