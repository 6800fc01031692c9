"""Engines that draft, on one side or both, and hand over their drafter's cache where both have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import contents, probes
from tests.engines.engines import Engine
from tests.engines.fleet import fleet
from tests.engines.steps import eventually, hand_over, idle_blocks, pulled, texts
from tests.engines.test_states_live import N_GRAM

pytestmark = pytest.mark.timeout(300)

LENGTHS = (1, 2, 5, 31, 32, 33, 97, 200, 300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafters:
    """Engines of one model.

    Attributes:
        ordinary: what the others must agree with.
        plain: prefills, and decodes, without drafts.
        n_gram: decodes, and drafts from the prompt.
        prefill, decode: draft with layers that have a cache.
    """

    ordinary: Engine
    plain: Engine
    n_gram: Engine
    prefill: Engine
    decode: Engine


@pytest.fixture(scope="module", params=["eagle", "mtp"])
def drafters(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Drafters]:
    """A model and another one that drafts for it, or one that drafts by itself."""
    speculation: dict[str, Any] = {"method": request.param, "num_speculative_tokens": 1}
    if request.param == "eagle":
        speculation |= {"model": str(checkpoints["drafter"]), "max_model_len": 1024}
    model = checkpoints["llama" if request.param == "eagle" else "predictor"]
    drafting: dict[str, Any] = {"speculative_config": speculation}
    with fleet(model, tmp_path_factory.mktemp(request.param)) as engines:
        started = Drafters(
            ordinary=engines.launch("ordinary"),
            plain=engines.launch("plain", "kv_both"),
            n_gram=engines.launch("n-gram", "kv_consumer", **N_GRAM),
            prefill=engines.launch("drafting-prefill", "kv_producer", **drafting),
            decode=engines.launch("drafting-decode", "kv_consumer", block_size=64, **drafting),
        )
        engines.wait_started()
        yield started


@pytest.mark.parametrize(
    ("source", "target"),
    [("plain", "n_gram"), ("plain", "decode"), ("prefill", "decode"), ("prefill", "plain")],
)
def test_texts(drafters: Drafters, source: str, target: str) -> None:
    """Whoever drafts, the text is that of an engine that does not."""
    engines = prefill, decode = getattr(drafters, source), getattr(drafters, target)
    free = [idle_blocks(engine) for engine in engines]
    prompts = [*(prompt(length, seed=40) for length in LENGTHS), prompt(7, seed=41) * 30]
    got, counters = hand_over(prefill, decode, *prompts)
    assert got == texts(drafters.ordinary, *prompts)
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
