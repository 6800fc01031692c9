"""What moves between caches that vLLM allocated moves in as few copies as can be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.core.planner.build_copies import Pages, ReadRequest, build_copies
from kvferry.core.planner.plan import make_plan
from tests.vllm.caches.layers import ORDERS, TWO, full, mla, planes
from tests.vllm.caches.views import Rank, group


def _copies(
    spec: Any, order: str, backend: str, tokens: int, ids: list[int], theirs: list[int]
) -> int:
    """How many copies pull so many tokens between engines that store them in the same way."""
    local, remote = (
        Rank([group(TWO, spec())], order, backends=backend, blocks=9).layout for _ in range(2)
    )
    request = ReadRequest(
        ranges=((0, tokens),),
        local=(Pages(ids=np.array(ids, dtype=np.int64)),),
        remote=(Pages(ids=np.array(theirs, dtype=np.int64)),),
    )
    sources = make_plan([local], [remote], 0).sources
    return sum(len(build_copies(source, request)) for source in sources)


@pytest.mark.parametrize(
    ("backend", "spec"),
    [
        ("FLASH_ATTN", full),
        ("CPU_ATTN/vec", full),
        ("B12X", planes),
        ("ROCM_ATTN", planes),
        ("FLASH_ATTN", planes),
        ("FLASHMLA", mla),
        ("NOT_IN_THE_TABLE", full),
    ],
)
@pytest.mark.parametrize(("order", "per_page"), [("LBHNC", 2), ("BLHNC", 1)])
@pytest.mark.parametrize("tokens", [96, 70, 96 - 31])
def test_copies_of_equal_layouts(
    order: str, per_page: int, tokens: int, backend: str, spec: Any
) -> None:
    """One per page of each of two layers; one per block where a block holds all layers."""
    assert _copies(spec, order, backend, tokens, [1, 5, 3], [2, 8, 4]) == 3 * per_page


@pytest.mark.parametrize("order", ORDERS)
def test_copies_of_every_order(order: str) -> None:
    """Pages that are in one piece cost one copy; heads that are apart cost one each."""
    pieces = {"LHBNC": 6, "BLHNC": 1, "BLNHC": 1, "BHLNC": 1}.get(order, 2)
    assert _copies(full, order, "FLASH_ATTN", 96, [1, 5, 3], [2, 8, 4]) == 3 * pieces


"""Backends that hold the same keys and values, with the order that they are given here."""


"""Those whose order lets kernels cut a block."""


def test_neighbouring_pages_are_one_copy() -> None:
    assert _copies(full, "LBHNC", "FLASH_ATTN", 96, [1, 2, 3], [4, 5, 6]) == 2
