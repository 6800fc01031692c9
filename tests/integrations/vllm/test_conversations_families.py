"""Conversations of models that keep other caches than Llama's: latents, windows, states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm import contents, probes
from tests.integrations.vllm.conversations import (
    RECOMPUTE,
    ROLE,
    TWO_WAY,
    Conversation,
    edited_histories,
    idle,
    same_answer,
    stop_token,
    words,
)
from tests.integrations.vllm.engines import PREFILL, Engine
from tests.integrations.vllm.fleet import fleet
from tests.integrations.vllm.steps import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

STEADY = ("gemma3", "granite4")
"""Families of which an ordinary engine's text does not depend on how its tokens were computed.

Prefill's last token is left to decode: windows and states must end before the prompt's last token.
"""
BLOCK = {"gemma3": 32, "granite4": 96}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Engines of a family.

    Attributes:
        family: Its name.
        ordinary: What the others must agree with.
        prefill, decode: Both prefill and decode.
        ahead: Likewise; schedules asynchronously, and computes prompts in chunks.
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
    options: dict[str, Any] = {"extra": TWO_WAY, "transfer": RECOMPUTE}
    ahead: dict[str, Any] = {"async_scheduling": True, "max_num_batched_tokens": 48}
    with fleet(checkpoints[family], tmp_path_factory.mktemp(family)) as engines:
        started = World(
            family=family,
            ordinary=engines.launch("ordinary"),
            prefill=engines.launch("prefill", ROLE, **options),
            decode=engines.launch("decode", ROLE, **options),
            ahead=engines.launch("ahead", ROLE, **options, **ahead),
        )
        engines.wait_started()
        yield started


PAIRS = [("prefill", "decode"), ("prefill", "ahead"), ("ahead", "decode")]


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_turns(world: World, prefill: str, decode: str) -> None:
    """Prefill computes what the user says; the last token of it is decode's."""
    engines = getattr(world, prefill), getattr(world, decode)
    free = idle(*engines)
    conversation = Conversation(prefill=engines[0], decode=engines[1])
    for spoken, answered in ((40, 70), (5, 1), (60, 33), (2, 30), (95, 20)):
        known = len(conversation.tokens)
        turn = conversation.say(words(spoken), max_tokens=answered)
        assert same_answer(world.ordinary, turn, max_tokens=answered)
        computed = spoken if known else spoken - 1
        assert (turn.computed, turn.pulled) == (computed, max(known - 1, 0))
    conversation.end()
    assert idle(*engines) == free


@pytest.mark.parametrize("decode", ["decode", "ahead"])
@pytest.mark.parametrize("at_least", [0, 11, 52])
def test_answers_that_stop(world: World, decode: str, at_least: int) -> None:
    """With asynchronous scheduling, the step under way moves a state past the stop token.

    The ticket covers that token, too.
    """
    conversation = Conversation(prefill=world.prefill, decode=getattr(world, decode))
    for _ in range(3):
        known, spoken = len(conversation.tokens), words(30)
        stop = stop_token(world.ordinary, [*conversation.tokens, *spoken], at_least)
        options: dict[str, Any] = {"max_tokens": 100, "stop_token_ids": [stop]}
        turn = conversation.say(spoken, **options)
        assert turn.completion.tokens[-1] == stop
        assert same_answer(world.ordinary, turn, **options)
        left = 0 if decode == "ahead" else 1
        assert conversation.covered == len(conversation.tokens) - left
        assert turn.pulled == (known - left if known else 0)
        assert turn.computed == (29 + left if known else 29)
    conversation.end()


def test_stops_around_the_ends_of_blocks(world: World) -> None:
    """The step under way may be the first in a block of attention or of states, or the last."""
    border = BLOCK[world.family]
    check_stops(world, [2 * border + offset for offset in (-2, -1, 0, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_stops_anywhere(world: World, seed: int) -> None:
    """Many conversations, each with stop tokens at other places."""
    check_stops(world, range(60 + seed, 340, 47))


def check_stops(world: World, lengths: Iterable[int]) -> None:
    """Lead conversations at once, whose first answers stop after these numbers of tokens."""
    talks, stops = [], []
    for length in lengths:
        talk, stop = stops_at(world.ordinary, length)
        talks.append(talk)
        stops.append(stop)
    tickets: list[Any] = [PREFILL] * len(talks)
    for _ in range(3):
        prefilled = world.prefill.generate(*talks, max_tokens=1, params=tickets)
        asked = [
            world.ahead.submit(talk, max_tokens=40, params=each.params, stop_token_ids=[stop])
            for talk, each, stop in zip(talks, prefilled, stops, strict=True)
        ]
        answers = [world.ahead.results(ids)[0] for ids in asked]
        for talk, stop, answer in zip(talks, stops, answers, strict=True):
            options: dict[str, Any] = {"max_tokens": 40, "stop_token_ids": [stop]}
            [expected] = world.ordinary.generate(talk, **options)
            assert answer.tokens == expected.tokens, f"a prompt of {len(talk)} tokens"
            # No step is under way behind an answer of all tokens that were asked for.
            ahead = len(answer.tokens) < options["max_tokens"]
            covered = len(talk) + len(answer.tokens) - (not ahead)
            assert answer.params["kvferry"]["tokens"] == covered
        tickets = [each.params for each in answers]
        talks = [
            [*talk, *each.tokens, *words(25)] for talk, each in zip(talks, answers, strict=True)
        ]
    assert not edited_histories(world.prefill)
    eventually(lambda: world.ahead.run(probes.reset_prefix_cache))


def stops_at(ordinary: Engine, length: int) -> tuple[list[int], int]:
    """Return a prompt and a stop token that ends its answer when both have ``length`` tokens."""
    for _ in range(10):
        talk = words(length - 9)
        [answer] = ordinary.generate(talk, max_tokens=9)
        if answer.tokens[-1] not in answer.tokens[:-1]:
            return talk, answer.tokens[-1]
    raise AssertionError("all answers repeat themselves")


def test_edited_history(world: World) -> None:
    """States and windows are of use after exactly the ticket's tokens: nothing is pulled."""
    conversation = Conversation(prefill=world.prefill, decode=world.ahead)
    conversation.say(words(40), max_tokens=130)
    conversation.tokens[140] = (conversation.tokens[140] + 1) % 512
    before = edited_histories(world.prefill)
    turn = conversation.say(words(20), max_tokens=12)
    assert same_answer(world.ordinary, turn, max_tokens=12)
    assert (turn.pulled, turn.computed) == (0, len(turn.prompt) - 1)
    assert edited_histories(world.prefill) == before + 1
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
    assert asked.pulled == covered if len(asked.prompt) > covered + 1 else 0
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
    with fleet(checkpoints["deepseek"], tmp_path) as engines:
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
