"""Early tickets: aborts and preemption at each chunk."""

from __future__ import annotations

import pytest

from tests.vllm.geometry.test_early import check_aborts, check_preemption


@pytest.mark.parametrize("chunks", range(1, 6))
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_aborts_at_each_chunk(side: str, chunks: int) -> None:
    check_aborts(side, chunks)


@pytest.mark.parametrize("chunks", range(1, 5))
def test_preemption_at_each_chunk(chunks: int) -> None:
    check_preemption(chunks)
