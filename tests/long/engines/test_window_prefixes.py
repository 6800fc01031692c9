"""Loaded pages of sliding windows in a prefix cache, with more families and sizes of blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.test_window_prefixes import (
    check_edited_message,
    check_offloading,
    check_prompts_after_a_load,
)

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_prompts_after_a_load(checkpoints: dict[str, Path], tmp_path: Path, family: str) -> None:
    check_prompts_after_a_load(checkpoints[family], tmp_path)


def test_an_offloading_connector_beside_a_policy_that_recomputes(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    check_offloading(checkpoints["mistral"], tmp_path, "recompute")


def test_an_edited_message_for_decode_with_larger_blocks(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    check_edited_message(checkpoints["gemma3"], tmp_path, 32, 96)
