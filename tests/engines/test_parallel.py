"""Engines that split their model differently hand over to each other, both ways.

``tests/vllm/geometry`` has more pairs, without a model.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import build, prompt
from tests.engines.engines import run_apart
from tests.engines.fleet import DOES_BOTH, fleet
from tests.engines.steps import check_hand_over

pytestmark = pytest.mark.timeout(900)

VOCABULARY = 384
"""What 2, 3 and 4 ranks can share, and vLLM pads no further."""
ONE_HEAD = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_attention_heads": 12,
    "num_key_value_heads": 1,
}
CHUNKED = {"enable_prefix_caching": True, "max_num_batched_tokens": 96}
TP2, PP2 = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
# Schedules a step before its ranks have reported the last one. A pipeline does so by itself, and
# vLLM's CPU build does not have the two together.
AHEAD = TP2 | CHUNKED | {"async_scheduling": True}

_seeds = itertools.count(100)


def prompts() -> list[list[int]]:
    """New ones: what an earlier pair left in a page must not help."""
    seed = next(_seeds)
    return [[token % VOCABULARY for token in prompt(length, seed)] for length in (5, 65, 200)]


@pytest.mark.parametrize(
    ("shape", "hub", "others"),
    [
        ({}, {}, [AHEAD, PP2 | CHUNKED]),
        pytest.param(
            {},
            {"pipeline_parallel_size": 3},
            [{"tensor_parallel_size": 4}, TP2 | PP2],
            marks=pytest.mark.slow,
        ),
        pytest.param(ONE_HEAD, {"tensor_parallel_size": 3}, [{}, TP2], marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("checkpoint")
def test_pairs(
    tmp_path: Path, shape: dict[str, int], hub: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    """Equal texts, all of them pulled."""
    model = tmp_path / "model"
    run_apart(build, model, vocab_size=VOCABULARY, **shape)
    with fleet(model, tmp_path) as engines:
        ordinary, one = engines.launch("ordinary"), engines.launch("hub", **DOES_BOTH, **hub)
        for options in others:
            other = engines.launch("other", **DOES_BOTH, **options)
            engines.wait_started()
            for source, target in ((one, other), (other, one)):
                check_hand_over(ordinary, source, target, *prompts())
            other.close()
