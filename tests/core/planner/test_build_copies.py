"""``build_copies`` and ``unwritten_spans``: compared with the oracle, and in plain cases."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvferry.core.errors import PageError
from kvferry.core.layout import Layout
from kvferry.core.planner.build_copies import (
    CopyBatches,
    Pages,
    ReadRequest,
    Workspace,
    build_copies,
)
from kvferry.core.planner.plan import make_plan
from kvferry.core.planner.unwritten import first_written_tokens, unwritten_spans
from kvferry.core.transport.copies import Copies
from kvferry.core.transport.paged import PagedCopies
from tests.core.layouts import DIM, STATE, heads, layout, paged, plain_field, stacked
from tests.core.planner.oracle import pages

PAGE = 4 * 16 * DIM
"""Bytes of K, or of V, of one layer in a page of ``tests.core.layouts``."""


def request(
    token_range: tuple[int, int] | None, local: Pages | Sequence[int], remote: Pages | Sequence[int]
) -> ReadRequest:
    """Return a request for engines with one group."""
    near, far = (p if isinstance(p, Pages) else pages(p) for p in (local, remote))
    return ReadRequest(ranges=(token_range,), local=(near,), remote=(far,))


def copies_of(local: Layout, remote: Layout, read_request: ReadRequest) -> Copies:
    """Return the copies of a request between two engines of one rank each."""
    found = make_plan([local], [remote], 0)
    return build_copies(found.sources[0], read_request)


def blocks_of(tokens: int, order: str = "NHD") -> Layout:
    """Return an engine of one rank whose blocks have so many tokens."""
    return layout(heads(order=order, block=tokens), groups=[paged(tokens)])


@pytest.mark.parametrize(("block", "named"), [(4096, True), (1 << 19, False)])
def test_pages_in_which_strips_have_too_many_places_are_written_out(
    block: int, named: bool
) -> None:
    source = make_plan([blocks_of(16, "HND")], [blocks_of(block, "HND")], 0).sources[0]
    read_request = request((0, 16 * 20), list(range(40, 0, -2)), [1])
    found = CopyBatches(source, read_request, Workspace()).build_paged()
    assert isinstance(found, PagedCopies) == named
    assert found.total == build_copies(source, read_request).total
    again = CopyBatches(source, read_request, Workspace()).build_paged()
    if isinstance(found, PagedCopies) and isinstance(again, PagedCopies):
        assert [part.strips for part in again.parts] == [part.strips for part in found.parts]


@pytest.mark.parametrize(
    ("here", "there", "token_range", "missing", "first"),
    [
        (32, 16, (20, 64), 0, 16),
        (32, 32, (20, 64), 0, 0),
        (16, 32, (20, 64), 0, 16),
        (48, 32, (70, 96), 0, 64),
        (32, 32, (20, 64), 8, 8),
        (32, 32, (20, 64), 20, 20),
        (16, 32, (20, 64), 8, 16),
        (32, 16, (64, 64), 0, 64),
        (32, 16, (0, 64), 0, 0),
    ],
)
def test_the_first_token_that_is_written(
    here: int, there: int, token_range: tuple[int, int], missing: int, first: int
) -> None:
    """Where the remote page itself lacks its first tokens, they count as not written."""
    near, far = blocks_of(here), blocks_of(there)
    remote = Pages(ids=np.arange(1, 9, dtype=np.int64), missing=missing)
    read_request = request(token_range, range(1, 1 + 96 // here), remote)
    assert first_written_tokens(near, make_plan([near], [far], 0), read_request) == (first,)


FIVE = stacked(5)


@pytest.mark.parametrize(
    ("local", "remote", "read_request", "lengths"),
    [
        # Adjacent pages are one copy, if they are adjacent on both sides.
        (FIVE, FIVE, request((0, 80), [2, 3, 4, 6, 7], [5, 6, 7, 8, 9]), [30 * PAGE, 20 * PAGE]),
        (stacked(1), stacked(1), request((0, 32), [2, 3], [6, 5]), [2 * PAGE] * 2),
        # Blocks of different sizes are copied by the smaller one.
        (blocks_of(32), blocks_of(16), request((0, 64), [1, 2], [4, 6, 1, 9]), [PAGE] * 4),
        (blocks_of(16), blocks_of(32), request((0, 64), [4, 6, 1, 9], [1, 2]), [PAGE] * 4),
        (blocks_of(32), blocks_of(16), request((0, 64), [1, 2], [4, 5, 6, 7]), [4 * PAGE]),
        (stacked(2), stacked(2), request(None, [1], [2]), []),
        (stacked(2), stacked(2), request((0, 0), [1], [2]), []),
    ],
)
def test_the_lengths_of_copies(
    local: Layout, remote: Layout, read_request: ReadRequest, lengths: list[int]
) -> None:
    assert copies_of(local, remote, read_request).nbytes.tolist() == lengths


def test_tokens_that_the_remote_page_lacks_are_refused() -> None:
    one = blocks_of(32)
    remote = Pages(ids=np.array([4, 7], dtype=np.int64), first_index=1, missing=9)
    assert len(copies_of(one, one, request((41, 96), range(1, 4), remote))) == 2
    with pytest.raises(PageError, match="token 40 is wanted, and its first page has the tokens"):
        copies_of(one, one, request((40, 96), range(1, 4), remote))


ONE_PAGE = pages([1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(
            ({"ids": wrong}, r"pass an? .*int64 array")
            for wrong in ([1], np.zeros(2), np.zeros((1, 2), np.int64), np.zeros(2, np.int32))
        ),
        *(({"first_index": wrong}, f"first block index {wrong}") for wrong in (-1, 1 << 40)),
        *(({"missing": wrong}, f"{wrong} missing tokens") for wrong in (-1, 1 << 40)),
    ],
)
def test_invalid_page_lists_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PageError, match=message):
        Pages(**({"ids": ONE_PAGE.ids} | given))


def lists(local: int, remote: int, *ranges: tuple[int, int] | None) -> ReadRequest:
    """Return a request with so many page lists of one page."""
    return ReadRequest(ranges=ranges, local=(ONE_PAGE,) * local, remote=(ONE_PAGE,) * remote)


NOT_LISTED = "is wanted, and its page list has the block indices"
AT_PAGE = "is wanted, and its page id there is"


@pytest.mark.parametrize(
    ("message", "read_request"),
    [
        (f"local group 0: block index 1 {NOT_LISTED} [0, 1", request((0, 17), [1], [1, 2])),
        (f"remote group 0: block index 1 {NOT_LISTED} [0, ", request((0, 17), [1, 2], [1])),
        (f"remote group 0: block index 0 {NOT_LISTED} [1, ", request((0, 16), [1], pages([1], 1))),
        (
            f"remote group 0: block index 1 {AT_PAGE} 0, a hole",
            request((0, 32), [1, 2], [1, 0]),
        ),
        (f"local group 0: block index 0 {AT_PAGE} 0, a hole", request((0, 16), [0], [1])),
        (f"remote group 0: block index 0 {AT_PAGE} 100; ids lie in", request((0, 16), [1], [100])),
        (f"remote group 0: block index 0 {AT_PAGE} -1; ids lie in", request((0, 16), [1], [-1])),
        ("local group 0: tokens up to 1099511627776 are", request((0, (1 << 40) - 1), [1], [1])),
        ("token range [16, 0) of local group 0", request((16, 0), [1], [1])),
        ("token range [0, 1099511627776) of local group 0", request((0, 1 << 40), [1], [1])),
        ("2 ranges for 1 groups", lists(1, 1, (0, 1), None)),
        ("2 local page lists for 1 groups", lists(2, 1, (0, 1))),
        ("0 remote page lists for 1 groups", lists(1, 0, (0, 1))),
    ],
)
def test_page_lists_that_do_not_fit_the_request_are_refused(
    message: str, read_request: ReadRequest
) -> None:
    with pytest.raises(PageError, match=re.escape(message)):
        copies_of(blocks_of(16), blocks_of(16), read_request)


def test_other_pages_that_cannot_be_are_refused() -> None:
    state = layout(plain_field(page_stride=64, pages=20, unit=64), groups=[STATE])
    with pytest.raises(PageError, match="a state stands for all tokens from 0 on"):
        copies_of(state, state, request((1, 16), [3], [7]))
    one = layout(heads())
    with pytest.raises(PageError, match="local group 0: page id 100 does not lie in 0 to 99"):
        unwritten_spans(one, make_plan([one], [one], 0), request((0, 16), [3, 100], [4]))
