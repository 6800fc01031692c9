"""Pages that a load has not filled whole never get a hash. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.integrations.vllm.cache_groups import CacheGroup
from kvferry.integrations.vllm.config import ConfigError
from kvferry.integrations.vllm.prefix_cache import PrefixCache

FULL = CacheGroup(index=0, tokens=16)
WINDOW = CacheGroup(index=1, tokens=16, window=20)
STATE = CacheGroup(index=2, tokens=1024, is_state=True)
GROUPS = (FULL, WINDOW, STATE)


def manager(*records: dict[str, int]) -> Any:
    """What vLLM 0.29 to 0.33 have of a ``KVCacheManager``, as far as the connector asks for it."""
    groups = tuple(SimpleNamespace(num_cached_block=record) for record in records)
    return SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=groups))


@pytest.mark.parametrize(
    ("first_tokens", "found", "hashed"),
    [
        ((32, 32, 0), False, 1),
        ((32, 37, 0), True, 3),
        ((5, 0, 0), False, 1),
        ((0, 7, 0), True, 1),
    ],
)
def test_the_page_in_which_a_window_begins(
    first_tokens: tuple[int, ...], found: bool, hashed: int
) -> None:
    """vLLM goes on with the blocks after it; fewer than it had before are never set."""
    records: list[dict[str, int]] = [{"r": 2}, {"r": 1}, {"r": 0}]
    cache = PrefixCache(GROUPS, is_used=True)
    cache.bind(manager(*records))
    cache.check()
    assert cache.keep_out("r", first_tokens) is found
    assert records == [{"r": 2}, {"r": hashed}, {"r": 0}]


def test_nothing_is_set_where_no_prefix_is_cached() -> None:
    records: list[dict[str, int]] = [{}, {}, {}]
    cache = PrefixCache(GROUPS)
    cache.bind(manager(*records))
    assert cache.keep_out("r", (0, 7, 0))
    assert records == [{}, {}, {}]


@pytest.mark.parametrize(
    "unknown", [SimpleNamespace(), manager(), manager({}), SimpleNamespace(coordinator=None)]
)
def test_a_vllm_that_keeps_its_prefix_cache_otherwise_is_refused(unknown: Any) -> None:
    cache = PrefixCache(GROUPS, is_used=True)
    cache.bind(unknown)
    with pytest.raises(ConfigError, match="--no-enable-prefix-caching"):
        cache.check()


def test_a_vllm_that_does_not_show_its_prefix_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="--no-enable-prefix-caching"):
        PrefixCache(GROUPS, is_used=True).check()
    PrefixCache(GROUPS).check()
    PrefixCache((FULL, STATE), is_used=True).check()
