"""Conversations of several turns: prefill pulls back what decode has computed, answers included."""

from __future__ import annotations

from collections.abc import Iterator
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
    edited_histories,
    idle,
    same_answer,
    stop_token,
    words,
)
from tests.engines.engines import PREFILL, Engine
from tests.engines.fleet import fleet
from tests.engines.steps import SAMPLES, eventually

pytestmark = pytest.mark.timeout(300)

CACHING: dict[str, Any] = {"enable_prefix_caching": True}
AHEAD: dict[str, Any] = {"async_scheduling": True}
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 48}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Engines of the tiny Llama, each of which prefills and decodes."""

    plain: Engine  # No special options, blocks of 32 tokens
    ahead: Engine  # Schedules asynchronously, and computes prompts in chunks
    caching: Engine  # Likewise, and caches prefixes
    wide: Engine  # Caches prefixes, and has blocks of 64 tokens


BLOCK = {"plain": 32, "ahead": 32, "caching": 32, "wide": 64}
CACHES = ("caching", "wide")
LOOKS_AHEAD = ("ahead", "caching")

PAIRS = [("plain", "ahead"), ("wide", "caching"), ("caching", "wide")]
"""Prefill and decode. Of the last two pairs, both engines cache prefixes."""


@pytest.fixture(scope="module")
def world(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with fleet(checkpoint, tmp_path_factory.mktemp("conversations")) as engines:

        def launch(name: str, **options: Any) -> Engine:
            return engines.launch(name, ROLE, extra=TWO_WAY, transfer=RECOMPUTE, **options)

        started = World(
            plain=launch("plain"),
            ahead=launch("ahead", **AHEAD, **CHUNKS),
            caching=launch("caching", **AHEAD, **CHUNKS, **CACHING),
            wide=launch("wide", block_size=64, **CACHING),
        )
        engines.wait_started()
        yield started


def between(world: World, prefill: str, decode: str) -> Conversation:
    return Conversation(prefill=getattr(world, prefill), decode=getattr(world, decode))


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_turns(reference: Engine, world: World, prefill: str, decode: str) -> None:
    """Prefill computes what the user says, and the token that decode sampled last.

    It pulls all that decode has computed. If prefill caches prefixes, it has the whole blocks of
    the prompt before in its cache, and pulls what follows these blocks.
    """
    free = idle(getattr(world, prefill), getattr(world, decode))
    conversation, local = between(world, prefill, decode), 0
    for spoken, answered in ((90, 20), (5, 1), (60, 33)):
        known = len(conversation.tokens)
        turn = conversation.say(words(spoken), max_tokens=answered)
        assert same_answer(reference, turn, max_tokens=answered)
        assert turn.computed == (spoken + 1 if known else spoken)
        assert turn.pulled == (known - 1 - local if known else 0)
        if prefill in CACHES:
            local = len(turn.prompt) // BLOCK[prefill] * BLOCK[prefill]
    conversation.end()
    conversation.prefill.run(probes.reset_prefix_cache)
    assert idle(conversation.prefill, conversation.decode) == free


@pytest.mark.parametrize(("prefill", "decode"), PAIRS[::2])
def test_answers_that_stop(reference: Engine, world: World, prefill: str, decode: str) -> None:
    """An answer that ends with a stop token is pulled, too.

    With asynchronous scheduling, the step that was under way has computed the stop token itself,
    and prefill pulls it. Otherwise prefill computes it.
    """
    conversation, local = between(world, prefill, decode), 0
    for at_least in (7, 31):
        known, spoken = len(conversation.tokens), words(29)
        stop = [stop_token(reference, [*conversation.tokens, *spoken], at_least)]
        options: dict[str, Any] = {"max_tokens": 100, "stop_token_ids": stop}
        turn = conversation.say(spoken, **options)
        assert turn.completion.finish_reason == "stop"
        assert turn.completion.tokens[-1:] == stop
        assert same_answer(reference, turn, **options)
        left = 0 if decode in LOOKS_AHEAD else 1
        assert turn.computed == (29 + left if known else 29)
        assert turn.pulled == (known - left - local if known else 0)
        if prefill in CACHES:
            local = len(turn.prompt) // BLOCK[prefill] * BLOCK[prefill]
    conversation.end()


@pytest.mark.parametrize(("prefill", "decode"), PAIRS[:2])
def test_edited_history(reference: Engine, world: World, prefill: str, decode: str) -> None:
    """The client changes a token of the last answer, or cuts out a part of it.

    The whole blocks of decode before the change are pulled, and the rest is computed. If prefill
    caches prefixes, it pulls only what follows the whole blocks of its prompt before.
    """
    for cut in (0, 25):
        conversation = between(world, prefill, decode)
        conversation.say(words(120), max_tokens=50)
        changed = 140
        last = conversation.tokens[changed]
        conversation.tokens[changed : changed + 1 + cut] = [(last + 1) % 512]
        common = changed // BLOCK[decode] * BLOCK[decode]
        local = 120 // BLOCK[prefill] * BLOCK[prefill] if prefill in CACHES else 0
        turn = conversation.say(words(20), max_tokens=12)
        assert same_answer(reference, turn, max_tokens=12)
        assert (turn.pulled, turn.computed) == (common - local, len(turn.prompt) - common)
        conversation.end()


def test_history_of_another_conversation(reference: Engine, world: World) -> None:
    """No whole block is common: the whole prompt is computed, and the turn counted."""
    conversation = between(world, "plain", "ahead")
    conversation.say(words(40), max_tokens=30)
    conversation.tokens[31] = (conversation.tokens[31] + 1) % 512
    before = edited_histories(world.plain)
    turn = conversation.say(words(20), max_tokens=12)
    assert same_answer(reference, turn, max_tokens=12)
    assert (turn.pulled, turn.computed) == (0, len(turn.prompt))
    eventually(lambda: edited_histories(world.plain) == before + 1)
    conversation.end()


def test_samples(reference: Engine, world: World) -> None:
    """Each sample of an answer is held; vLLM passes on the ticket of the sample that ended last."""
    conversation = between(world, "plain", "ahead")
    asked = conversation.ask(words(40))
    conversation.answer(asked, max_tokens=30, **SAMPLES)
    turn = conversation.say(words(20), max_tokens=12)
    assert same_answer(reference, turn, max_tokens=12)
    assert (turn.pulled, turn.computed) == (69, 21)
    conversation.end()


def test_prompt_logprobs(reference: Engine, world: World) -> None:
    """vLLM computes such a prompt itself, all of it, and decode's pages are free at once."""
    conversation = between(world, "plain", "ahead")
    free = idle(world.plain, world.ahead)
    conversation.say(words(40), max_tokens=30)
    conversation.options = {"prompt_logprobs": 1}
    asked = conversation.ask(words(20))
    assert (asked.pulled, asked.computed) == (0, 90)
    eventually(lambda: world.ahead.run(probes.free_blocks) == free[1])
    conversation.options = {}
    turn = conversation.answer(asked, max_tokens=12)
    assert same_answer(reference, turn, max_tokens=12)
    conversation.end()


@pytest.mark.parametrize("covered", [33, 62])
def test_poisoned_caches(reference: Engine, world: World, covered: int) -> None:
    """Nothing that was in a page before its load can be seen, in prefill or in decode.

    Both compute inside the loaded pages only: see ``test_hand_over.py``.
    """
    conversation = between(world, "plain", "ahead")
    free = idle(world.plain, world.ahead)
    conversation.say(words(covered - 9), max_tokens=10)
    assert conversation.covered == covered
    room = -covered % 32
    world.plain.run(contents.fill, float("nan"))
    asked = conversation.ask(words(min(room - 1, 5)))
    assert asked.pulled == covered
    eventually(lambda: world.ahead.run(probes.free_blocks) == free[1])
    world.ahead.run(contents.fill, float("nan"))
    options = {"max_tokens": -len(asked.prompt) % 32 + 1}
    turn = conversation.answer(asked, **options)
    assert same_answer(reference, turn, **options)
    for engine in (world.plain, world.ahead):
        engine.run(contents.fill, 0.0)
    conversation.end()


def test_many_at_once(reference: Engine, world: World) -> None:
    """Conversations whose turns are prefilled and decoded in the same steps."""
    talks: list[list[int]] = [[] for _ in range(4)]
    tickets: list[Any] = [PREFILL] * len(talks)
    for turn in range(2):
        talks = [[*talk, *words(19 * number + 3)] for number, talk in enumerate(talks)]
        prefilled = world.ahead.generate(*talks, max_tokens=1, params=tickets)
        params = [each.params for each in prefilled]
        stop = [stop_token(reference, talk, 5 * turn + 2) for talk in talks]
        asked = [
            world.caching.submit(talk, max_tokens=45, params=each, stop_token_ids=[token])
            for talk, each, token in zip(talks, params, stop, strict=True)
        ]
        answers = [world.caching.results(ids)[0] for ids in asked]
        expected = [
            reference.generate(talk, max_tokens=45, stop_token_ids=[token])[0].tokens
            for talk, token in zip(talks, stop, strict=True)
        ]
        assert [each.tokens for each in answers] == expected
        tickets = [each.params for each in answers]
        talks = [[*talk, *each.tokens] for talk, each in zip(talks, answers, strict=True)]
    eventually(lambda: world.caching.run(probes.reset_prefix_cache))
