"""Decode preempts a request that it has loaded: it is not loaded again, and its text is right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.geometry.engine_of_ranks import Shape
from tests.vllm.geometry.scheduled import PREFILL, Text, serving, wait
from tests.vllm.geometry.test_hand_over import HOST_PAGES, STAGED

LOADED, MOST = 90, 40
"""How many tokens are loaded, and how many follow the prompt."""


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("kind", "staged", "length", "tokens", "evicted"),
    [
        ("full", False, 300, 0, False),
        ("latent", True, 300, 0, True),
        ("full", True, LOADED, 5, True),
        ("hybrid", False, LOADED, 5, True),
        ("hybrid", True, LOADED, 5, False),
        ("states", False, LOADED, 5, False),
    ],
)
def test_preempted_after_a_load(
    kind: str, staged: bool, length: int, tokens: int, evicted: bool, ahead: bool
) -> None:
    """After so many tokens. Before its first one, decode computes the rest of a longer prompt.

    Unless its pages are ``evicted`` from decode's prefix cache, some are found there.
    """
    shape = Shape(host_pages=HOST_PAGES if staged else 0)
    with (
        serving("prefill", STAGED[kind], shape) as prefill,
        serving("decode", STAGED[kind], shape, ahead=ahead) as decode,
    ):
        pool, steps = decode.scheduler.kv_cache_manager.block_pool, list[Any]()

        def step() -> None:
            prefill.step()
            steps.append(decode.begin())
            if len(steps) > ahead:
                decode.finish(*steps.pop(0))

        there = prefill.add(0, LOADED, dict(PREFILL))
        wait(lambda: there in prefill.params, prefill)
        other = decode.add(1, 20, None, 200)
        name = decode.add(0, length, prefill.params[there], MOST)
        request = decode.scheduler.requests[name]
        while not decode.computed[name] or request.num_output_tokens < tokens:
            step()
        taken = pool.get_new_blocks(pool.get_num_free_blocks())
        while not request.num_preemptions:
            step()
        assert name in decode.pulled
        assert bool(request.num_output_tokens) == bool(tokens)
        before = decode.computed[name]
        if evicted:
            taken += pool.get_new_blocks(pool.get_num_free_blocks())
        pool.free_blocks(taken)
        while steps:
            decode.finish(*steps.pop(0))
        wait(lambda: {other, name} <= decode.params.keys(), decode)

        assert list(request.all_token_ids) == [Text(0).token(i) for i in range(length + MOST)]
        again, whole = decode.computed[name] - before, length + MOST - 1
        assert again <= whole
        if kind == "full":
            assert (again == whole) == evicted
        decode.run_dry()
        prefill.run_dry()
