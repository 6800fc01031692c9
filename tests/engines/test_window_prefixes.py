"""Loaded pages of sliding windows in a prefix cache, between engines with different block sizes.

``geometry/test_prefix_hits.py`` has every kind of cache and of sizes, without a model.
More families are in ``tests/long``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines import probes
from tests.engines.conversations import (
    RECOMPUTE,
    ROLE,
    TWO_WAY,
    Conversation,
    same_answer,
    words,
)
from tests.engines.engines import Engine
from tests.engines.families import WINDOW
from tests.engines.fleet import fleet
from tests.engines.steps import eventually, hand_over
from tests.engines.test_multi_connector import OFFLOADING, ferry

pytestmark = pytest.mark.timeout(300)


def test_prompts_after_a_load(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    check_prompts_after_a_load(checkpoints["gemma3"], tmp_path)


def check_prompts_after_a_load(checkpoint: Path, folder: Path) -> None:
    """Shorter and longer ones, such that branch off, and the same again, asked of decode alone.

    Of 429 loaded tokens the window begins at 350, prefill's pages at 320 and decode's at 288, and a
    hit of 384 tokens needs those from 305 on.
    """
    assert WINDOW == 80
    with fleet(checkpoint, folder) as engines:
        prefill = engines.launch("prefill", "kv_producer", block_size=32)
        decode = engines.launch("decode", "kv_consumer", block_size=96, enable_prefix_caching=True)
        engines.wait_started()
        for shorter in (30, 60):
            loaded = words(430)
            later = [
                loaded[:-shorter],
                loaded[:-shorter] + words(40),
                loaded + words(20),
                loaded,
            ]
            hand_over(prefill, decode, loaded, max_tokens=8)
            for asked in later:
                got, right = (e.generate(asked, max_tokens=8)[0] for e in (decode, prefill))
                assert got.tokens == right.tokens, (shorter, len(asked))


def test_prompts_after_a_load_beside_an_offloading_connector(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    check_offloading(checkpoints["mistral"], tmp_path, "fail")


def check_offloading(checkpoint: Path, folder: Path, policy: str) -> None:
    """That keeps every page of a request, also one that vLLM's own cache leaves out."""
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": [ferry("kv_consumer"), OFFLOADING]},
    }
    with fleet(checkpoint, folder) as engines:
        prefill = engines.launch("prefill", "kv_producer", block_size=32)
        decode = engines.launch(
            "decode", kv_transfer_config=both, block_size=96, enable_prefix_caching=True
        )
        engines.wait_started()
        for shorter in (30,):
            loaded = words(430)
            [ticket] = prefill.prefill(loaded)
            [answer] = decode.generate(loaded, params=ticket, max_tokens=8)
            assert (answer.finish_reason == "error") == (policy == "fail")
            for asked in (loaded[:-shorter], loaded + words(20), loaded):
                eventually(lambda: decode.run(probes.forget_prefixes))
                got, right = (e.generate(asked, max_tokens=8)[0] for e in (decode, prefill))
                assert got.tokens == right.tokens, (shorter, len(asked))


def test_an_edited_message_after_a_loaded_turn(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    check_edited_message(checkpoints["gemma3"], tmp_path, 96, 32)


def check_edited_message(
    checkpoint: Path, folder: Path, prefill_block: int, decode_block: int
) -> None:
    """Its prompt is shorter, so its window begins earlier, and prefill has a hit in its own cache.

    Decode with smaller blocks has freed a part of the window's first page.
    """
    assert WINDOW == 80, "so that windows begin where a page is split"
    options: dict[str, Any] = {"extra": TWO_WAY, "transfer": RECOMPUTE}
    with fleet(checkpoint, folder) as engines:
        ordinary = engines.launch("ordinary")
        prefill = engines.launch(
            "prefill", ROLE, **options, block_size=prefill_block, enable_prefix_caching=True
        )
        decode = engines.launch("decode", ROLE, **options, block_size=decode_block)
        engines.wait_started()
        lead(Conversation(prefill=prefill, decode=decode), ordinary, 305)


def lead(conversation: Conversation, ordinary: Engine, spoken: int) -> None:
    """Two turns, and the second again with other words at the end of what prefill has cached."""
    conversation.say(words(spoken), max_tokens=30)
    eventually(lambda: conversation.prefill.run(probes.reset_prefix_cache))
    known, ticket = list(conversation.tokens), conversation.ticket
    turn = conversation.say(words(5), max_tokens=20)
    assert same_answer(ordinary, turn, max_tokens=20)
    assert turn.computed <= 6
    edited = Conversation(prefill=conversation.prefill, decode=conversation.decode)
    edited.tokens, edited.ticket = known[: len(known) // 96 * 96], ticket
    assert same_answer(ordinary, edited.say(words(3), max_tokens=20), max_tokens=20)
