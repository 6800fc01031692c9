"""Models that keep every kind of cache: the text, and the bytes, of an ordinary engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.tiny_llama import prompt
from tests.engines import contents
from tests.engines.conversations import Conversation, check_turns, words
from tests.engines.engines import PREFILL, Engine
from tests.engines.pairs import (
    ALL,
    Family,
    Pair,
    hand_over_all,
    hand_over_one,
    pair,
    started,
)
from tests.engines.steps import check_hand_over, counted
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

__all__ = ["pair"]

LENGTHS = (1, 2, 31, 32, 64, 80, 95, 97, 112, 128, 161, 300, 511)
"""Around the ends of blocks of 32, 64 and 96 tokens, of a window, of what it leaves behind."""
UNLIKE = (5, 33, 65, 79, 96, 111, 127, 193, 300)
FEW = (2, 33, 112, 289)
"""Where prompts have to be handed over one by one, or all of their bytes are compared."""
LONGEST = 40
"""The most tokens of an answer that a stop token is to end."""


chunked = pytest.mark.parametrize(
    "pair", ALL[:2], indirect=True, ids=lambda family: str(family.name)
)
"""For a model with windows and one with states.

Their texts do not depend on how they were computed, and decode computes the last token of a prompt.
"""


def test_texts(pair: Pair) -> None:
    """Each way, with lengths that end on a border of one engine and not of the other's."""
    steady = pair.family.steady
    for (prefill, decode), lengths in zip(pair.ways, (LENGTHS, UNLIKE), strict=True):
        hand_over_all(pair.family, prefill, decode, lengths if steady else FEW, seed=20)


def test_bytes(pair: Pair) -> None:
    """Before anything is computed from it, an engine has what the other one computed."""
    for prefill, decode in pair.ways:
        contents.check_crossing(prefill, decode, *(prompt(length, seed=23) for length in FEW))


def test_poisoned_cache(pair: Pair) -> None:
    """Nothing that was in a page before its load can be seen.

    Decoding stays inside the loaded pages: vLLM's kernels read the unwritten end of a page, so NaN
    in a fresh one, which is vLLM's own, makes an ordinary engine's text wrong as well.
    """
    for prefill, decode in pair.ways:
        block = pair.block(decode)
        for length in (block - 2, 3 * block - 2):
            if length < 400:
                decode.run(contents.fill, float("nan"))
                count = 3 if pair.family.steady else 2
                hand_over_one(pair.family, prefill, decode, prompt(length, seed=24), count)
                decode.run(contents.fill, 0.0)


def test_contents_are_told_apart(pair: Pair) -> None:
    """The comparison of bytes sees one other token."""
    other = prompt(129, seed=26)
    found = []
    for tokens in (other, [*other[:-3], (other[-3] + 1) % 512, *other[-2:]]):
        [ticket] = pair.one.prefill(tokens)
        there, _ = contents.of_both(pair.one, pair.two, tokens, ticket)
        found.append(there)
    assert len(contents.unequal(*found)) == len(found[0][0])
    assert all(np.any(part) for part in found[0][0].values())


def test_conversation(pair: Pair) -> None:
    """Prefill computes what the user says, and pulls what decode has computed; byte for byte.

    Texts are compared where they do not depend on how their tokens were computed.
    """
    for prefill, decode in pair.ways:
        talk = Conversation(prefill=prefill, decode=decode)
        if pair.family.steady:
            check_turns(prefill, talk, left=pair.family.left)
        else:
            talk.say(words(100), max_tokens=10)
        assert talk.ticket is not None
        there, here = contents.of_both(decode, prefill, [*talk.tokens, *words(9)], talk.ticket)
        assert contents.unequal(there, here) == []


@chunked
@pytest.mark.parametrize(
    "lengths",
    [(0, 1, 2), *(pytest.param(range(4 * i, 280, 47), marks=pytest.mark.slow) for i in range(12))],
    ids=str,
)
def test_stops_around_the_ends_of_blocks(pair: Pair, lengths: Sequence[int]) -> None:
    """Conversations at once, whose first answers stop, some tokens around the end of a block.

    The step under way may be the first in a block of attention or of states, or the last; it moves
    a state past the stop token, so the ticket covers that token, too.
    """
    border = pair.block(pair.two) - 2
    begun = [stops_at(pair.one, border + length) for length in lengths]
    talks, stops = [talk for talk, _ in begun], [stop for _, stop in begun]
    tickets: list[Any] = [PREFILL] * len(talks)
    loads = counted(pair.one, "vllm:kvferry_loads")
    for _ in range(2):
        prefilled = pair.one.generate(*talks, max_tokens=1, params=tickets)
        asked = [
            pair.two.submit(talk, max_tokens=LONGEST, params=each.params, stop_token_ids=[stop])
            for talk, each, stop in zip(talks, prefilled, stops, strict=True)
        ]
        answers = [pair.two.results(ids)[0] for ids in asked]
        for talk, stop, answer in zip(talks, stops, answers, strict=True):
            [expected] = pair.one.generate(talk, max_tokens=LONGEST, stop_token_ids=[stop])
            assert answer.tokens == expected.tokens, f"a prompt of {len(talk)} tokens"
            # No step is under way behind an answer of all tokens that were asked for.
            left = 1 if len(answer.tokens) == LONGEST else 0
            covered = (answer.params or {})["kvferry"]["tokens"]
            assert covered == len(talk) + len(answer.tokens) - left
        tickets = [each.params for each in answers]
        talks = [
            [*talk, *each.tokens, *words(25)] for talk, each in zip(talks, answers, strict=True)
        ]
    eventually(lambda: counted(pair.one, "vllm:kvferry_loads") == loads + len(talks))


def stops_at(ordinary: Engine, length: int) -> tuple[list[int], int]:
    """Return a prompt and a stop token that ends its answer when both have ``length`` tokens."""
    for _ in range(10):
        talk = words(length - 9)
        [answer] = ordinary.generate(talk, max_tokens=9)
        if answer.tokens[-1] not in answer.tokens[:-1]:
            return talk, answer.tokens[-1]
    raise AssertionError("all answers repeat themselves")


@pytest.mark.parametrize(
    "family",
    [
        each if each.name == "granite4" else pytest.param(each, marks=pytest.mark.slow)
        for each in ALL
        if each.steady and each.name != "llama"
    ],
    ids=lambda family: str(family.name),
)
def test_two_ranks(family: Family, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Each rank has a part of a state, or of the heads: between engines of one rank and of two."""
    prompts = [prompt(length, seed=62) for length in (2, 5, 33, 97, 161, 300)]
    with started(
        family,
        checkpoints[family.name],
        tmp_path,
        tensor_parallel_size=2,
        async_scheduling=False,
    ) as pair:
        for prefill, decode in pair.ways:
            check_hand_over(pair.one, prefill, decode, *prompts, left=family.left)
