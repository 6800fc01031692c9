"""Models that keep other caches than Llama's: the text, and the bytes, of an ordinary engine.

Of families that keep the same kinds of cache, one has all tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from examples.tiny_llama import prompt
from tests.engines import contents, probes
from tests.engines.conversations import (
    Conversation,
    same_answer,
    stop_token,
    words,
)
from tests.engines.engines import PREFILL, Engine
from tests.engines.messages import Completion
from tests.engines.pairs import ALL, Family, Pair, hand_over_all, nearly_full, one_by_one, pair
from tests.engines.steps import eventually, texts

pytestmark = pytest.mark.timeout(300)

__all__ = ["pair"]

LENGTHS = (1, 2, 31, 32, 64, 80, 95, 97, 112, 128, 161, 300)
"""Around the ends of blocks of 32, 64 and 96 tokens, of a window, of what it leaves behind."""
UNLIKE = (5, 33, 65, 79, 96, 111, 127, 193, 300)
FEW = (2, 33, 112, 289)
"""Where prompts have to be handed over one by one, or all of their bytes are compared."""
LONGEST = 40
"""The most tokens of an answer that a stop token is to end."""


def families(some: Iterable[Family]) -> pytest.MarkDecorator:
    """Run a test for some families only."""
    return pytest.mark.parametrize("pair", some, indirect=True, ids=lambda one: str(one.name))


distinct = families([family for family in ALL if not family.like])
chunked = families(ALL[:2])
"""For a model with windows and one with states.

Their texts do not depend on how they were computed, and decode computes the last token of a prompt.
"""


def test_texts(pair: Pair) -> None:
    """Each way, with lengths that end on a border of one engine and not of the other's."""
    one_way, other_way = (LENGTHS, UNLIKE) if pair.family.steady else (FEW, FEW)
    hand_over_all(pair.family, pair.one, pair.two, one_way, seed=20)
    hand_over_all(pair.family, pair.two, pair.one, other_way, seed=22)


def test_bytes(pair: Pair) -> None:
    """Before anything is computed from it, an engine has what the other one computed."""
    for length in FEW:
        for prefill, decode in (pair.engines, pair.engines[::-1]):
            tokens = prompt(length, seed=23)
            [ticket] = prefill.prefill(tokens)
            there, here = contents.of_both(prefill, decode, tokens, ticket)
            assert contents.unequal(there, here) == [], f"{length} tokens"


@distinct
def test_poisoned_cache(pair: Pair) -> None:
    """Nothing that was in a page before its load can be seen.

    Decoding stays inside the loaded pages: see ``test_hand_over.py``.
    """
    for prefill, decode in (pair.engines, pair.engines[::-1]):
        for length in nearly_full(pair.block(decode)):
            count = 3 if pair.family.steady else 2
            tokens = prompt(length, seed=24)
            decode.run(contents.fill, float("nan"))
            got, expected = one_by_one(pair.family, prefill, decode, tokens, count)
            decode.run(contents.fill, 0.0)
            assert got == expected, f"{length} tokens"


def test_texts_depend_on_the_whole_prompt(pair: Pair) -> None:
    """Otherwise equal texts would prove nothing: windows aside, every token counts."""
    original = prompt(200, seed=25)
    altered = [[*original[:i], (original[i] + 1) % 512, *original[i + 1 :]] for i in (150, 199)]
    assert len(set(texts(pair.one, original, *altered))) == 3


def test_contents_are_told_apart(pair: Pair) -> None:
    """The comparison of bytes sees one other token."""
    length, other = 129, prompt(129, seed=26)
    found = []
    for tokens in (other, [*other[:-3], (other[-3] + 1) % 512, *other[-2:]]):
        [ticket] = pair.one.prefill(tokens)
        there, _ = contents.of_both(pair.one, pair.two, tokens, ticket)
        found.append(there)
    unequal = contents.unequal(*found)
    assert len(unequal) == len(found[0][0]), f"of {length} tokens only {unequal} differ"
    assert all(np.any(part) for part in found[0][0].values())


def test_conversation(pair: Pair) -> None:
    """Prefill computes what the user says, and pulls what decode has computed; byte for byte.

    Texts are compared where they do not depend on how their tokens were computed.
    """
    for prefill, decode in (pair.engines, pair.engines[::-1]):
        conversation = Conversation(prefill=prefill, decode=decode)
        for spoken, answered in ((100, 10), (5, 1), (60, 20)):
            known = len(conversation.tokens)
            turn = conversation.say(words(spoken), max_tokens=answered)
            if pair.family.steady:
                assert same_answer(prefill, turn, max_tokens=answered)
            assert turn.computed == spoken + bool(known) - pair.family.left
            assert turn.pulled == max(known - 1, 0)
        assert conversation.ticket is not None
        asked = [*conversation.tokens, *words(9)]
        there, here = contents.of_both(decode, prefill, asked, conversation.ticket)
        assert contents.unequal(there, here) == []
        prefill.run(probes.reset_prefix_cache)  # nobody decodes what it has prefilled
        conversation.end()


@chunked
def test_answers_that_stop(pair: Pair) -> None:
    check_answers_that_stop(pair, ahead=False, at_least=11)


def check_answers_that_stop(pair: Pair, ahead: bool, at_least: int) -> None:
    """With asynchronous scheduling, the step under way moves a state past the stop token.

    The ticket covers that token, too.
    """
    prefill, decode = pair.engines if ahead else pair.engines[::-1]
    conversation = Conversation(prefill=prefill, decode=decode)
    left = 0 if ahead else 1
    for _ in range(2):
        known, spoken = len(conversation.tokens), words(30)
        stop = stop_token(prefill, [*conversation.tokens, *spoken], at_least)
        options: dict[str, Any] = {"max_tokens": 100, "stop_token_ids": [stop]}
        turn = conversation.say(spoken, **options)
        assert turn.completion.tokens[-1] == stop
        assert same_answer(prefill, turn, **options)
        assert conversation.covered == len(conversation.tokens) - left
        assert turn.pulled == (known - left if known else 0)
        assert turn.computed == (29 + left if known else 29)
    conversation.end()


@chunked
def test_stops_around_the_ends_of_blocks(pair: Pair) -> None:
    """The step under way may be the first in a block of attention or of states, or the last."""
    border = pair.block(pair.two)
    check_stops(pair, [border + offset for offset in (-2, -1, 0)])


def check_stops(pair: Pair, lengths: Iterable[int]) -> None:
    """Lead conversations at once, whose first answers stop after these numbers of tokens."""
    started = [stops_at(pair.one, length) for length in lengths]
    talks, stops = [talk for talk, _ in started], [stop for _, stop in started]
    tickets: list[Any] = [PREFILL] * len(talks)
    before = loads(pair.one)
    for _ in range(2):
        prefilled = pair.one.generate(*talks, max_tokens=1, params=tickets)
        asked = [
            pair.two.submit(talk, max_tokens=LONGEST, params=each.params, stop_token_ids=[stop])
            for talk, each, stop in zip(talks, prefilled, stops, strict=True)
        ]
        answers = [pair.two.results(ids)[0] for ids in asked]
        for talk, stop, answer in zip(talks, stops, answers, strict=True):
            check_answer(pair.one, talk, stop, answer)
        tickets = [each.params for each in answers]
        talks = [
            [*talk, *each.tokens, *words(25)] for talk, each in zip(talks, answers, strict=True)
        ]
    eventually(lambda: loads(pair.one) == before + len(talks))
    eventually(lambda: pair.two.run(probes.reset_prefix_cache))


def loads(engine: Engine) -> float:
    """Return how many loads of an engine have succeeded."""
    counters: dict[str, float] = engine.run(probes.metrics)
    return counters.get("vllm:kvferry_loads", 0)


def check_answer(ordinary: Engine, talk: list[int], stop: int, answer: Completion) -> None:
    """The tokens are right, and the ticket covers those that the step under way computes."""
    [expected] = ordinary.generate(talk, max_tokens=LONGEST, stop_token_ids=[stop])
    assert answer.tokens == expected.tokens, f"a prompt of {len(talk)} tokens"
    assert answer.params is not None
    # No step is under way behind an answer of all tokens that were asked for.
    left = 1 if len(answer.tokens) == LONGEST else 0
    assert answer.params["kvferry"]["tokens"] == len(talk) + len(answer.tokens) - left


def stops_at(ordinary: Engine, length: int) -> tuple[list[int], int]:
    """Return a prompt and a stop token that ends its answer when both have ``length`` tokens."""
    for _ in range(10):
        talk = words(length - 9)
        [answer] = ordinary.generate(talk, max_tokens=9)
        if answer.tokens[-1] not in answer.tokens[:-1]:
            return talk, answer.tokens[-1]
    raise AssertionError("all answers repeat themselves")


@chunked
def test_a_state_of_one_token_more_shows(pair: Pair) -> None:
    """The control: a ticket that claims a token less than its states cover gives a wrong text.

    Pages of attention can be used for fewer tokens than they cover.
    """
    engine = pair.two
    conversation = Conversation(prefill=pair.one, decode=engine)
    engine.run(claim_less, 1)
    conversation.say(words(40), max_tokens=30)
    engine.run(claim_less, 0)
    turn = conversation.say(words(20), max_tokens=12)
    assert turn.pulled == 68
    assert same_answer(pair.one, turn, max_tokens=12) == (pair.family.name == "gemma3")
    conversation.end()


def claim_less(engine: Any, tokens: int) -> None:
    """From now on, tickets of answers cover so many tokens less than were computed."""
    from kvferry.integrations.vllm.eligibility import Eligibility

    original = getattr(Eligibility._answer_tokens, "original", Eligibility._answer_tokens)

    def fewer(self: Eligibility, request: Any) -> int:
        return original(self, request) - tokens

    fewer.original = original  # type: ignore[attr-defined]
    Eligibility._answer_tokens = fewer  # type: ignore[method-assign]
