"""Engines that draft, on one side or both, and hand over their drafter's cache where both have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.integrations.vllm import contents, probes
from tests.integrations.vllm.engines import Engine
from tests.integrations.vllm.fleet import fleet
from tests.integrations.vllm.steps import eventually, hand_over, pulled, texts
from tests.integrations.vllm.test_states_live import N_GRAM

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

LENGTHS = (1, 2, 5, 31, 32, 33, 97, 200, 300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafters:
    """Engines of one Llama.

    Attributes:
        plain: prefills, and decodes, without drafts.
        n_gram: decodes, and drafts from the prompt.
        prefill, decode: draft with a model that has a cache.
    """

    plain: Engine
    n_gram: Engine
    prefill: Engine
    decode: Engine


@pytest.fixture(scope="module")
def drafters(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drafters]:
    eagle: dict[str, Any] = {
        "speculative_config": {
            "method": "eagle",
            "model": str(checkpoints["drafter"]),
            "num_speculative_tokens": 2,
            "max_model_len": 1024,
        }
    }
    with fleet(checkpoints["llama"], tmp_path_factory.mktemp("drafters")) as engines:
        started = Drafters(
            plain=engines.launch("plain", "kv_both"),
            n_gram=engines.launch("n-gram", "kv_consumer", **N_GRAM),
            prefill=engines.launch("drafting-prefill", "kv_producer", **eagle),
            decode=engines.launch("drafting-decode", "kv_consumer", block_size=64, **eagle),
        )
        engines.wait_started()
        yield started


@pytest.mark.parametrize(
    ("source", "target"),
    [("plain", "n_gram"), ("plain", "decode"), ("prefill", "decode"), ("prefill", "plain")],
)
def test_texts(reference: Engine, drafters: Drafters, source: str, target: str) -> None:
    """Whoever drafts, the text is that of an engine that does not."""
    engines = prefill, decode = getattr(drafters, source), getattr(drafters, target)
    free = [engine.run(probes.free_blocks) for engine in engines]
    prompts = [*(prompt(length, seed=40) for length in LENGTHS), prompt(7, seed=41) * 30]
    got, counters = hand_over(prefill, decode, *prompts)
    assert got == texts(reference, *prompts)
    assert pulled(counters) == sum(map(len, prompts)) - 1
    eventually(lambda: [engine.run(probes.free_blocks) for engine in engines] == free)


def test_the_cache_of_a_drafter_crosses(drafters: Drafters) -> None:
    """Texts cannot tell: a drafter that sees nothing drafts badly, and no worse happens."""
    for length in (5, 33, 64, 200):
        tokens = prompt(length, seed=42)
        [ticket] = drafters.prefill.prefill(tokens)
        assert not ticket["kvferry"]["computed"]
        there, here = contents.of_both(drafters.prefill, drafters.decode, tokens, ticket)
        assert len(there[0]) == 2 * 5
        assert contents.unequal(there, here) == []
