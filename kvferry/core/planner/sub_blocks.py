"""Map the tokens of a request to positions in pages, for a local and a remote group.

A sub-block is a run of ``granularity`` tokens that lies within one page of each group: sub-block
*s* has the tokens ``[s * granularity, (s + 1) * granularity)``. Tokens are numbered as in the
request, with one exception: if both ranks hold the same share of a context-parallel request, only
that share is numbered, without gaps, so that equal layouts move whole pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvferry.core.errors import PageError
from kvferry.core.layout import ContextParallel, Group, GroupKind
from kvferry.core.memory import I64Array

LAST_TOKEN = 1 << 40
"""Token indices stay below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMap:
    """Which sub-blocks of a request one rank holds, and where they lie in its pages."""

    per_page: int  # number of sub-blocks in a page
    run: int  # number of consecutive sub-blocks before the next rank's turn
    size: int  # number of ranks that take turns; 1 if the rank holds every sub-block
    rank: int  # index in the order of the turns

    def held(self, index: I64Array) -> I64Array:
        """Return those of the sub-blocks, (n,) int64, that the rank holds, in the same order."""
        return index if self.size == 1 else index[index // self.run % self.size == self.rank]

    def locate(self, index: I64Array) -> tuple[I64Array, I64Array]:
        """Return the block index in the request, and the index in its page, of held sub-blocks."""
        if self.size > 1:
            index = index // (self.run * self.size) * self.run + index % self.run
        position, within = np.divmod(index, self.per_page)
        return position, within


def tokens_before(context: ContextParallel, token: int) -> int:
    """Return how many of the tokens before ``token`` a context-parallel rank holds."""
    turns, rest = divmod(token, context.size * context.interleave)
    own = rest - context.rank * context.interleave
    return turns * context.interleave + min(max(own, 0), context.interleave)


def share_tokens(one: ContextParallel, other: ContextParallel) -> bool:
    """Return whether context-parallel ranks of different engines hold a token in common."""
    # A rank holds runs of `interleave` tokens. The start of a run of `one` minus the start of a run
    # of `other` can be `apart` plus any multiple of `step`. The two runs share a token if the
    # difference is above -one.interleave and below other.interleave.
    step = math.gcd(one.size * one.interleave, other.size * other.interleave)
    apart = one.rank * one.interleave - other.rank * other.interleave
    lowest = 1 - one.interleave
    return lowest + (apart - lowest) % step < other.interleave


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """A local group and the remote group that it is read from, both cut into sub-blocks."""

    index: int  # of the local group in its layout, for error messages
    local: Group
    remote: Group

    @property
    def holds_same_tokens(self) -> bool:
        """Whether both ranks hold the same tokens of a request: only those are then numbered."""
        return self.local.context.size == self.remote.context.size == 1 or (
            self.local.context == self.remote.context
        )

    @property
    def granularity(self) -> int:
        """Number of tokens in a sub-block, a multiple of ``tokens_per_state``; 1 for a state."""
        if self.local.kind is GroupKind.STATE:
            return 1
        return math.gcd(self._run(self.local), self._run(self.remote))

    def _run(self, group: Group) -> int:
        """Return how many consecutively numbered tokens are together in a page."""
        has_gaps = group.context.size > 1 and not self.holds_same_tokens
        return group.context.interleave if has_gaps else group.block_tokens

    def block_maps(self, granularity: int) -> tuple[BlockMap, BlockMap]:
        """Return the local and the remote map, for a divisor of the pairing's ``granularity``."""
        return self._block_map(self.local, granularity), self._block_map(self.remote, granularity)

    def _block_map(self, group: Group, granularity: int) -> BlockMap:
        per_page = max(group.block_tokens, 1) // granularity
        if self.holds_same_tokens:
            return BlockMap(per_page=per_page, run=per_page, size=1, rank=0)
        context = group.context
        run = max(self._run(group) // granularity, 1)
        return BlockMap(per_page=per_page, run=run, size=context.size, rank=context.rank)

    def round_outwards(self, first: int, last: int) -> tuple[int, int]:
        """Return the smallest range of whole sub-blocks that contains tokens ``[first, last)``.

        It is numbered by the pairing, and empty if the given range is; for a state ``(0, 1)``, or
        ``(0, 0)`` if ``last`` is 0. Raises ``PageError`` if the given range is no valid one.
        """
        is_state = self.local.kind is GroupKind.STATE
        problem = ""
        if not 0 <= first <= last < LAST_TOKEN:
            problem = f"it must be 0 <= first <= last < {LAST_TOKEN}"
        elif is_state and first:
            problem = "a state stands for all tokens from 0 on"
        if problem:
            where = f"token range [{first}, {last}) of local group {self.index}"
            raise PageError(f"{where}: {problem}")
        if is_state:
            return 0, min(last, 1)
        if self.holds_same_tokens:
            first, last = (tokens_before(self.local.context, token) for token in (first, last))
        size = self.granularity
        start = first // size * size
        return start, (-(-last // size) * size if last > first else start)

    def local_tokens(self, token: int) -> int:
        """Return how many tokens before ``token`` (as numbered here) the local rank holds."""
        return token if self.holds_same_tokens else tokens_before(self.local.context, token)
