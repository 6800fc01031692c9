"""Map the tokens of a request to places in pages, for a local and a remote group.

A sub-block is a run of tokens that lies in one page on both sides, contiguous on each. Sub-block
*s* holds the tokens ``[s, s + 1) * granularity`` in the numbering of the pairing: the request's own
tokens or, where both sides hold the same share of a context-parallel request, the tokens of that
share, so that equal layouts move whole pages there too.
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
        per_page: number of sub-blocks in a page.
        run: number of consecutive sub-blocks that the side holds before the next rank's turn.
        size: number of ranks that take turns.
        rank: the turn of this side.
    """

    per_page: int
    run: int
    size: int
    rank: int

    def held(self, index: I64Array) -> I64Array:
        """Return those of the sub-blocks that this side holds."""
        return index if self.size == 1 else index[index // self.run % self.size == self.rank]

    def locate(self, index: I64Array) -> tuple[I64Array, I64Array]:
        """Return block index and index within the page of sub-blocks that this side holds."""
        if self.size > 1:
            index = index // (self.run * self.size) * self.run + index % self.run
        position, within = np.divmod(index, self.per_page)
        return position, within


def tokens_before(context: ContextParallel, token: int) -> int:
    """Return how many of the request's tokens before ``token`` a rank holds."""
    turns, rest = divmod(token, context.size * context.interleave)
    own = rest - context.rank * context.interleave
    return turns * context.interleave + min(max(own, 0), context.interleave)


def share_tokens(one: ContextParallel, other: ContextParallel) -> bool:
    """Return whether some token is held under both contexts."""
    # Starts of their runs differ by `apart` plus any multiple of `step`; runs meet if some
    # difference lies in (-one.interleave, other.interleave).
    step = math.gcd(one.size * one.interleave, other.size * other.interleave)
    apart = one.rank * one.interleave - other.rank * other.interleave
    lowest = 1 - one.interleave
    return lowest + (apart - lowest) % step < other.interleave


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """How the tokens of a local and a remote group go together.

    Attributes:
        index: number of the local group, for messages.
        local: the local group.
        remote: the remote group.
    """

    index: int
    local: Group
    remote: Group

    @property
    def holds_same_tokens(self) -> bool:
        """Whether both sides hold the same tokens, so that these can be numbered without gaps."""
        return self.local.context.size == self.remote.context.size == 1 or (
            self.local.context == self.remote.context
        )

    @property
    def granularity(self) -> int:
        """Tokens of a sub-block, a multiple of what an entry of a field stands for."""
        if self.local.kind is GroupKind.STATE:
            return 1
        return math.gcd(self._run(self.local), self._run(self.remote))

    def _run(self, group: Group) -> int:
        """Return how many consecutive tokens, in this numbering, a side holds contiguously."""
        has_gaps = group.context.size > 1 and not self.holds_same_tokens
        return group.context.interleave if has_gaps else group.block_tokens

    def block_maps(self, granularity: int) -> tuple[BlockMap, BlockMap]:
        """Return where the local and the remote side hold sub-blocks.

        Args:
            granularity: tokens of a sub-block, a divisor of the pairing's own granularity.
        """
        return self._block_map(self.local, granularity), self._block_map(self.remote, granularity)

    def _block_map(self, group: Group, granularity: int) -> BlockMap:
        per_page = max(group.block_tokens, 1) // granularity
        if self.holds_same_tokens:
            return BlockMap(per_page=per_page, run=per_page, size=1, rank=0)
        context = group.context
        run = max(self._run(group) // granularity, 1)
        return BlockMap(per_page=per_page, run=run, size=context.size, rank=context.rank)

    def round_outwards(self, first: int, last: int) -> tuple[int, int]:
        """Return a token range as whole sub-blocks.

        A sub-block lies in one page on both sides. So where one of its tokens is, all of it is, and
        rounding touches no page that the range does not touch.

        Args:
            first: first token of the request's range.
            last: the token after its last.

        Returns:
            The range ``[start, stop)`` in tokens of this pairing's numbering.

        Raises:
            PageError: the range is reversed, or does not start at 0 for a state.
        """
        self._check(first, last)
        if self.local.kind is GroupKind.STATE:
            return 0, min(last, 1)
        if self.holds_same_tokens:
            first, last = (tokens_before(self.local.context, token) for token in (first, last))
        size = self.granularity
        start = first // size * size
        return start, (-(-last // size) * size if last > first else start)

    def _check(self, first: int, last: int) -> None:
        if not 0 <= first <= last < LAST_TOKEN:
            raise self._range_error(first, last, f"it must be 0 <= first <= last < {LAST_TOKEN}")
        if self.local.kind is GroupKind.STATE and first:
            raise self._range_error(first, last, "a state stands for all tokens from 0 on")

    def _range_error(self, first: int, last: int, problem: str) -> PageError:
        return PageError(f"token range [{first}, {last}) of local group {self.index}: {problem}")

    def local_tokens(self, token: int) -> int:
        """Return how many tokens before ``token``, in this numbering, the local side holds."""
        return token if self.holds_same_tokens else tokens_before(self.local.context, token)


def sub_blocks(
    start: int, stop: int, granularity: int, local: BlockMap, remote: BlockMap
) -> I64Array:
    """Return the sub-blocks of the tokens ``[start, stop)`` that both sides hold.

    Returns:
        (n,) int64, ascending.
    """
    index = np.arange(start // granularity, stop // granularity, dtype=np.int64)
    return remote.held(local.held(index))
