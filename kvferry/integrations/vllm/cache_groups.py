"""vLLM's cache groups: which blocks of a request each group hands over.

vLLM lists a request's blocks by their position in the request. In a group with a sliding window the
blocks before the window are holes (``HOLE``). In a group of recurrent states only one block counts,
and those after it are scratch slots of speculative decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvferry.core.layout import HOLE
from kvferry.core.planner.build_copies import Pages
from kvferry.integrations.vllm.caches.cache_layout import is_state

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

TokenRange = tuple[int, int]
"""The first token, and the token after the last one."""

Slot = TypeVar("Slot")

NO_PAGES = Pages(ids=np.empty(0, dtype=np.int64))
"""The page list of a group into which nothing is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """One cache group that is transferred.

    Attributes:
        index: The group's index among all of vLLM's groups.
        tokens: How many tokens of a request one page covers, on all context-parallel ranks
            together; for a state, after how many tokens the state continues in the next page.
        is_state: Whether a page holds the recurrent state after some tokens, not tokens.
        window: To how many tokens a token attends, itself included, plus any that vLLM keeps in
            addition; 0 for all.
        chunk: Size in tokens of the chunks to which attention is limited; 0 for no chunks.
    """

    index: int
    tokens: int
    is_state: bool = False
    window: int = 0
    chunk: int = 0

    @property
    def needs_exact_length(self) -> bool:
        """Whether the group's pages serve exactly one prompt length.

        The pages of full attention also serve every shorter prompt.
        """
        return self.is_state or bool(self.window or self.chunk)

    def num_skipped_tokens(self, tokens: int) -> int:
        """Return how many of a request's first tokens its next token does not attend to.

        The formulas are those of ``get_num_skipped_tokens`` in vLLM's
        ``single_type_kv_cache_manager.py``, by which vLLM frees a request's first blocks.

        Args:
            tokens: How many tokens the request has.
        """
        if self.window:
            return max(0, tokens - self.window + 1)
        return tokens // self.chunk * self.chunk if self.chunk else 0

    def producer_pages(self, ids: Sequence[int], tokens: int) -> tuple[int, list[int]]:
        """Return the pages that a producer's ticket lists for a request.

        Args:
            ids: vLLM's ids of the request's blocks, by position.
            tokens: How many of the request's tokens were computed.

        Returns:
            The position of the first page among the request's blocks, and the pages' ids.
        """
        if self.is_state:
            return 0, list(self._state_slot(ids, tokens))
        ids = ids[: -(-tokens // self.tokens)]
        first = sum(1 for _ in takewhile(lambda page: page == HOLE, ids))
        return first, list(ids[first:])

    def consumer_pages(
        self, blocks: Sequence[KVCacheBlock], tokens: int
    ) -> tuple[TokenRange | None, Pages]:
        """Return the tokens that a consumer loads for a request, and the pages it loads them into.

        Args:
            blocks: vLLM's blocks of the request, by position. Blocks at the start that are cached
                already, or holes, are left alone; the load fills all others.
            tokens: How many of the request's tokens the producer hands over.

        Returns:
            The tokens to load, and the pages that the load fills. For a state, all tokens; ``None``
            and no pages if all tokens are cached.
        """
        if self.is_state:
            page = [block.block_id for block in self._state_slot(blocks, tokens)]
            return (0, tokens), Pages(ids=np.array(page, dtype=np.int64))
        cached = sum(1 for _ in takewhile(lambda b: b.is_null or b.block_hash is not None, blocks))
        if cached * self.tokens >= tokens:
            return None, NO_PAGES
        # A window may start with the next token: then nothing is loaded, and its page is zeroed.
        first = min(max(cached * self.tokens, self.num_skipped_tokens(tokens)), tokens)
        ids = [block.block_id for block in blocks[cached:]]
        return (first, tokens), Pages(ids=np.array(ids, dtype=np.int64), first_index=cached)

    def _state_slot(self, slots: Sequence[Slot], tokens: int) -> Sequence[Slot]:
        """Return the slot that holds the state after ``tokens`` tokens, as a sequence of one.

        vLLM's kernels find the slot in the same way (``mamba_get_block_table_tensor`` in
        ``v1/attention/backends/utils.py``).
        """
        index = (tokens - 1) // self.tokens
        return slots[index : index + 1]


def cache_groups(config: KVCacheConfig, context_size: int) -> tuple[CacheGroup, ...]:
    """Return the cache groups that are transferred, in vLLM's order.

    Args:
        config: The engine's cache configuration.
        context_size: Number of decode context-parallel ranks, over which the tokens of a group are
            distributed if its cache is sharded.
    """
    ids, groups = config.transfer_group_ids, config.transfer_groups
    return tuple(
        _cache_group(index, group.kv_cache_spec, context_size)
        for index, group in zip(ids, groups, strict=True)
    )


def _cache_group(index: int, spec: KVCacheSpec, context_size: int) -> CacheGroup:
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        SlidingWindowSpec,
        iter_layer_specs,
    )

    one = next(iter(iter_layer_specs(spec)))
    if is_state(spec):
        return CacheGroup(index=index, tokens=one.block_size, is_state=True)
    window, chunk = 0, 0
    if isinstance(one, SlidingWindowSpec):
        window = one.sliding_window + one.extra_retained_tokens
    elif isinstance(one, ChunkedLocalAttentionSpec):
        chunk = one.attention_chunk_size
    size = context_size if spec.dcp_sharded else 1
    return CacheGroup(index=index, tokens=spec.block_size * size, window=window, chunk=chunk)
