"""Tokens of a request to places in pages, for two groups that meet.

A sub-block is a run of tokens that lies in one page on both sides, next to each other on each.
Sub-block *s* holds the tokens ``[s, s + 1) * grain`` of the pairing's numbering: the request's own
tokens or, where both sides hold the same share of a context-parallel request, that share's, so that
equal layouts move whole pages there too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvferry.core.errors import PageError
from kvferry.core.layout import ContextParallel, Group, GroupKind
from kvferry.core.memory import I64Array

LAST_TOKEN = 1 << 40
"""Token numbers stay below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMap:
    """Which sub-blocks one side holds, and where.

    Attributes:
        per_page: sub-blocks in a page.
        run: sub-blocks that the side holds in a row before it is another rank's turn.
        size: ranks that take turns.
        rank: whose turn is this side's.
    """

    per_page: int
    run: int
    size: int
    rank: int

    def holds(self, index: I64Array) -> I64Array:
        """Those of the sub-blocks that this side holds."""
        return index if self.size == 1 else index[index // self.run % self.size == self.rank]

    def places(self, index: I64Array) -> tuple[I64Array, I64Array]:
        """Block index and index within the page, of sub-blocks that this side holds."""
        if self.size > 1:
            index = index // (self.run * self.size) * self.run + index % self.run
        position, within = np.divmod(index, self.per_page)
        return position, within


def tokens_before(context: ContextParallel, token: int) -> int:
    """How many of the request's tokens before ``token`` a rank holds."""
    turns, rest = divmod(token, context.size * context.interleave)
    own = rest - context.rank * context.interleave
    return turns * context.interleave + min(max(own, 0), context.interleave)


def share_tokens(one: ContextParallel, other: ContextParallel) -> bool:
    """Whether some token is held under both contexts."""
    # Starts of their runs differ by `apart` plus any multiple of `step`; runs meet if some
    # difference lies in (-one.interleave, other.interleave).
    step = math.gcd(one.size * one.interleave, other.size * other.interleave)
    apart = one.rank * one.interleave - other.rank * other.interleave
    lowest = 1 - one.interleave
    return lowest + (apart - lowest) % step < other.interleave


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """A local and a remote group whose fields meet.

    Attributes:
        index: which local group it is, for messages.
        local: the local group.
        remote: the remote group.
    """

    index: int
    local: Group
    remote: Group

    @property
    def alike(self) -> bool:
        """Whether both sides hold the same tokens, so that these can be numbered without gaps."""
        return self.local.context.size == self.remote.context.size == 1 or (
            self.local.context == self.remote.context
        )

    @property
    def grain(self) -> int:
        """Tokens of a sub-block, a multiple of what an entry of a field stands for."""
        if self.local.kind is GroupKind.STATE:
            return 1
        return math.gcd(self._run(self.local), self._run(self.remote))

    def _run(self, group: Group) -> int:
        """Tokens that a side keeps next to each other in this numbering."""
        gaps = group.context.size > 1 and not self.alike
        return group.context.interleave if gaps else group.block_tokens

    def lenses(self, grain: int) -> tuple[BlockMap, BlockMap]:
        """How the local and the remote side keep sub-blocks of ``grain`` tokens, a divisor of the
        pairing's own."""
        return self._lens(self.local, grain), self._lens(self.remote, grain)

    def _lens(self, group: Group, grain: int) -> BlockMap:
        per_page = max(group.block_tokens, 1) // grain
        if self.alike:
            return BlockMap(per_page=per_page, run=per_page, size=1, rank=0)
        context = group.context
        run = max(self._run(group) // grain, 1)
        return BlockMap(per_page=per_page, run=run, size=context.size, rank=context.rank)

    def span(self, first: int, last: int) -> tuple[int, int]:
        """The sub-blocks of the tokens ``[first, last)``, as tokens in this pairing's numbering.

        Both ends are rounded outwards: a sub-block lies in one page on both sides, so where one of
        its tokens is, all of it is, and no page is touched that the range does not touch.

        Raises:
            PageError: the range is reversed, or does not start at 0 for a state.
        """
        self._check(first, last)
        if self.local.kind is GroupKind.STATE:
            return 0, min(last, 1)
        if self.alike:
            first, last = (tokens_before(self.local.context, token) for token in (first, last))
        start = first // self.grain * self.grain
        return start, (-(-last // self.grain) * self.grain if last > first else start)

    def _check(self, first: int, last: int) -> None:
        if not 0 <= first <= last < LAST_TOKEN:
            raise self._refused(first, last, f"it must be 0 <= first <= last < {LAST_TOKEN}")
        if self.local.kind is GroupKind.STATE and first:
            raise self._refused(first, last, "a state stands for all tokens from 0 on")

    def _refused(self, first: int, last: int, why: str) -> PageError:
        return PageError(f"token range [{first}, {last}) of local group {self.index}: {why}")

    def local_tokens(self, token: int) -> int:
        """How many tokens before ``token``, in this numbering, the local side holds."""
        return token if self.alike else tokens_before(self.local.context, token)


def sub_blocks(start: int, stop: int, grain: int, local: BlockMap, remote: BlockMap) -> I64Array:
    """(n,) the sub-blocks of the tokens ``[start, stop)`` that both sides hold, ascending."""
    index = np.arange(start // grain, stop // grain, dtype=np.int64)
    return remote.holds(local.holds(index))
