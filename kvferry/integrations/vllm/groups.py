"""An engine's groups as its scheduler sees them: which of a request's pages are handed over.

vLLM lists a request's blocks by position. Where a group attends to a window only, the blocks before
it are holes; of a state's pages one counts, and those behind it are scratch slots of speculative
decoding.
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
Slot = TypeVar("Slot")

NOTHING = Pages(ids=np.empty(0, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """One group that is transferred.

    Attributes:
        index: among all of vLLM's groups.
        tokens: how many a page covers, those of all context ranks together; for a state, after how
            many it goes on in the next page.
        is_state: whether a page is the state after some tokens.
        window: how many tokens before the next one are attended to; 0 for all of them.
        chunk: tokens are attended to within chunks of so many only; 0 where they are not.
    """

    index: int
    tokens: int
    is_state: bool = False
    window: int = 0
    chunk: int = 0

    @property
    def bounded(self) -> bool:
        """Whether its pages serve one next token only, and not the one before it."""
        return self.is_state or bool(self.window or self.chunk)

    def skipped(self, tokens: int) -> int:
        """How many of the first ``tokens`` tokens are attended to no more.

        These are the formulas of ``get_num_skipped_tokens`` in vLLM's
        ``single_type_kv_cache_manager.py``, by which it frees a request's first blocks.
        """
        if self.window:
            return max(0, tokens - self.window + 1)
        return tokens // self.chunk * self.chunk if self.chunk else 0

    def offered(self, ids: Sequence[int], tokens: int) -> tuple[int, list[int]]:
        """What a producer offers of a request after ``tokens`` tokens.

        Args:
            ids: vLLM's list of the request's blocks.
            tokens: that were computed.

        Returns:
            The block index of the first page, and the pages.
        """
        if self.is_state:
            return 0, list(self._state(ids, tokens))
        ids = ids[: -(-tokens // self.tokens)]
        first = sum(1 for _ in takewhile(lambda page: page == HOLE, ids))
        return first, list(ids[first:])

    def wanted(
        self, blocks: Sequence[KVCacheBlock], tokens: int
    ) -> tuple[TokenRange | None, Pages]:
        """What a consumer wants of a request whose first ``tokens`` tokens are handed over.

        Args:
            blocks: vLLM's list of the request's blocks; those at its front are cached here, or
                holes, and every other one is the load's to fill.
            tokens: that are handed over.

        Returns:
            The tokens to load (all of them for a state), and the pages that are the load's.
        """
        if self.is_state:
            page = [block.block_id for block in self._state(blocks, tokens)]
            return (0, tokens), Pages(ids=np.array(page, dtype=np.int64))
        ours = sum(1 for _ in takewhile(lambda b: b.is_null or b.block_hash is not None, blocks))
        if ours * self.tokens >= tokens:
            return None, NOTHING
        # Of a window that starts with the next token nothing is loaded; its page is zeroed.
        first = min(max(ours * self.tokens, self.skipped(tokens)), tokens)
        ids = [block.block_id for block in blocks[ours:]]
        return (first, tokens), Pages(ids=np.array(ids, dtype=np.int64), first_index=ours)

    def _state(self, slots: Sequence[Slot], tokens: int) -> Sequence[Slot]:
        """The slot of the state after ``tokens`` tokens; vLLM's kernels find it the same way
        (``mamba_get_block_table_tensor`` in ``v1/attention/backends/utils.py``)."""
        index = (tokens - 1) // self.tokens
        return slots[index : index + 1]


def cache_groups(config: KVCacheConfig, context_size: int) -> tuple[CacheGroup, ...]:
    """The groups that are transferred.

    Args:
        config: the engine's.
        context_size: over how many ranks tokens are dealt out, where a cache is sharded so.
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
