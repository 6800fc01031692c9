"""kvferry's plans read the same bytes from the same ranks as vLLM's own connectors.

NixlConnector, MoRIIOConnector and MooncakeConnector are asked for their copies through their own
code, and so is kvferry; copies are compared byte by byte. All pairs are in ``tests/long/vllm``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import islice, product
from types import ModuleType
from typing import Any

import pytest

from tests.vllm.mappings import kvferry_reads
from tests.vllm.mappings.cases import (
    HND,
    MAX_TP,
    NHD,
    Case,
    Reads,
    Refused,
    Side,
    pairs,
)

CONNECTORS = "nixl", "moriio", "mooncake"


def module(name: str) -> ModuleType:
    """The module that asks a connector for its copies; the first imports vLLM."""
    return import_module(f"{__package__}.{name}_reads")


ALL_HEADS = tuple(range(1, 65))
SOME_HEADS = (*range(1, 17), 32, 48, 64)
"""Numbers of a model's KV heads: all for the first family, some for the others, to save time."""


def cases(heads: Iterable[int] = SOME_HEADS, *, latent: bool = True) -> Iterator[Case]:
    """Yield pairs of engines with all parallelism that vLLM starts."""
    for count in heads:
        yield from (Case(count, near, far) for near, far in pairs(count))
    if latent:
        yield from (Case(1, near, far, mla=True) for near, far in pairs(1))


def unlike(latent: bool, decode: dict[str, Any], prefill: dict[str, Any]) -> Iterator[Case]:
    """Yield engines that differ in their blocks, or in the order inside them."""
    for case in cases(latent=latent):
        near, far = replace(case.decode, **decode), replace(case.prefill, **prefill)
        yield replace(case, decode=near, prefill=far)


def blocks(decode: int, prefill: int) -> Iterator[Case]:
    return unlike(True, {"block": decode}, {"block": prefill})


def orders(decode: str, prefill: str) -> Iterator[Case]:
    """A latent has no heads, so order means nothing to it."""
    return unlike(False, {"order": decode}, {"order": prefill})


def context() -> Iterator[Case]:
    """Yield engines with a latent whose tokens all ranks of an engine share, on one or on both."""
    for near, far in product(range(1, MAX_TP + 1), repeat=2):
        shared = product(sorted({1, near}), sorted({1, far}))
        for here, there in shared:
            if here * there > 1:
                yield Case(1, Side(near, 4, dcp=here), Side(far, 4, dcp=there), mla=True)


def states() -> Iterator[Case]:
    """Yield hybrids whose prefill has more ranks than heads, and more than decode."""
    for case in cases(range(1, MAX_TP), latent=False):
        if case.prefill.tp > max(case.heads, case.decode.tp):
            yield replace(case, state=True)


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "equal blocks, by head on both": lambda: cases(ALL_HEADS, latent=False),
    "MLA, equal blocks": lambda: cases(()),
    "blocks of 32 tokens on decode, 16 on prefill": lambda: blocks(32, 16),
    "blocks of 16 on decode, 32 on prefill": lambda: blocks(16, 32),
    "blocks of 48 on decode, 32 on prefill": lambda: blocks(48, 32),
    "by token on both": lambda: orders(NHD, NHD),
    "by token on decode, by head on prefill": lambda: orders(NHD, HND),
    "by head on decode, by token on prefill": lambda: orders(HND, NHD),
    "MLA, decode context parallelism": context,
    "hybrids, heads replicated on prefill": states,
}
"""The first column of the document's table, and the pairs of engines that it stands for."""

NOT_ASKED = {("mooncake", "hybrids, heads replicated on prefill")}
"""Connectors that are not asked for a family."""


def their_reads(name: str, case: Case, ranks: Iterable[int]) -> dict[int, Reads] | None:
    """Return what decode ranks read with a connector, or ``None`` if it refuses the pair."""
    found: dict[int, Reads] = {}
    for rank in ranks:
        try:
            found[rank] = module(name).reads(case, rank)
        except Refused:
            assert not found, (name, case)  # ranks of one engine agree
            return None
    return found


def our_reads(case: Case, rank: int) -> Reads:
    """Return what a decode rank reads with kvferry: every byte once, and the right one."""
    found = kvferry_reads.reads(case, rank)
    wanted = case.content(case.decode, rank)
    assert (found.content(case) == wanted).all(), case
    assert found.nbytes == (wanted >= 0).sum(), case
    return found


def check_equal(case: Case, ours: Reads, theirs: Reads) -> None:
    """Fail unless every byte is read from the same place of the same rank, and none twice."""
    for one, other in zip(ours.origin(case), theirs.origin(case), strict=True):
        assert (one == other).all(), case
    assert ours.nbytes == theirs.nbytes, case
    assert ours.state_ranks == theirs.state_ranks, case
    assert ours.releases == theirs.releases, case


@dataclass(slots=True)
class Count:
    """How many pairs of one family there are, and who accepts them."""

    pairs: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    only_kvferry: int = 0

    def row(self, name: str) -> str:
        """Return the row of the document's table."""
        accepted = [
            "not asked" if (connector, name) in NOT_ASKED else f"{self.accepted[connector]:,}"
            for connector in CONNECTORS
        ]
        cells = [name, f"{self.pairs:,}", *accepted, f"{self.pairs:,}", f"{self.only_kvferry:,}"]
        return f"| {' | '.join(cells)} |"


def compare(family: Iterable[Case], ranks: Callable[[int], Iterable[int]]) -> Count:
    """Compare pairs of a family, for some of decode's ranks. kvferry must accept each.

    Of pairs that no connector accepts, only the reads of the last decode rank are checked.
    """
    found = Count()
    for case in family:
        size = case.decode.tp
        theirs = {name: their_reads(name, case, ranks(size)) for name in CONNECTORS}
        taken = {name: reads for name, reads in theirs.items() if reads is not None}
        found.pairs += 1
        found.accepted.update(taken.keys())
        found.only_kvferry += not taken
        for rank in ranks(size) if taken else [size - 1]:
            ours = our_reads(case, rank)
            for reads in taken.values():
                check_equal(case, ours, reads[rank])
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_connector_reads_is_read_in_the_same_way(name: str) -> None:
    """For every seventh pair, a rank in the middle of decode and the last one."""
    found = compare(islice(FAMILIES[name](), 0, None, 7), lambda size: {size // 2, size - 1})
    assert found.pairs > 20
