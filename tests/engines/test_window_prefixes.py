"""Loaded pages of sliding windows in a prefix cache, between engines with different block sizes.

``geometry/test_prefix_hits.py`` has every kind of cache and of sizes, without a model.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import probes
from tests.engines.conversations import (
    words,
)
from tests.engines.families import WINDOW
from tests.engines.fleet import fleet
from tests.engines.steps import eventually, hand_over
from tests.engines.test_multi_connector import OFFLOADING, ferry

pytestmark = pytest.mark.timeout(300)


def test_prompts_after_a_load(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Shorter and longer ones, such that branch off, and the same again, asked of decode alone.

    Of 429 loaded tokens the window begins at 350, prefill's pages at 320 and decode's at 288, and a
    hit of 384 tokens needs those from 305 on.
    """
    assert WINDOW == 80
    with fleet(checkpoints["gemma3"], tmp_path) as engines:
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
    """That keeps every page of a request, also one that vLLM's own cache leaves out."""
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"connectors": [ferry("kv_consumer"), OFFLOADING]},
    }
    with fleet(checkpoints["mistral"], tmp_path) as engines:
        prefill = engines.launch("prefill", "kv_producer", block_size=32)
        decode = engines.launch(
            "decode", kv_transfer_config=both, block_size=96, enable_prefix_caching=True
        )
        engines.wait_started()
        loaded = words(430)
        [ticket] = prefill.prefill(loaded)
        [answer] = decode.generate(loaded, params=ticket, max_tokens=8)
        assert answer.finish_reason == "error"
        for asked in (loaded[:-30], loaded + words(20), loaded):
            eventually(lambda: decode.run(probes.forget_prefixes))
            got, right = (e.generate(asked, max_tokens=8)[0] for e in (decode, prefill))
            assert got.tokens == right.tokens, len(asked)
