"""Conversations with a LoRA adapter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conversations import (
    RECOMPUTE,
    ROLE,
    TWO_WAY,
    Conversation,
    check_turns,
    edited_histories,
    same_answer,
    words,
)
from tests.engines.engines import Engine
from tests.engines.fleet import fleet
from tests.engines.lora import lora, write_adapter
from tests.engines.steps import eventually
from tests.engines.test_lora_live import OPTIONS

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def engines(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """Two engines that prefill and decode, and an ordinary one; all cache prefixes."""
    options: dict[str, Any] = {"extra": TWO_WAY, "transfer": RECOMPUTE, "async_scheduling": True}
    with fleet(checkpoint, tmp_path_factory.mktemp("lora"), **OPTIONS) as started:
        found = [
            started.launch("prefill", ROLE, **options),
            started.launch("decode", ROLE, **options),
            started.launch("ordinary"),
        ]
        started.wait_started()
        yield found


def test_turns(engines: list[Engine], tmp_path: Path) -> None:
    prefill, decode, ordinary = engines
    adapter = lora(write_adapter(tmp_path / "one", seed=1))
    conversation = Conversation(prefill=prefill, decode=decode, options={"lora": adapter})
    check_turns(ordinary, conversation, block=32)


def test_the_next_turn_has_another_adapter(engines: list[Engine], tmp_path: Path) -> None:
    """Nothing of the conversation is of use: all is computed with the new weights."""
    prefill, decode, ordinary = engines
    first, second = (
        lora(write_adapter(tmp_path / name, seed=seed), name=name, number=seed)
        for name, seed in (("first", 2), ("second", 3))
    )
    conversation = Conversation(prefill=prefill, decode=decode, options={"lora": first})
    conversation.say(words(40), max_tokens=50)
    before = edited_histories(prefill)
    for adapter in (second, None):
        conversation.options = {"lora": adapter}
        turn = conversation.say(words(30), max_tokens=12)
        assert same_answer(ordinary, turn, max_tokens=12, lora=adapter)
        assert (turn.computed, turn.pulled) == (len(turn.prompt), 0)
    conversation.end()
    eventually(lambda: edited_histories(prefill) == before + 2)
