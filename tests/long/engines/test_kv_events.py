"""The KV events of engines whose model has sliding windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines.steps import hand_over, texts
from tests.engines.test_kv_events import MARKS, Start, start_publisher

__all__ = ["start_publisher"]

pytestmark = pytest.mark.timeout(300)


def test_sliding_windows(start_publisher: Start, checkpoints: dict[str, Path]) -> None:
    """Of a window, decode has and publishes the blocks that it loaded; of full attention, all."""
    model = checkpoints["gemma3"]
    ordinary = start_publisher("ordinary-windows", model=model)
    prefill = start_publisher("prefill-windows", "kv_producer", model=model)
    decode = start_publisher("decode-windows", "kv_consumer", model=model)
    for each in (prompt(300), prompt(511), prompt(64), [*prompt(300), *prompt(50, seed=3)]):
        got, _ = hand_over(prefill.engine, decode.engine, each, max_tokens=40)
        assert got == texts(ordinary.engine, each, max_tokens=40)
    loaded, computed = decode.events(MARKS[0]), ordinary.events(MARKS[0])
    assert blocks(loaded, "full_attention") == blocks(computed, "full_attention")
    windows = blocks(loaded, "sliding_window")
    assert windows
    assert set(windows) <= set(blocks(computed, "sliding_window"))


def blocks(events: list[dict[str, Any]], kind: str) -> list[tuple[int, Any]]:
    """The blocks that were cached of one kind of attention, with their group, in order."""
    of_kind = [event for event in events if event.get("kv_cache_spec_kind") == kind]
    return [(event["group_idx"], each) for event in of_kind for each in event["block_hashes"]]
