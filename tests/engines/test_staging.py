"""Llamas that hand pages over by way of host memory: the same text, and all given back.

``geometry/test_staged.py`` has the other kinds of cache, without a model.
"""

from __future__ import annotations

from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import contents, killing, probes
from tests.engines.engines import PREFILL, Engine
from tests.engines.fixtures import StartEngine
from tests.engines.ranks import at_rest, come_to
from tests.engines.steps import (
    SAMPLES,
    eventually,
    hand_over,
    idle_blocks,
    pulled,
    pulled_by,
    texts,
)

pytestmark = pytest.mark.timeout(300)

STAGED = {"staging": True}
PAGE_BYTES = 32 * 4 * 2 * 2 * 32 * 4
"""Of a block of 32 tokens of the Llama: layers, K and V, heads, elements, float32."""

TO_DEVICE = 'copy_seconds_count{direction="to_device",driver="loopback"}'


TP2 = {"tensor_parallel_size": 2}
BUSY = {"enable_prefix_caching": True, "max_num_batched_tokens": 96}
AHEAD = BUSY | {"async_scheduling": True}


@pytest.fixture(scope="module")
def staging_prefill(start_engine: StartEngine) -> Engine:
    return start_engine("staging-prefill", "kv_producer", extra=STAGED)


@pytest.fixture(scope="module")
def staging_decode(start_engine: StartEngine) -> Engine:
    return start_engine("staging-decode", "kv_consumer", extra=STAGED)


def given_back(*engines: Engine) -> None:
    """No host page is in use any more."""
    for engine in engines:
        eventually(lambda engine=engine: engine.run(probes.host_pages) == (0, 0))  # type: ignore[misc]


def test_parallel_chunked_cached_and_ahead(reference: Engine, start_engine: StartEngine) -> None:
    """Both ways."""
    prefill = start_engine("there", "kv_both", extra=STAGED, **AHEAD)
    decode = start_engine("here", "kv_both", extra=STAGED, **BUSY, **TP2)
    for seed, source, target in ((70, prefill, decode), (80, decode, prefill)):
        rest = at_rest(source, target)
        prompts = [prompt(length, seed) for length in (2, 31, 65, 200, 511)]
        got, counters = hand_over(source, target, *prompts)
        assert got == texts(reference, *prompts)
        assert pulled(counters) == sum(map(len, prompts))
        again = [[*prompt(511, seed)[:200], *prompt(150, seed)], prompt(300, seed)]
        assert hand_over(source, target, *again)[0] == texts(reference, *again)
        come_to(rest, source, target)
        given_back(source, target)
    prefill.close()
    decode.close()


def test_blocks_are_free_when_they_are_copied(
    reference: Engine, staging_prefill: Engine, staging_decode: Engine
) -> None:
    """Long before anybody has read the host pages; and other prompts may use the blocks."""
    free = idle_blocks(staging_prefill)
    prompts = [prompt(length, seed=53) for length in (100, 300)]
    tickets = staging_prefill.prefill(*prompts)
    eventually(lambda: staging_prefill.run(probes.free_blocks) == free)
    assert staging_prefill.run(probes.statuses) == []
    assert staging_prefill.run(probes.host_pages)[0] == 4 + 10
    staging_prefill.run(contents.fill, float("nan"))
    completions = staging_decode.generate(*prompts, params=tickets)
    staging_prefill.run(contents.fill, 0.0)
    assert [each.text for each in completions] == texts(reference, *prompts)
    given_back(staging_prefill, staging_decode)


def test_aborts(reference: Engine, staging_prefill: Engine, staging_decode: Engine) -> None:
    """Before and while prefill computes, and before and while decode loads."""
    free = idle_blocks(staging_prefill), idle_blocks(staging_decode)
    with staging_prefill.paused():
        [unstarted] = staging_prefill.submit(prompt(300), params=PREFILL, max_tokens=1)
        staging_prefill.abort(unstarted)
        [begun] = staging_prefill.submit(prompt(301), params=PREFILL, max_tokens=2)
        staging_prefill.step()
        staging_prefill.abort(begun)
    tickets = staging_prefill.prefill(prompt(302), prompt(303))
    with staging_decode.paused():
        requests = staging_decode.submit(prompt(302), prompt(303), params=tickets)
        staging_decode.abort(requests[0])
        staging_decode.step()
        staging_decode.abort(requests[1])
    eventually(lambda: staging_decode.run(probes.statuses) == [])
    given_back(staging_prefill, staging_decode)
    assert (idle_blocks(staging_prefill), idle_blocks(staging_decode)) == free
    one = prompt(300, seed=55)
    assert hand_over(staging_prefill, staging_decode, one)[0] == texts(reference, one)


def test_several_use_one_ticket(
    reference: Engine, staging_prefill: Engine, staging_decode: Engine
) -> None:
    """Each has host pages of its own, samples of one prompt too."""
    before, one = pulled_by(staging_decode), prompt(130, seed=56)
    [ticket] = staging_prefill.prefill(one)
    with staging_decode.paused():
        requests = staging_decode.submit(one, one, one, params=ticket)
    found = [each.text for each in staging_decode.results(requests)]
    assert found == texts(reference, one) * 3
    assert pulled_by(staging_decode) - before == 130 * 3
    [completion] = staging_decode.generate(one, params=staging_prefill.prefill(one), **SAMPLES)
    assert completion.samples == texts(reference, one) * 2
    given_back(staging_prefill, staging_decode)


def test_a_reset_ends_host_holds(staging_prefill: Engine, staging_decode: Engine) -> None:
    [ticket] = staging_prefill.prefill(prompt(90))
    eventually(lambda: bool(staging_prefill.run(probes.reset_prefix_cache)))
    given_back(staging_prefill)
    [completion] = staging_decode.generate(prompt(90), params=ticket)
    assert completion.finish_reason == "error"
    given_back(staging_decode)


def small(pages: int, **extra: Any) -> dict[str, Any]:
    """Settings for so many host pages, the hole not included."""
    return STAGED | {"staging_bytes": (1 + pages) * PAGE_BYTES, **extra}


def test_a_full_pool_makes_requests_wait(reference: Engine, start_engine: StartEngine) -> None:
    """On both sides there is room for one or two prompts at a time, and all are handed over."""
    prefill = start_engine("narrow", "kv_producer", extra=small(24, staging_timeout=60.0))
    decode = start_engine("narrow", "kv_consumer", extra=small(24, staging_timeout=60.0))
    prompts = [prompt(300 + length, seed=57) for length in range(4)]
    ids = prefill.submit(*prompts, params=PREFILL, max_tokens=1)
    got: list[str] = []
    waiting = dict(zip(ids, prompts, strict=True))
    while waiting:
        eventually(lambda: prefill.run(probes.free_blocks) and bool(prefill.finished))
        for one in prefill.finished:
            [completion] = prefill.results([one])
            [answer] = decode.generate(waiting.pop(one), params=completion.params)
            got.append(answer.text)
    assert sorted(got) == sorted(texts(reference, *prompts))
    tickets = [prefill.prefill(each) for each in prompts[:2]]
    requests = decode.submit(*prompts[:2], params=[ticket for [ticket] in tickets])
    assert [each.text for each in decode.results(requests)] == texts(reference, *prompts[:2])
    given_back(prefill, decode)
    for engine in (prefill, decode):
        engine.close()


def test_metrics(staging_prefill: Engine, staging_decode: Engine) -> None:
    hand_over(staging_prefill, staging_decode, prompt(100, seed=60))
    there, here = (engine.run(probes.exposed) for engine in (staging_prefill, staging_decode))
    for found, direction, use in ((there, "to_host", "holds"), (here, "to_device", "loads")):
        label = f'driver="loopback",use="{use}"'
        assert found[f'copy_seconds_count{{direction="{direction}",driver="loopback"}}']
        assert found[f"host_pages{{{label}}}"] > 100
        assert f"host_pages_used{{{label}}}" in found
        granted = f'driver="loopback",outcome="granted",use="{use}"'
        assert found[f"host_page_wait_seconds_count{{{granted}}}"]


def test_prefill_that_is_killed_while_it_is_read(
    reference: Engine, start_engine: StartEngine, staging_prefill: Engine, staging_decode: Engine
) -> None:
    """Nothing that was read reaches the device, and decode's host pages return."""
    mortal = start_engine("mortal-prefill", "kv_producer", extra=STAGED)
    lost, kept = prompt(300, seed=61), prompt(200, seed=61)
    [ticket] = mortal.prefill(lost)
    copies = staging_decode.run(probes.exposed).get(TO_DEVICE, 0)
    staging_decode.run(killing.kill_in_the_middle, mortal.run(killing.victim))
    [completion] = staging_decode.generate(lost, params=ticket)
    mortal.kill()
    assert completion.finish_reason == "error"
    assert staging_decode.run(probes.exposed).get(TO_DEVICE, 0) == copies
    given_back(staging_decode)
    assert hand_over(staging_prefill, staging_decode, kept)[0] == texts(reference, kept)
    assert staging_decode.run(probes.exposed)[TO_DEVICE] == copies + 1
    given_back(staging_prefill, staging_decode)
