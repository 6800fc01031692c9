"""What a load leaves in a prefix cache, with every kind of cache and all sizes of blocks."""

from __future__ import annotations

import pytest

from tests.vllm.geometry.test_prefix_hits import (
    GAPS,
    KINDS,
    MIXED,
    SIZES,
    UNLIKE,
    WAYS,
    check_other_loads,
    check_prompts_after_a_load,
    check_turns,
)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_after_a_load(kind: str, sizes: str) -> None:
    check_prompts_after_a_load(kind, sizes)


@pytest.mark.parametrize("sizes", UNLIKE)
@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("way", WAYS)
def test_other_loads(way: str, kind: str, sizes: str) -> None:
    check_other_loads(way, kind, sizes)


@pytest.mark.parametrize("sizes", ["half", *UNLIKE])
@pytest.mark.parametrize("kind", GAPS)
def test_turns(kind: str, sizes: str) -> None:
    check_turns(kind, sizes)
