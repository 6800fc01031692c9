"""What moves between caches that vLLM allocated: the right bytes, in as few copies as can be."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.core.planner.build_copies import Pages, ReadRequest, build_copies
from kvferry.core.planner.plan import make_plan
from kvferry.core.transport.copies import Copies
from tests.vllm.caches import views
from tests.vllm.caches.layers import ORDERS, TWO, full, mla, planes
from tests.vllm.caches.views import Rank, group, read


def _copies(
    spec: Any, order: str, backend: str, tokens: int, ids: list[int], theirs: list[int]
) -> int:
    """How many copies pull so many tokens between engines that store them in the same way."""
    local, remote = (
        Rank([group(TWO, spec())], order, backends=backend, blocks=9) for _ in range(2)
    )
    return sum(len(batch) for batch in _batches(local, remote, tokens, ids, theirs))


def _batches(
    local: Rank, remote: Rank, tokens: int, ids: list[int], theirs: list[int]
) -> list[Copies]:
    made = make_plan([local.layout], [remote.layout], 0)
    request = ReadRequest(
        ranges=((0, tokens),),
        local=(Pages(ids=np.array(ids, dtype=np.int64)),),
        remote=(Pages(ids=np.array(theirs, dtype=np.int64)),),
    )
    return [build_copies(source, request) for source in made.sources]


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


HOLDERS = {
    "FLASH_ATTN": (full, "LBNHC", views.split_cells),
    "FLASHINFER": (full, "BHLNC", views.split_cells),
    "CPU_ATTN/vec": (full, "LBHNC", views.columns),
    "CPU_ATTN/amx": (full, "LBHNC", views.amx),
    "B12X": (planes, "BLHNC", views.unbound),
    "ROCM_ATTN": (planes, "LHBNC", views.paged_attention),
    "AITER": (planes, "LBHNC", views.shuffled),
}
"""Backends that hold the same keys and values, with the order that they are given here."""


@pytest.mark.parametrize(("mine", "theirs"), list(itertools.permutations(HOLDERS, 2)))
def test_backends_exchange_what_they_hold(mine: str, theirs: str) -> None:
    """Each token's K and V end where the reader's own expressions look for them, also from blocks
    of other sizes, which kernels cut."""
    local, remote = _holder(mine, 32, None), _holder(theirs, 64, 32 if theirs in CUT else None)
    rng = np.random.default_rng(0)
    stored, loaded = _bytes_of(remote), _bytes_of(local)
    stored[:] = rng.integers(0, 256, len(stored))
    _pull(local, remote, [5, 1, 7, 2], [3, 6])
    for layer in TWO:
        wanted = read(remote.caches[layer], remote.specs[layer], 9, HOLDERS[theirs][2])
        found = read(local.caches[layer], local.specs[layer], 9, HOLDERS[mine][2])
        for key in ("k", "v"):
            here = np.concatenate([loaded[found[key][page]] for page in (5, 1, 7, 2)])
            there = np.concatenate([stored[wanted[key][page]] for page in (3, 6)])
            assert np.array_equal(here, there), key


CUT = {"FLASH_ATTN", "CPU_ATTN/amx", "CPU_ATTN/vec", "AITER"}
"""Those whose order lets kernels cut a block."""


def _holder(name: str, block: int, kernel: int | None) -> Rank:
    spec, order, _ = HOLDERS[name]
    backend = "FLASH_ATTN" if name == "AITER" else name
    kernels = [kernel] if kernel else None
    groups = [group(TWO, spec(block_size=block))]
    return Rank(groups, order, backends=backend, blocks=9, kernels=kernels)


def _bytes_of(rank: Rank) -> npt.NDArray[np.uint8]:
    """The buffer, as bytes; the rank keeps it."""
    import torch

    storage = rank.caches[TWO[0]].untyped_storage()
    array: npt.NDArray[np.uint8] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return array


def _pull(local: Rank, remote: Rank, ids: list[int], theirs: list[int]) -> None:
    """Do the copies that load all tokens of these pages."""
    tokens = len(ids) * local.layout.groups[0].block_tokens
    for batch in _batches(local, remote, tokens, ids, theirs):
        for to, start, nbytes in zip(batch.local, batch.remote, batch.nbytes, strict=True):
            ctypes.memmove(int(to), int(start), int(nbytes))


def test_neighbouring_pages_are_one_copy() -> None:
    assert _copies(full, "LBHNC", "FLASH_ATTN", 96, [1, 2, 3], [4, 5, 6]) == 2
