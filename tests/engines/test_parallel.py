"""Engines that split their model differently hand over to each other, both ways."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import build, prompt
from tests.engines.engines import Engine, run_apart
from tests.engines.fleet import DOES_BOTH, fleet
from tests.engines.steps import check_hand_over

pytestmark = pytest.mark.timeout(900)

VOCABULARY = 384
"""What 2, 3 and 4 ranks can share, and vLLM pads no further."""

CHECKPOINTS: dict[str, dict[str, int]] = {
    "2 KV heads": {},
    "1 KV head": {
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_attention_heads": 12,
        "num_key_value_heads": 1,
    },
}

TP2 = {"tensor_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2}
CHUNKED = {"enable_prefix_caching": True, "max_num_batched_tokens": 96}
AHEAD = CHUNKED | {"async_scheduling": True}
"""Schedules a step before its ranks have reported the last one. A pipeline does so by itself, and
vLLM's CPU build does not have the two together."""

ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tp2": TP2,
    "tp3": {"tensor_parallel_size": 3},
    "tp4": {"tensor_parallel_size": 4},
    "pp2": PP2,
    "pp3": {"pipeline_parallel_size": 3},
    "tp2-pp2": TP2 | PP2,
    "tp2-block64": TP2 | {"block_size": 64, "num_gpu_blocks_override": 256},
    "block96": {"block_size": 96, "num_gpu_blocks_override": 180},
    "tp2-ahead": TP2 | AHEAD,
    "pp2-chunked": PP2 | CHUNKED,
}

HUBS = [
    ("2 KV heads", "plain", ["tp2-ahead", "pp2-chunked"]),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (
            ("2 KV heads", "pp2", ["pp3", "tp2-pp2", "tp4"]),
            ("2 KV heads", "tp2-block64", ["block96", "tp2"]),
            ("1 KV head", "tp3", ["plain", "tp2"]),
        )
    ),
]
"""A checkpoint, an engine, and those that it exchanges prompts with in both directions."""

_seeds = itertools.count(100)


def prompts() -> list[list[int]]:
    """New ones: what an earlier pair left in a page must not help."""
    seed = next(_seeds)
    return [[token % VOCABULARY for token in prompt(length, seed)] for length in (5, 65, 200)]


@pytest.mark.parametrize(("shape", "hub", "others"), HUBS, ids=str)
@pytest.mark.usefixtures("checkpoint")
def test_pairs(tmp_path: Path, shape: str, hub: str, others: Sequence[str]) -> None:
    """Equal texts, all of them pulled."""
    model = tmp_path / "model"
    run_apart(build, model, vocab_size=VOCABULARY, **CHECKPOINTS[shape])
    with fleet(model, tmp_path) as engines:

        def launch(name: str) -> Engine:
            return engines.launch(name, **DOES_BOTH, **ENGINES[name])

        ordinary, one = engines.launch("ordinary"), launch(hub)
        for name in others:
            other = launch(name)
            engines.wait_started()
            for source, target in ((one, other), (other, one)):
                check_hand_over(ordinary, source, target, *prompts())
            other.close()
