"""Map the tokens of a request to positions in pages, for a local and a remote group.

A sub-block is a run of ``granularity`` consecutive tokens that lies within one page of the local
group and within one page of the remote group. Sub-block *s* holds the tokens ``[s * granularity,
(s + 1) * granularity)``.

Tokens are numbered as in the request, with one exception: if the local and the remote rank hold the
same share of a context-parallel request, only the tokens of that share are numbered, without gaps.
Equal layouts then move whole pages under context parallelism, too.
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
    """Which sub-blocks of a request one rank holds, and where they lie in its pages.

    A sub-block is a run of tokens that lies within one page on both sides. Under context
    parallelism the ranks take turns: one rank holds ``run`` consecutive sub-blocks, the next rank
    the ``run`` sub-blocks after them.

    Attributes:
        per_page: number of sub-blocks in a page.
        run: number of consecutive sub-blocks that a rank holds before the next rank's turn.
        size: number of ranks that take turns; 1 if the rank holds every sub-block.
        rank: index of the rank in the order of the turns.
    """

    per_page: int
    run: int
    size: int
    rank: int

    def held(self, index: I64Array) -> I64Array:
        """Return those of the given sub-blocks that the rank holds.

        Args:
            index: (n,) int64, indices of sub-blocks in the request.

        Returns:
            The elements of ``index`` whose sub-blocks the rank holds, in the same order.
        """
        return index if self.size == 1 else index[index // self.run % self.size == self.rank]

    def locate(self, index: I64Array) -> tuple[I64Array, I64Array]:
        """Return where sub-blocks lie in the rank's pages.

        Args:
            index: (n,) int64, indices in the request of sub-blocks that the rank holds.

        Returns:
            Two (n,) int64 arrays: for each sub-block, the block index of its page in the request
            (as in ``build_copies.Pages``), and the sub-block's index within that page.
        """
        if self.size > 1:
            index = index // (self.run * self.size) * self.run + index % self.run
        position, within = np.divmod(index, self.per_page)
        return position, within


def tokens_before(context: ContextParallel, token: int) -> int:
    """Return how many of the tokens before ``token`` a context-parallel rank holds.

    Args:
        context: which tokens the rank holds.
        token: index of a token in the request.
    """
    turns, rest = divmod(token, context.size * context.interleave)
    own = rest - context.rank * context.interleave
    return turns * context.interleave + min(max(own, 0), context.interleave)


def share_tokens(one: ContextParallel, other: ContextParallel) -> bool:
    """Return whether two context-parallel ranks of different engines hold a token in common.

    Args:
        one: which tokens the first rank holds.
        other: which tokens the second rank holds.
    """
    # A rank holds runs of `interleave` tokens. The start of a run of `one` minus the start of a run
    # of `other` can be `apart` plus any multiple of `step`. The two runs share a token if the
    # difference is above -one.interleave and below other.interleave.
    step = math.gcd(one.size * one.interleave, other.size * other.interleave)
    apart = one.rank * one.interleave - other.rank * other.interleave
    lowest = 1 - one.interleave
    return lowest + (apart - lowest) % step < other.interleave


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """A local group and the remote group that it is read from, and how to cut both into sub-blocks.

    A sub-block is a run of consecutive tokens that lies within one page of each group.

    Attributes:
        index: index of the local group in its layout, for error messages.
        local: the local group.
        remote: the remote group.
    """

    index: int
    local: Group
    remote: Group

    @property
    def holds_same_tokens(self) -> bool:
        """Whether the local and the remote rank hold the same tokens of a request.

        If so, the pairing numbers only those tokens, without gaps.
        """
        return self.local.context.size == self.remote.context.size == 1 or (
            self.local.context == self.remote.context
        )

    @property
    def granularity(self) -> int:
        """Number of tokens in a sub-block (a run of tokens that lies in one page on both sides).

        This number is a multiple of ``Field.tokens_per_state``, so a sub-block has whole entries. A
        state is one sub-block, which counts as one token.
        """
        if self.local.kind is GroupKind.STATE:
            return 1
        return math.gcd(self._run(self.local), self._run(self.remote))

    def _run(self, group: Group) -> int:
        """Return how many tokens that the pairing numbers consecutively are together in a page."""
        has_gaps = group.context.size > 1 and not self.holds_same_tokens
        return group.context.interleave if has_gaps else group.block_tokens

    def block_maps(self, granularity: int) -> tuple[BlockMap, BlockMap]:
        """Return which sub-blocks the local and the remote rank hold, and where.

        Args:
            granularity: number of tokens in a sub-block, a divisor of the pairing's own
                ``granularity``.

        Returns:
            The map of the local rank and the map of the remote rank.
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
        """Return the smallest range of whole sub-blocks that contains a range of tokens.

        A sub-block lies within one page on both sides, so the result is in the same pages as the
        given range.

        Args:
            first: index in the request of the range's first token.
            last: index in the request of the token after the range's last.

        Returns:
            The range ``[start, stop)`` of token indices, as the pairing numbers tokens (see
            ``holds_same_tokens``); empty if the given range is empty. For a state ``(0, 1)``, or
            ``(0, 0)`` if ``last`` is 0.

        Raises:
            PageError: the range is reversed or out of bounds, or does not start at 0 for a state.
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
        """Return how many tokens before ``token`` the local rank holds.

        Args:
            token: index of a token, as the pairing numbers tokens (see ``holds_same_tokens``).
        """
        return token if self.holds_same_tokens else tokens_before(self.local.context, token)


def sub_blocks(
    start: int, stop: int, granularity: int, local: BlockMap, remote: BlockMap
) -> I64Array:
    """Return the sub-blocks in a range of tokens that both the local and the remote rank hold.

    Args:
        start: index of the range's first token, a multiple of ``granularity``.
        stop: index of the token after the range's last, a multiple of ``granularity``.
        granularity: number of tokens in a sub-block.
        local: which sub-blocks the local rank holds.
        remote: which sub-blocks the remote rank holds.

    Returns:
        (n,) int64, ascending: the indices of the sub-blocks. Sub-block ``s`` holds the tokens
        ``[s * granularity, (s + 1) * granularity)``.
    """
    index = np.arange(start // granularity, stop // granularity, dtype=np.int64)
    return remote.held(local.held(index))
