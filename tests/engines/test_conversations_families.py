"""Conversations of models with windows and with states; all families' are in `test_families.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.engines import contents, probes
from tests.engines.conversations import (
    Conversation,
    edited_histories,
    idle,
    same_answer,
    stop_token,
    words,
)
from tests.engines.engines import PREFILL, Engine
from tests.engines.messages import Completion
from tests.engines.pairs import GEMMA, GRANITE, Pair, pair
from tests.engines.steps import eventually

pytestmark = pytest.mark.timeout(300)

__all__ = ["pair"]

chunked = pytest.mark.parametrize(
    "pair", [GEMMA, GRANITE], indirect=True, ids=lambda family: str(family.name)
)
"""Families with windows and with states, whose texts do not depend on how they were computed.

The last token of each prompt is left to decode: a window and a state end before it.
"""

LONGEST = 40
"""The most tokens of an answer that a stop token is to end."""


@chunked
def test_turns(pair: Pair) -> None:
    """Prefill computes what the user says; the last token of it is decode's."""
    for prefill, decode in (pair.engines, pair.engines[::-1]):
        free = idle(prefill, decode)
        conversation = Conversation(prefill=prefill, decode=decode)
        for spoken, answered in ((90, 20), (5, 1), (60, 33), (2, 30), (95, 4)):
            known = len(conversation.tokens)
            turn = conversation.say(words(spoken), max_tokens=answered)
            assert same_answer(prefill, turn, max_tokens=answered)
            computed = spoken if known else spoken - 1
            assert (turn.computed, turn.pulled) == (computed, max(known - 1, 0))
        conversation.end()
        assert idle(prefill, decode) == free


@chunked
@pytest.mark.parametrize("ahead", [False, True])
def test_answers_that_stop(pair: Pair, ahead: bool) -> None:
    check_answers_that_stop(pair, ahead, 11)


def check_answers_that_stop(pair: Pair, ahead: bool, at_least: int) -> None:
    """With asynchronous scheduling, the step under way moves a state past the stop token.

    The ticket covers that token, too.
    """
    prefill, decode = pair.engines if ahead else pair.engines[::-1]
    conversation = Conversation(prefill=prefill, decode=decode)
    left = 0 if ahead else 1
    for _ in range(3):
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
    check_stops(pair, [2 * border + offset for offset in (-2, -1, 0, 1)])


def check_stops(pair: Pair, lengths: Iterable[int]) -> None:
    """Lead conversations at once, whose first answers stop after these numbers of tokens."""
    started = [stops_at(pair.one, length) for length in lengths]
    talks, stops = [talk for talk, _ in started], [stop for _, stop in started]
    tickets: list[Any] = [PREFILL] * len(talks)
    before = loads(pair.one)
    for _ in range(3):
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
    eventually(lambda: loads(pair.one) == before + 2 * len(talks))
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
    from kvferry.integrations.vllm.producer import Producer

    original = getattr(Producer._conversation_tokens, "original", Producer._conversation_tokens)

    def fewer(self: Producer, request: Any) -> int:
        return max(0, original(self, request) - tokens)

    fewer.original = original  # type: ignore[attr-defined]
    Producer._conversation_tokens = fewer  # type: ignore[method-assign]


@chunked
def test_edited_history(pair: Pair) -> None:
    """States and windows are of use after exactly the ticket's tokens: nothing is pulled."""
    conversation = Conversation(prefill=pair.one, decode=pair.two)
    conversation.say(words(120), max_tokens=50)
    conversation.tokens[140] = (conversation.tokens[140] + 1) % 512
    before = edited_histories(pair.one)
    turn = conversation.say(words(20), max_tokens=12)
    assert same_answer(pair.one, turn, max_tokens=12)
    assert (turn.pulled, turn.computed) == (0, len(turn.prompt) - 1)
    eventually(lambda: edited_histories(pair.one) == before + 1)
    assert "does not begin with its 169 tokens" in pair.one.log()
    conversation.end()


@chunked
@pytest.mark.parametrize("covered", [33, 62, 94, 97, 190])
def test_poisoned_caches(pair: Pair, covered: int) -> None:
    """Nothing that was in a page before its load can be seen, in prefill or in decode."""
    prefill, decode = pair.engines
    free = idle(prefill, decode)
    conversation = Conversation(prefill=prefill, decode=decode)
    conversation.say(words(covered - 9), max_tokens=10)
    room = -covered % 32
    prefill.run(contents.fill, float("nan"))
    asked = conversation.ask(words(min(room - 1, 5)))
    assert asked.pulled == covered
    eventually(lambda: decode.run(probes.free_blocks) == free[1])
    decode.run(contents.fill, float("nan"))
    options = {"max_tokens": -len(asked.prompt) % 32 + 1}
    turn = conversation.answer(asked, **options)
    for engine in (prefill, decode):
        engine.run(contents.fill, 0.0)
    assert same_answer(prefill, turn, **options)
    conversation.end()
