"""Pairs of engines: what each rank stores, and which tokens of one request lie where.

A cache has one layer. An entry (one head of one token) has ``UNIT`` bytes, as vLLM stores them: K
and V of a head side by side, or a latent. The request fills whole pages on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

UNIT = 4
"""Bytes of one head of one token."""

MAX_TP = 16
"""The most ranks of an engine."""

HND, NHD = "LBHNC", "LBNHC"
"""vLLM's names of the two orders inside a page: by head, then token; by token, then head."""

Bytes = npt.NDArray[np.int64]


class Refused(Exception):
    """A connector does not accept a pair of engines."""


@dataclass(frozen=True, slots=True)
class Side:
    tp: int  # number of ranks
    block: int = 16  # number of tokens that a rank stores in a page
    order: str = HND  # the order inside a page
    dcp: int = 1  # number of ranks that share a request's tokens, page by page


@dataclass(frozen=True)
class Case:
    """Two engines that serve one model."""

    heads: int  # the model's KV heads
    decode: Side  # the engine that reads
    prefill: Side  # the engine that is read
    mla: bool = False  # whether a token has one latent, which every rank holds whole
    state: bool = False  # whether the model also has recurrent states, split evenly over the ranks

    @cached_property
    def tokens(self) -> int:
        """The tokens of the request, which fill whole pages of every rank."""
        sides = self.decode, self.prefill
        return 2 * math.lcm(*(side.block * side.dcp for side in sides))

    @cached_property
    def pages(self) -> int:
        """The pages of each rank's cache. Page 0 is never used; the rest are a power of two."""
        blocks = self.tokens // min(side.block * side.dcp for side in (self.decode, self.prefill))
        return 1 + max(8, 1 << (blocks - 1).bit_length())

    def shard(self, side: Side, rank: int) -> tuple[int, int]:
        """Return the range of heads that a rank holds, as vLLM assigns them."""
        if self.mla or self.heads >= side.tp:
            ranks = 1 if self.mla else side.tp
            own = 0 if self.mla else rank
            return own * self.heads // ranks, (own + 1) * self.heads // ranks
        head = rank // (side.tp // self.heads)
        return head, head + 1

    def held(self, side: Side, rank: int) -> int:
        """Return how many heads a rank holds."""
        start, stop = self.shard(side, rank)
        return stop - start

    def page_bytes(self, side: Side) -> int:
        """Return the size of a page of any rank."""
        return self.held(side, 0) * side.block * UNIT

    def page_ids(self, side: Side) -> list[int]:
        """Return the pages of the request, in the order of its tokens; neighbours are rare."""
        count = self.tokens // (side.block * side.dcp)
        step = 5 if side is self.decode else 7
        return [1 + index * step % (self.pages - 1) for index in range(count)]

    def content(self, side: Side, rank: int) -> Bytes:
        """Return a number for every byte of a rank's cache: the byte of the model that it holds.

        Equal numbers are equal bytes, also on other ranks and engines; -1 is of another request.
        """
        shape = self.shard(side, rank), side, rank % side.dcp, tuple(self.page_ids(side))
        return _content(*shape, self.pages, self.tokens)


@cache
def _content(
    shard: tuple[int, int], side: Side, turn: int, ids: tuple[int, ...], pages: int, tokens: int
) -> Bytes:
    heads = np.arange(*shard)[:, None, None]
    memory = np.full((pages, len(heads) * side.block * UNIT), -1, dtype=np.int64)
    for index, page in enumerate(ids):
        first = (index * side.dcp + turn) * side.block
        token = np.arange(first, first + side.block)[None, :, None]
        labels = (heads * tokens + token) * UNIT + np.arange(UNIT)
        memory[page] = (labels if side.order == HND else labels.transpose(1, 0, 2)).ravel()
    return memory.ravel()


@dataclass(slots=True)
class Reads:
    """What one decode rank reads, as copies of bytes."""

    # for each prefill rank that is read, the first byte of each copy in decode's cache, the first
    # byte in prefill's, and the number of bytes
    copies: dict[int, list[tuple[Bytes, Bytes, Bytes]]] = field(default_factory=dict)
    # the prefill ranks that a part of the state is read from
    state_ranks: set[int] = field(default_factory=set)
    # for each prefill rank that is read, how many decode ranks it waits for before it gives pages
    # back
    releases: dict[int, int] = field(default_factory=dict)
    # moves bytes within decode's cache after the copies; takes and returns an array with one
    # element per byte. None if the copies are enough
    rearrange: Callable[[Bytes], Bytes] | None = None
    _origin: tuple[Bytes, Bytes] | None = None

    def add(self, rank: int, local: object, remote: object, nbytes: object) -> None:
        """Add copies from a prefill rank."""
        made = tuple(np.asarray(each, dtype=np.int64) for each in (local, remote, nbytes))
        self.copies.setdefault(rank, []).append(np.broadcast_arrays(*made))  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        """How many bytes are moved."""
        return sum(int(size.sum()) for made in self.copies.values() for _, _, size in made)

    def origin(self, case: Case) -> tuple[Bytes, Bytes]:
        """Return, for every byte of decode's cache, the prefill rank and the place that it is from.

        -1 where nothing is read.
        """
        if self._origin is None:
            self._origin = self._find_origin(case)
        return self._origin

    def content(self, case: Case) -> Bytes:
        """Return what decode's cache has after the reads: numbers as of ``Case.content``."""
        ranks, places = self.origin(case)
        found = np.full(len(ranks), -1, dtype=np.int64)
        for rank in self.copies:
            read = ranks == rank
            found[read] = case.content(case.prefill, rank)[places[read]]
        return found

    def _find_origin(self, case: Case) -> tuple[Bytes, Bytes]:
        size = case.page_bytes(case.decode) * case.pages
        ranks, places = np.full((2, size), -1, dtype=np.int64)
        for rank, made in self.copies.items():
            for local, remote, nbytes in made:
                within = np.arange(nbytes.sum()) - np.repeat(nbytes.cumsum() - nbytes, nbytes)
                where = np.repeat(local, nbytes) + within
                ranks[where] = rank
                places[where] = np.repeat(remote, nbytes) + within
        if self.rearrange is not None:
            return self.rearrange(ranks), self.rearrange(places)
        return ranks, places


def served(heads: int, tp: int) -> bool:
    """Return whether vLLM starts such an engine: it wants whole heads, or whole replicas."""
    return heads % tp == 0 or tp % heads == 0


def pairs(heads: int) -> Iterator[tuple[Side, Side]]:
    """Yield all pairs of parallelism for a model."""
    sizes = [tp for tp in range(1, MAX_TP + 1) if served(heads, tp)]
    yield from ((Side(near), Side(far)) for near, far in product(sizes, sizes))
