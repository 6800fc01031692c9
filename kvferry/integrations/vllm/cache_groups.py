"""vLLM's cache groups: which blocks of a request a producer hands over and a consumer fills.

In each group, vLLM lists a request's blocks in the order of the request's tokens. With a sliding
window, the ids of the blocks before the window are ``HOLE`` (vLLM's null block), which names no
page. In a group of recurrent states, one block is handed over: that with the state after the last
token to transfer. Later blocks are scratch memory of speculative decoding. In a group of rings, a
request has one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvferry.core.layout import HOLE
from kvferry.core.planner.build_copies import Pages
from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.caches.cache_kinds import Handling, handling

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

TokenRange = tuple[int, int]
"""A range of a request's tokens, by index: the first token, and the token after the last one."""

Block = TypeVar("Block")

NO_PAGES = Pages(ids=np.empty(0, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """One of vLLM's cache groups whose pages are handed over.

    ``tokens`` is how many tokens of a request one page covers, on all context-parallel ranks
    together; for a state, the number of tokens after which vLLM stores the state in the request's
    next page; 0 for a ring, which stays in the request's first page.
    """

    index: int  # among all of vLLM's groups, also those that are not handed over
    tokens: int
    is_state: bool = False  # a page is right after one number of tokens only: a state or a ring
    # How many tokens a token attends to, including itself, plus earlier ones whose blocks vLLM also
    # keeps (``extra_retained_tokens``); 0 for no sliding window.
    window: int = 0
    chunk: int = 0  # tokens in each chunk of chunked local attention; 0 for other attention

    @property
    def has_gap(self) -> bool:
        """Whether vLLM frees a request's first pages before it ends: with a window or a chunk."""
        return bool(self.window or self.chunk)

    @property
    def needs_exact_length(self) -> bool:
        """Whether pages fit only the length that they were computed for, not every prefix of it."""
        return self.is_state or self.has_gap

    def num_skipped_tokens(self, tokens: int) -> int:
        """Return how many of so many tokens are before the next token's window or chunk.

        As ``get_num_skipped_tokens`` in vLLM's ``single_type_kv_cache_manager.py``, by which vLLM
        frees a request's first blocks.
        """
        if self.window:
            return max(0, tokens - self.window + 1)
        return tokens // self.chunk * self.chunk if self.chunk else 0

    def most_pages(self, tokens: int) -> int:
        """Return how many pages a request of so many tokens has at most to hand over or to load."""
        if self.is_state:
            return 1
        pages = -(-tokens // self.tokens)
        return min(pages, pages - self.num_skipped_tokens(tokens) // self.tokens + 1)

    def producer_pages(self, ids: Sequence[int], tokens: int) -> tuple[int, list[int]]:
        """Return the pages that a ticket lists for a request of which so many tokens were computed.

        They are the ids, of its blocks in this group, from the first on that vLLM has not freed
        (that is not ``HOLE``), whose index comes first. For a state, 0 and the id of its page.
        """
        if self.is_state:
            return 0, list(self._state_block(ids, tokens))
        ids = ids[: -(-tokens // self.tokens)]
        first = sum(1 for _ in takewhile(lambda page: page == HOLE, ids))
        return first, list(ids[first:])

    def consumer_pages(
        self, blocks: Sequence[KVCacheBlock], tokens: int
    ) -> tuple[TokenRange | None, Pages]:
        """Return the tokens that a consumer loads for a request, and the pages it loads them into.

        After the load, the request's first ``tokens`` are cached or loaded. It leaves out the
        leading blocks that are cached already or are vLLM's null block, and fills all others: it
        zeroes what it does not read. ``None`` and ``NO_PAGES`` if all tokens are cached.
        """
        if self.is_state:
            page = [block.block_id for block in self._state_block(blocks, tokens)]
            return (0, tokens), Pages(ids=np.array(page, dtype=np.int64))
        cached = sum(1 for _ in takewhile(lambda b: b.is_null or b.block_hash is not None, blocks))
        if cached * self.tokens >= tokens:
            return None, NO_PAGES
        # The window may begin after the last token: then the range is empty, and the load only
        # zeroes the pages.
        first = min(max(cached * self.tokens, self.num_skipped_tokens(tokens)), tokens)
        ids = [block.block_id for block in blocks[cached:]]
        return (first, tokens), Pages(ids=np.array(ids, dtype=np.int64), first_index=cached)

    def splits_page(self, token: int) -> bool:
        """Return whether a load that writes from ``token`` on leaves a page incomplete."""
        return self.has_gap and token % self.tokens != 0

    def missing_tokens(self, first: int, token: int) -> int:
        """Return how many tokens page ``first`` lacks if a load writes from ``token`` on."""
        return max(0, token - first * self.tokens) if self.splits_page(token) else 0

    def _state_block(self, blocks: Sequence[Block], tokens: int) -> Sequence[Block]:
        """Return a list of the block with the state after so many tokens, if there is one.

        As ``mamba_get_block_table_tensor`` in vLLM's ``v1/attention/backends/utils.py``.
        """
        index = (tokens - 1) // self.tokens if self.tokens else 0
        return blocks[index : index + 1]


def num_blocks(groups: Sequence[CacheGroup], tokens: int) -> int:
    """Return how many blocks vLLM needs in all groups for this many tokens beyond cached ones."""
    return sum(1 if group.is_state else -(-tokens // group.tokens) for group in groups)


def cache_groups(config: KVCacheConfig, context_size: int) -> tuple[CacheGroup, ...]:
    """Return the cache groups that vLLM offers for transfer, in vLLM's order."""
    ids, groups = config.transfer_group_ids, config.transfer_groups
    return tuple(
        _cache_group(index, group.kv_cache_spec, context_size)
        for index, group in zip(ids, groups, strict=True)
    )


def _cache_group(index: int, spec: KVCacheSpec, context_size: int) -> CacheGroup:
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

    one, kind = versions.first_layer(spec), handling(spec)
    if kind in (Handling.STATE, Handling.RING):
        tokens = 0 if kind is Handling.RING else one.block_size
        return CacheGroup(index=index, tokens=tokens, is_state=True)
    window, chunk = 0, 0
    if isinstance(one, SlidingWindowSpec):
        window = one.sliding_window + one.extra_retained_tokens
    elif isinstance(one, ChunkedLocalAttentionSpec):
        chunk = one.attention_chunk_size
    size = context_size if versions.is_context_sharded(spec) else 1
    return CacheGroup(index=index, tokens=spec.block_size * size, window=window, chunk=chunk)
