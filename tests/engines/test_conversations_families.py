"""Conversations of models that keep other caches than Llama's: latents, windows, states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engines import contents, probes
from tests.engines.conversations import (
    RECOMPUTE,
    ROLE,
    TWO_WAY,
    Conversation,
    Turn,
    edited_histories,
    idle,
    same_answer,
    stop_token,
    words,
)
from tests.engines.engines import PREFILL, Engine
from tests.engines.fleet import fleet
from tests.engines.messages import Completion
from tests.engines.steps import eventually
from tests.engines.test_families import PLAIN_MLA

pytestmark = pytest.mark.timeout(300)

STEADY = ("gemma3", "granite4")
"""Families of which an ordinary engine's text does not depend on how its tokens were computed.

Prefill's last token is left to decode: windows and states must end before the prompt's last token.
"""
BLOCK = {"gemma3": 32, "granite4": 96}
CACHE_PREFIXES = ("gemma3",)
"""vLLM's CPU build cannot cache prefixes of states."""


LONGEST = 40
"""The most tokens of an answer that a stop token is to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Engines of a family.

    Attributes:
        family: Its name.
        ordinary: What the others must agree with.
        prefill: Prefills and decodes, and caches prefixes if it can.
        decode: Likewise, without a prefix cache.
        ahead: As ``prefill``; schedules asynchronously, and computes prompts in chunks.
    """

    family: str
    ordinary: Engine
    prefill: Engine
    decode: Engine
    ahead: Engine


@pytest.fixture(scope="module", params=STEADY)
def world(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[World]:
    family = request.param
    logged = {"log_requests": True}
    options: dict[str, Any] = {"extra": TWO_WAY | logged, "transfer": RECOMPUTE}
    ahead: dict[str, Any] = {"async_scheduling": True, "max_num_batched_tokens": 48}
    caching: dict[str, Any] = {"enable_prefix_caching": family in CACHE_PREFIXES}
    with fleet(checkpoints[family], tmp_path_factory.mktemp(family)) as engines:
        started = World(
            family=family,
            ordinary=engines.launch("ordinary"),
            prefill=engines.launch("prefill", ROLE, **options, **caching),
            decode=engines.launch("decode", ROLE, **options),
            ahead=engines.launch("ahead", ROLE, **options, **ahead, **caching),
        )
        engines.wait_started()
        yield started


PAIRS = [("prefill", "decode"), ("prefill", "ahead"), ("ahead", "decode")]


def cached(world: World, turn: Turn) -> int:
    """Return how many tokens of the next turn prefill has in its prefix cache.

    That is the whole blocks of what it computed, which is all but the prompt's last token.
    """
    block = BLOCK[world.family]
    return (len(turn.prompt) - 1) // block * block if world.family in CACHE_PREFIXES else 0


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_turns(world: World, prefill: str, decode: str) -> None:
    """Prefill computes what the user says; the last token of it is decode's.

    If prefill caches prefixes, it has the whole blocks that it had before, and pulls what follows.
    """
    engines = getattr(world, prefill), getattr(world, decode)
    free = idle(*engines)
    conversation, local = Conversation(prefill=engines[0], decode=engines[1]), 0
    for spoken, answered in ((40, 70), (5, 1), (60, 33), (2, 30), (95, 20)):
        known = len(conversation.tokens)
        turn = conversation.say(words(spoken), max_tokens=answered)
        assert same_answer(world.ordinary, turn, max_tokens=answered)
        computed = spoken if known else spoken - 1
        assert (turn.computed, turn.pulled) == (computed, max(known - 1, 0) - local)
        local = cached(world, turn)
    conversation.end()
    world.prefill.run(probes.reset_prefix_cache)
    assert idle(*engines) == free


@pytest.mark.parametrize(("decode", "at_least"), [("decode", 11), ("ahead", 0), ("ahead", 52)])
def test_answers_that_stop(world: World, decode: str, at_least: int) -> None:
    """With asynchronous scheduling, the step under way moves a state past the stop token.

    The ticket covers that token, too.
    """
    conversation = Conversation(prefill=world.prefill, decode=getattr(world, decode))
    local = 0
    for _ in range(3):
        known, spoken = len(conversation.tokens), words(30)
        stop = stop_token(world.ordinary, [*conversation.tokens, *spoken], at_least)
        options: dict[str, Any] = {"max_tokens": 100, "stop_token_ids": [stop]}
        turn = conversation.say(spoken, **options)
        assert turn.completion.tokens[-1] == stop
        assert same_answer(world.ordinary, turn, **options)
        left = 0 if decode == "ahead" else 1
        assert conversation.covered == len(conversation.tokens) - left
        assert turn.pulled == (known - left - local if known else 0)
        assert turn.computed == (29 + left if known else 29)
        local = cached(world, turn)
    conversation.end()


def test_stops_around_the_ends_of_blocks(world: World) -> None:
    """The step under way may be the first in a block of attention or of states, or the last."""
    border = BLOCK[world.family]
    check_stops(world, [2 * border + offset for offset in (-2, -1, 0, 1)])


def check_stops(world: World, lengths: Iterable[int]) -> None:
    """Lead conversations at once, whose first answers stop after these numbers of tokens."""
    started = [stops_at(world.ordinary, length) for length in lengths]
    talks, stops = [talk for talk, _ in started], [stop for _, stop in started]
    tickets: list[Any] = [PREFILL] * len(talks)
    before = loads(world.prefill)
    for _ in range(3):
        prefilled = world.prefill.generate(*talks, max_tokens=1, params=tickets)
        asked = [
            world.ahead.submit(talk, max_tokens=LONGEST, params=each.params, stop_token_ids=[stop])
            for talk, each, stop in zip(talks, prefilled, stops, strict=True)
        ]
        answers = [world.ahead.results(ids)[0] for ids in asked]
        for talk, stop, answer in zip(talks, stops, answers, strict=True):
            check_answer(world.ordinary, talk, stop, answer)
        tickets = [each.params for each in answers]
        talks = [
            [*talk, *each.tokens, *words(25)] for talk, each in zip(talks, answers, strict=True)
        ]
    eventually(lambda: loads(world.prefill) == before + 2 * len(talks))
    eventually(lambda: world.ahead.run(probes.reset_prefix_cache))


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


def test_a_state_of_one_token_more_shows(world: World) -> None:
    """The control: a ticket that claims a token less than its states cover gives a wrong text.

    Pages of attention can be used for fewer tokens than they cover.
    """
    engine = world.ahead
    conversation = Conversation(prefill=world.prefill, decode=engine)
    engine.run(claim_less, 1)
    local = cached(world, conversation.say(words(40), max_tokens=30))
    engine.run(claim_less, 0)
    turn = conversation.say(words(20), max_tokens=12)
    assert turn.pulled == 68 - local
    assert same_answer(world.ordinary, turn, max_tokens=12) == (world.family == "gemma3")
    conversation.end()


def claim_less(engine: Any, tokens: int) -> None:
    """From now on, tickets of answers cover so many tokens less than were computed."""
    from kvferry.integrations.vllm.producer import Producer

    original = getattr(Producer._conversation_tokens, "original", Producer._conversation_tokens)

    def fewer(self: Producer, request: Any) -> int:
        return max(0, original(self, request) - tokens)

    fewer.original = original  # type: ignore[attr-defined]
    Producer._conversation_tokens = fewer  # type: ignore[method-assign]


def test_edited_history(world: World) -> None:
    """States and windows are of use after exactly the ticket's tokens: nothing is pulled."""
    conversation = Conversation(prefill=world.prefill, decode=world.ahead)
    local = cached(world, conversation.say(words(40), max_tokens=130))
    conversation.tokens[140] = (conversation.tokens[140] + 1) % 512
    before = edited_histories(world.prefill)
    turn = conversation.say(words(20), max_tokens=12)
    assert same_answer(world.ordinary, turn, max_tokens=12)
    assert (turn.pulled, turn.computed) == (0, len(turn.prompt) - 1 - local)
    eventually(lambda: edited_histories(world.prefill) == before + 1)
    assert "does not begin with its 169 tokens" in world.prefill.log()
    conversation.end()


@pytest.mark.parametrize("covered", [33, 62, 94, 97, 190])
def test_poisoned_caches(world: World, covered: int) -> None:
    """Nothing that was in a page before its load can be seen, in prefill or in decode."""
    conversation = Conversation(prefill=world.prefill, decode=world.decode)
    free = idle(world.prefill, world.decode)
    conversation.say(words(20), max_tokens=covered - 19)
    room = -covered % 32
    world.prefill.run(contents.fill, float("nan"))
    asked = conversation.ask(words(min(room - 1, 5)))
    assert asked.pulled == covered
    eventually(lambda: world.decode.run(probes.free_blocks) == free[1])
    world.decode.run(contents.fill, float("nan"))
    options = {"max_tokens": -len(asked.prompt) % 32 + 1}
    turn = conversation.answer(asked, **options)
    assert same_answer(world.ordinary, turn, **options)
    for engine in (world.prefill, world.decode):
        engine.run(contents.fill, 0.0)
    conversation.end()


def test_latents(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """MLA, byte for byte: an ordinary engine's text depends on how its tokens were computed."""
    with fleet(checkpoints["deepseek"], tmp_path, **PLAIN_MLA) as engines:
        prefill, decode = (
            engines.launch(name, ROLE, extra=TWO_WAY, transfer=RECOMPUTE, async_scheduling=ahead)
            for name, ahead in (("prefill", False), ("decode", True))
        )
        engines.wait_started()
        conversation = Conversation(prefill=prefill, decode=decode)
        for spoken, answered in ((40, 70), (5, 1), (60, 33)):
            known = len(conversation.tokens)
            turn = conversation.say(words(spoken), max_tokens=answered)
            assert turn.computed == (spoken + 1 if known else spoken)
            assert turn.pulled == max(known - 1, 0)
        assert conversation.ticket is not None
        asked = [*conversation.tokens, *words(9)]
        there, here = contents.of_both(decode, prefill, asked, conversation.ticket)
        assert contents.unequal(there, here) == []
