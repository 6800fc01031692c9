"""Conversations with engines that draft: both of them, or one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engines import contents, families
from tests.engines.conversations import (
    RECOMPUTE,
    ROLE,
    TWO_WAY,
    Conversation,
    idle,
    same_answer,
    stop_token,
    words,
)
from tests.engines.engines import Engine
from tests.engines.fleet import fleet
from tests.engines.test_states_live import N_GRAM

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafters:
    """Engines of one model, each of which prefills and decodes."""

    plain: Engine  # Does not draft
    # one, two: Draft with layers that have a cache; ``two`` has blocks of 64 tokens, and schedules
    # asynchronously
    one: Engine
    two: Engine
    n_gram: Engine  # Drafts from the prompt


@pytest.fixture(scope="module", params=["eagle", "mtp"])
def drafters(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Drafters]:
    """A model and another one that drafts for it, or one that drafts by itself."""
    model, speculation = families.drafting(checkpoints, request.param)
    two_way: dict[str, Any] = {"extra": TWO_WAY, "transfer": RECOMPUTE}
    drafting = two_way | speculation
    with fleet(model, tmp_path_factory.mktemp(request.param)) as engines:
        started = Drafters(
            plain=engines.launch("plain", ROLE, **two_way),
            one=engines.launch("one", ROLE, **drafting),
            two=engines.launch("two", ROLE, block_size=64, async_scheduling=True, **drafting),
            n_gram=engines.launch("n-gram", ROLE, **two_way, **N_GRAM),
        )
        engines.wait_started()
        yield started


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("one", "two"), ("plain", "two"), ("two", "plain"), ("two", "one"), ("plain", "n_gram")],
)
def test_turns(drafters: Drafters, prefill: str, decode: str) -> None:
    """Drafts that were accepted behind the last token are not in the ticket.

    A step may compute an accepted draft behind a stop token or the last token that was asked for;
    then the last token that counts is computed, too.
    """
    engines = getattr(drafters, prefill), getattr(drafters, decode)
    free = idle(*engines)
    conversation = Conversation(prefill=engines[0], decode=engines[1])
    for number, (spoken, answered) in enumerate(((40, 70), (5, 2), (60, 33), (20, 30))):
        known, covered, said = len(conversation.tokens), conversation.covered, words(spoken)
        options: dict[str, Any] = {"max_tokens": answered}
        if number % 2:
            asked = [*conversation.tokens, *said]
            options["stop_token_ids"] = [stop_token(drafters.plain, asked, answered // 2)]
        turn = conversation.say(said, **options)
        assert same_answer(drafters.plain, turn, **options)
        assert known - 1 <= covered <= known if known else not covered
        assert (turn.computed, turn.pulled) == (known + spoken - covered, covered)
    conversation.end()
    assert idle(*engines) == free


def test_the_cache_of_a_drafter_crosses(drafters: Drafters) -> None:
    """Texts cannot tell: a drafter that sees nothing drafts badly, and no worse happens."""
    conversation = Conversation(prefill=drafters.one, decode=drafters.two)
    conversation.say(words(50), max_tokens=60)
    asked = [*conversation.tokens, *words(20)]
    assert conversation.ticket is not None
    there, here = contents.of_both(drafters.two, drafters.one, asked, conversation.ticket)
    assert len(there[0]) == 2 * 5
    assert contents.unequal(there, here) == []
