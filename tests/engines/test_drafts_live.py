"""Engines that draft, on one side or both, and hand over their drafter's cache where both have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import contents, families
from tests.engines.conversations import Conversation, stop_token, words
from tests.engines.early import Legs, early_loads
from tests.engines.fleet import TALKS, Engines, fleet
from tests.engines.steps import check_hand_over, texts

pytestmark = pytest.mark.timeout(300)

LENGTHS = (1, 2, 31, 32, 33, 97, 200)
TOKENS = {"eagle": 2, "mtp": 1}
"""How many tokens each method drafts."""
PAIRS = [("plain", "two"), ("one", "two"), ("one", "plain")]


@pytest.fixture(scope="module", params=TOKENS)
def engines(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engines]:
    """A model and another one that drafts for it, or one that drafts by itself.

    ``plain`` does not draft: without a ticket, it is what the others must agree with. ``one``
    computes prompts in chunks, and ``two`` has other blocks.
    """
    method: str = request.param
    model, drafting = families.drafting(checkpoints, method, TOKENS[method])
    with fleet(model, tmp_path_factory.mktemp(method)) as launched:
        found = {
            "plain": launched.launch("plain", **TALKS),
            "one": launched.launch("one", **TALKS, **drafting, max_num_batched_tokens=64),
            "two": launched.launch("two", **TALKS, **drafting, block_size=64),
        }
        launched.wait_started()
        yield found


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_texts(engines: Engines, prefill: str, decode: str) -> None:
    """Whoever drafts, the text is that of an engine that does not."""
    prompts = [*(prompt(length, seed=40) for length in LENGTHS), prompt(7, seed=41) * 30]
    check_hand_over(engines["plain"], engines[prefill], engines[decode], *prompts)


def test_the_cache_of_a_drafter_crosses(engines: Engines) -> None:
    """Texts cannot tell: a drafter that sees nothing drafts badly, and no worse happens."""
    prompts = [prompt(length, seed=42) for length in (5, 33, 200)]
    contents.check_crossing(engines["one"], engines["two"], *prompts)
    talk = Conversation(prefill=engines["one"], decode=engines["two"])
    talk.say(words(50), max_tokens=60)
    assert talk.ticket is not None
    asked = [*talk.tokens, *words(20)]
    there, here = contents.of_both(engines["two"], engines["one"], asked, talk.ticket)
    assert len(there[0]) == 2 * 5
    assert contents.unequal(there, here) == []


def test_early(engines: Engines) -> None:
    """Drafts write into the drafter's cache behind a chunk, too."""
    there, here, given = engines["one"], engines["two"], prompt(600, seed=32)
    begun, legs = early_loads(here), Legs(there, here, given)
    legs.begin(3)
    assert legs.texts() == texts(engines["plain"], given)
    assert early_loads(here) == begun + 1


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_turns(engines: Engines, prefill: str, decode: str) -> None:
    """Drafts that were accepted behind the last token are not in the ticket.

    A step may compute an accepted draft behind a stop token or the last token that was asked for;
    then the last token that counts is computed, too.
    """
    talk, plain = Conversation(prefill=engines[prefill], decode=engines[decode]), engines["plain"]
    for number, (spoken, answered) in enumerate(((40, 70), (5, 2), (60, 33), (20, 30))):
        known, covered, said = len(talk.tokens), talk.covered, words(spoken)
        options: dict[str, Any] = {"max_tokens": answered}
        if number % 2:
            options["stop_token_ids"] = [stop_token(plain, [*talk.tokens, *said], answered // 2)]
        talk.check_turn(plain, said, known + spoken - covered, covered, **options)
        assert known - 1 <= covered <= known if known else not covered
