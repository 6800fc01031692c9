"""Engines that draft, on one side or both, and hand over their drafter's cache where both have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from tests.engines import contents, families, probes
from tests.engines.early import Legs, early_loads
from tests.engines.engines import Engine
from tests.engines.fleet import fleet
from tests.engines.ranks import come_to, left_alone
from tests.engines.steps import eventually, hand_over, idle_blocks, pulled, texts

pytestmark = pytest.mark.timeout(300)

LENGTHS = (1, 2, 31, 32, 33, 97, 200)
TOKENS = {"eagle": 2, "mtp": 1}
"""How many tokens each method drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafters:
    """Engines of one model."""

    plain: Engine  # does both, without drafts; without a ticket, what the others must agree with
    # prefill, decode: draft with layers that have a cache; the first computes prompts in chunks
    prefill: Engine
    decode: Engine


@pytest.fixture(scope="module", params=TOKENS)
def drafters(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Drafters]:
    """A model and another one that drafts for it, or one that drafts by itself."""
    method: str = request.param
    model, drafting = families.drafting(checkpoints, method, TOKENS[method])
    with fleet(model, tmp_path_factory.mktemp(method)) as engines:
        started = Drafters(
            plain=engines.launch("plain", "kv_both"),
            prefill=engines.launch(
                "drafting-prefill", "kv_producer", max_num_batched_tokens=64, **drafting
            ),
            decode=engines.launch("drafting-decode", "kv_consumer", block_size=64, **drafting),
        )
        engines.wait_started()
        yield started


@pytest.mark.parametrize(
    ("source", "target"), [("plain", "decode"), ("prefill", "decode"), ("prefill", "plain")]
)
def test_texts(drafters: Drafters, source: str, target: str) -> None:
    """Whoever drafts, the text is that of an engine that does not."""
    engines = prefill, decode = getattr(drafters, source), getattr(drafters, target)
    free = [idle_blocks(engine) for engine in engines]
    prompts = [*(prompt(length, seed=40) for length in LENGTHS), prompt(7, seed=41) * 30]
    got, counters = hand_over(prefill, decode, *prompts)
    assert got == texts(drafters.plain, *prompts)
    assert pulled(counters) == sum(map(len, prompts)) - 1
    eventually(lambda: [engine.run(probes.free_blocks) for engine in engines] == free)


def test_the_cache_of_a_drafter_crosses(drafters: Drafters) -> None:
    """Texts cannot tell: a drafter that sees nothing drafts badly, and no worse happens."""
    for length in (5, 33, 200):
        tokens = prompt(length, seed=42)
        [ticket] = drafters.prefill.prefill(tokens)
        assert not ticket["kvferry"]["computed"]
        there, here = contents.of_both(drafters.prefill, drafters.decode, tokens, ticket)
        assert len(there[0]) == 2 * 5
        assert contents.unequal(there, here) == []


def test_early(drafters: Drafters) -> None:
    """Drafts write into the drafter's cache behind a chunk, too."""
    there, here, given = drafters.prefill, drafters.decode, prompt(600, seed=32)
    rest, begun = left_alone(there, here), early_loads(here)
    legs = Legs(there, here, given)
    with there.paused():
        legs.begin_prefill()
        legs.begin_decode()
        there.step(3)
        legs.wait_begun()
    assert legs.texts() == texts(drafters.plain, given)
    assert early_loads(here) == begun + 1
    come_to(rest, there, here)
