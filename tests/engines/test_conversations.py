"""Conversations of several turns: prefill pulls back what decode has computed, answers included.

``test_families.py`` has turns with every kind of cache, and answers that stop anywhere.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.conversations import Conversation, words
from tests.engines.engines import Engine
from tests.engines.fleet import TALKS, Engines, cast
from tests.engines.steps import SAMPLES

pytestmark = pytest.mark.timeout(300)

CACHING: dict[str, Any] = {"enable_prefix_caching": True}
AHEAD: dict[str, Any] = {"async_scheduling": True, "max_num_batched_tokens": 48}

engines = cast(
    plain=TALKS,
    ahead=TALKS | AHEAD,
    wide=TALKS | CACHING | {"block_size": 64},
    caching=TALKS | AHEAD | CACHING,
)


@pytest.mark.parametrize("cut", [0, 25])
@pytest.mark.parametrize(
    ("prefill", "decode", "block"), [("plain", "ahead", 0), ("wide", "caching", 64)]
)
def test_edited_history(
    reference: Engine, engines: Engines, prefill: str, decode: str, block: int, cut: int
) -> None:
    """The client changes a token of the last answer, or cuts out a part of it.

    The whole blocks of decode before the change are pulled, and the rest is computed. If prefill
    caches prefixes, it pulls only what follows the whole blocks of its prompt before.
    """
    talk = Conversation(prefill=engines[prefill], decode=engines[decode])
    talk.say(words(120), max_tokens=50)
    changed = 140
    talk.tokens[changed : changed + 1 + cut] = [(talk.tokens[changed] + 1) % 512]
    common = changed // 32 * 32
    local = 120 // block * block if block else 0
    computed = len(talk.tokens) + 20 - common
    talk.check_turn(reference, words(20), computed, common - local, max_tokens=12)


def test_samples(reference: Engine, engines: Engines) -> None:
    """Each sample of an answer is held; vLLM passes on the ticket of the sample that ended last."""
    talk = Conversation(prefill=engines["plain"], decode=engines["ahead"])
    talk.say(words(40), max_tokens=30, **SAMPLES)
    talk.check_turn(reference, words(20), 21, 69, max_tokens=12)
