"""Keep pages that a load has not filled whole out of vLLM's prefix cache.

An attention window (or chunk) may begin inside a page here, where the producer, whose blocks have
another size, has freed the page's earlier tokens: they are zero here. The request does not need
them, but a later prompt with the same beginning might, if the page got a hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.cache_groups import CacheGroup
from kvferry.integrations.vllm.config import ConfigError

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


class PrefixCache:
    """The prefix cache of an engine; ``is_used`` if the engine loads, and caches prefixes."""

    def __init__(self, groups: Sequence[CacheGroup], *, is_used: bool = False) -> None:
        self._groups = groups
        self._is_used = is_used
        # Of each group with gaps: by request, how many of its first blocks vLLM hashes no more.
        self._hashed: dict[int, dict[str, int]] = {}

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's record of which blocks of a request have their hashes."""
        for group in self._groups:
            hashed = versions.hashed_blocks(manager, group.index) if group.has_gap else None
            if hashed is not None:
                self._hashed[group.index] = hashed

    def check(self) -> None:
        """Raise ``ConfigError`` if pages that are not whole would enter the prefix cache."""
        lacks = any(group.has_gap and group.index not in self._hashed for group in self._groups)
        if self._is_used and lacks:
            raise ConfigError(
                "this vLLM keeps its prefix cache in a way that the connector does not know, so "
                "pages of attention windows that are not whole would enter it: set "
                "--no-enable-prefix-caching"
            )

    def keep_out(self, request_id: str, first_tokens: Sequence[int]) -> bool:
        """Keep the pages of a load that are not whole from being cached; return whether any are.

        Call this when the load has succeeded, before vLLM makes the hashes of its blocks. They stay
        without a hash until the request ends or is preempted. ``first_tokens`` are by group.
        """
        found = False
        for group, token in zip(self._groups, first_tokens, strict=True):
            if group.splits_page(token):
                found = True
                if self._is_used:
                    hashed = self._hashed[group.index]
                    hashed[request_id] = max(hashed.get(request_id, 0), token // group.tokens + 1)
        return found
