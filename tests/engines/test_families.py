"""Models that keep other caches than Llama's: the text, and the bytes, of an ordinary engine."""

from __future__ import annotations

import numpy as np
import pytest

from examples.tiny_llama import prompt
from tests.engines import contents, probes
from tests.engines.conversations import Conversation, same_answer, words
from tests.engines.early import Legs, early_loads, hand_over_early
from tests.engines.pairs import ALL, Pair, hand_over_all, one_by_one, pair
from tests.engines.steps import texts

pytestmark = pytest.mark.timeout(300)

__all__ = ["pair"]

LENGTHS = (1, 2, 5, 31, 32, 33, 64, 79, 80, 81, 95, 96, 97, 111, 112, 128, 143, 144, 161, 300, 511)
"""Around the ends of blocks of 32, 64 and 96 tokens, of a window, of what it leaves behind."""
UNLIKE = (2, 5, 31, 33, 63, 65, 79, 95, 97, 111, 113, 127, 129, 161, 191, 193, 300, 511)
FEW = (2, 33, 96, 112, 129, 289, 300)
NEARLY_FULL = (30, 62, 94, 95, 126, 190, 287, 318)
"""A token or two below the end of a block, of some size."""

chunked = pytest.mark.parametrize("pair", ALL[:2], indirect=True, ids=lambda one: str(one.name))
"""For a model with windows and one with states."""


def test_texts(pair: Pair) -> None:
    """Each way, with lengths that end on a border of one engine and not of the other's."""
    hand_over_all(pair.family, pair.one, pair.two, LENGTHS, seed=20)
    hand_over_all(pair.family, pair.two, pair.one, UNLIKE, seed=22)


def test_bytes(pair: Pair) -> None:
    """Before anything is computed from it, an engine has what the other one computed."""
    for length in FEW:
        for prefill, decode in (pair.engines, pair.engines[::-1]):
            tokens = prompt(length, seed=23)
            [ticket] = prefill.prefill(tokens)
            there, here = contents.of_both(prefill, decode, tokens, ticket)
            assert contents.unequal(there, here) == [], f"{length} tokens"


def test_poisoned_cache(pair: Pair) -> None:
    """Nothing that was in a page before its load can be seen.

    Decoding stays inside the loaded pages: see ``test_hand_over.py``.
    """
    for prefill, decode in (pair.engines, pair.engines[::-1]):
        for length in NEARLY_FULL:
            count = min(-(length + (not pair.family.steady)) % pair.block(decode) + 1, 8)
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
        for spoken, answered in ((100, 10), (5, 1), (60, 33)):
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
def test_early_tickets(pair: Pair) -> None:
    """Windows and states are read when prefill has computed the last chunk."""
    plain, there = pair.engines
    for length in (1, 33, 96, 161, 300, 511, 900):
        given = prompt(length, seed=30)
        assert hand_over_early(there, plain, given, max_tokens=8) == texts(
            plain, given, max_tokens=8
        )
    begun = early_loads(plain)
    legs = Legs(there, plain, prompt(600, seed=31))
    with there.paused():
        legs.begin_prefill()
        legs.begin_decode()
        there.step(3)
        legs.wait_begun()
    assert legs.texts() == texts(plain, prompt(600, seed=31))
    assert early_loads(plain) > begun
