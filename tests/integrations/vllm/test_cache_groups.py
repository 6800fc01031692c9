"""Which pages of a request are handed over, group by group. Needs no vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.integrations.vllm.cache_groups import CacheGroup
from tests.integrations.vllm.halves import listed

FULL = CacheGroup(index=0, tokens=16)
WINDOW = CacheGroup(index=1, tokens=16, window=20)
CHUNKS = CacheGroup(index=2, tokens=16, chunk=32)
STATE = CacheGroup(index=3, tokens=1024, is_state=True)
ALIGNED_STATE = CacheGroup(index=4, tokens=32, is_state=True)
RING = CacheGroup(index=5, tokens=0, is_state=True)


@pytest.mark.parametrize(
    ("group", "ids", "tokens", "offered"),
    [
        (FULL, [5, 6, 7], 40, (0, [5, 6, 7])),
        (FULL, [5, 6, 7], 32, (0, [5, 6])),
        (FULL, [5, 6, 7, 8], 33, (0, [5, 6, 7])),
        (WINDOW, [0, 0, 7, 8], 60, (2, [7, 8])),
        (CHUNKS, [0, 0], 32, (2, [])),
        (STATE, [9, 101, 102], 700, (0, [9])),
        (ALIGNED_STATE, [0, 0, 9, 101], 70, (0, [9])),
        (ALIGNED_STATE, [0, 9, 101, 102], 64, (0, [9])),
        (ALIGNED_STATE, [9], 1, (0, [9])),
        (RING, [9], 1, (0, [9])),
        (RING, [9], 700, (0, [9])),
    ],
)
def test_offered(
    group: CacheGroup, ids: list[int], tokens: int, offered: tuple[int, list[int]]
) -> None:
    assert group.producer_pages(ids, tokens) == offered


@pytest.mark.parametrize(
    ("group", "given_blocks", "tokens", "wanted", "first_index", "ids"),
    [
        (FULL, listed(5, 6, 7), 40, (0, 40), 0, [5, 6, 7]),
        (FULL, listed(5, 6, 7, cached=2), 40, (32, 40), 2, [7]),
        (FULL, listed(5, 6, 7, cached=3), 40, None, 0, []),
        (FULL, listed(5, 6, 7, 8), 40, (0, 40), 0, [5, 6, 7, 8]),
        (WINDOW, listed(0, 0, 7, 8), 60, (41, 60), 2, [7, 8]),
        (WINDOW, listed(0, 6, 7, 8, cached=3), 60, (48, 60), 3, [8]),
        (CHUNKS, listed(0, 0, 7), 40, (32, 40), 2, [7]),
        (STATE, listed(9, 101, 102), 700, (0, 700), 0, [9]),
        (ALIGNED_STATE, listed(0, 0, 9, 101), 70, (0, 70), 0, [9]),
        (RING, listed(9), 700, (0, 700), 0, [9]),
    ],
)
def test_wanted(
    group: CacheGroup,
    given_blocks: list[Any],
    tokens: int,
    wanted: tuple[int, int] | None,
    first_index: int,
    ids: list[int],
) -> None:
    got, pages = group.consumer_pages(given_blocks, tokens)
    assert (got, pages.first_index, pages.ids.tolist()) == (wanted, first_index, ids)


@given(
    tokens=st.integers(1, 400),
    here=st.sampled_from([8, 16, 24, 32]),
    there=st.sampled_from([8, 16, 24, 32]),
    window=st.integers(0, 60),
    chunk=st.sampled_from([0, 24, 32]),
)
def test_what_is_wanted_is_offered(
    tokens: int, here: int, there: int, window: int, chunk: int
) -> None:
    """Two engines that free what they do not attend to need no more than the other still has."""
    near = CacheGroup(index=0, tokens=here, window=window, chunk=chunk)
    far = CacheGroup(index=0, tokens=there, window=window, chunk=chunk)

    def held(group: CacheGroup) -> list[int]:
        gone = group.num_skipped_tokens(tokens) // group.tokens
        count = -(-tokens // group.tokens)
        return [0] * min(gone, count) + list(range(1, count - min(gone, count) + 1))

    first, pages = far.producer_pages(held(far), tokens)
    wanted, mine = near.consumer_pages(listed(*held(near)), tokens)
    if wanted is None or wanted[0] == wanted[1]:
        return
    assert first * there <= wanted[0] < wanted[1] <= (first + len(pages)) * there
    assert mine.first_index * here <= wanted[0]


@pytest.mark.parametrize(
    ("group", "first", "token", "missing"),
    [
        (WINDOW, 2, 2 * WINDOW.tokens, 0),
        (WINDOW, 2, 2 * WINDOW.tokens + 5, 5),
        (WINDOW, 3, 2 * WINDOW.tokens + 5, 0),
        (CHUNKS, 1, CHUNKS.tokens + 1, 1),
        (FULL, 0, FULL.tokens + 1, 0),
        (STATE, 0, 7, 0),
        (RING, 0, 7, 0),
    ],
)
def test_tokens_that_a_loaded_page_lacks(
    group: CacheGroup, first: int, token: int, missing: int
) -> None:
    assert group.missing_tokens(first, token) == missing


def test_bounded_are_those_that_cannot_go_back() -> None:
    groups = FULL, WINDOW, CHUNKS, STATE, RING
    assert [group.needs_exact_length for group in groups] == [False, True, True, True, True]
