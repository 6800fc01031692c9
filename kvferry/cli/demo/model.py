"""The demo's model: its cache, its requests, and the shapes of engines that a user may name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from kvferry.core.errors import KVFerryError
from kvferry.testing.engines import CacheShape

LAYERS, HEADS, HEAD_DIM, DTYPE, ELEMENT_BYTES = 32, 8, 128, "bfloat16", 2
"""The dimensions are those of Llama 3 8B."""

ROW_BYTES = HEAD_DIM * ELEMENT_BYTES
"""Bytes of one head of one token."""
WORD_BYTES = 8
"""Bytes of a word: four elements, enough bits for a value that occurs only once."""
TOKEN_BYTES = LAYERS * 2 * HEADS * ROW_BYTES
"""Bytes of one token in all layers, K and V."""
ORDERS = ("HND", "NHD")
"""Orders within a page: all tokens of a head, then those of the next head; or all heads of a token,
then those of the next token."""
BLOCK_LIMIT = 1024
"""Largest number of tokens in a page."""
SPARE_PAGES = 4
"""Number of pages that belong to no request: page 0, whose id stands for a hole, and three others.

No load may change these pages.
"""

_SHAPE = re.compile(r"([0-9]{1,4})/(HND|NHD)/([0-9]{1,4})", re.IGNORECASE)


class DemoError(KVFerryError):
    """The demo cannot start or continue; the message says why."""


class Request(NamedTuple):
    """A request of the demo; its token ids count up from ``first_token``, and are in no other."""

    name: str
    first_token: int
    tokens: int


def shape_of(text: str, tp: int | None = None) -> CacheShape:
    """Return the shape that ``RANKS/ORDER/TOKENS`` names, or ``ORDER/TOKENS`` if ``tp`` is given.

    It has no room for a request yet. The K and the V of a layer are layers of the shape, whose
    elements are words.
    """
    found = _SHAPE.fullmatch(text if tp is None else f"{tp}/{text}")
    if found is None or not (1 <= int(found[1]) <= HEADS and 1 <= int(found[3]) <= BLOCK_LIMIT):
        ranks, example = (f"RANKS (1 to {HEADS})/", "2/HND/16") if tp is None else ("", "NHD/32")
        raise DemoError(
            f"{text!r} is no shape of an engine: write {ranks}ORDER ({' or '.join(ORDERS)})/TOKENS "
            f"(1 to {BLOCK_LIMIT}), such as {example}"
        )
    return CacheShape(
        tp=int(found[1]),
        heads_first=found[2].upper() == ORDERS[0],
        block=int(found[3]),
        layers=2 * LAYERS,
        model_heads=HEADS,
        dim=ROW_BYTES // WORD_BYTES,
        dtype="int64",
    )


def order_of(shape: CacheShape) -> str:
    """Return the order within a page, one of ``ORDERS``."""
    return ORDERS[not shape.heads_first]


def pages_of(shape: CacheShape, request: Request) -> int:
    """Return how many pages a request takes."""
    return -(-request.tokens // shape.block)


def with_room(shape: CacheShape, requests: Sequence[Request]) -> CacheShape:
    """Return a shape with pages for all requests, and ``SPARE_PAGES``."""
    return replace(shape, pages=sum(pages_of(shape, r) for r in requests) + SPARE_PAGES)


def requests_of(nbytes: int, count: int = 8) -> list[Request]:
    """Return requests of increasing length whose prompts together fill a cache."""
    total = max(-(-nbytes // TOKEN_BYTES), 1)
    count = min(count, total)
    ends = [total * k * (k + 1) // (count * (count + 1)) for k in range(count + 1)]
    lengths = [max(end - start, 1) for start, end in pairwise(ends)]
    starts = accumulate(lengths, initial=0)
    return [
        Request(f"demo-{number}", first, tokens)
        for number, (first, tokens) in enumerate(zip(starts, lengths, strict=False))
    ]


def scattered_pages(
    shape: CacheShape, requests: Sequence[Request], seed: int
) -> dict[Request, list[int]]:
    """Return the page ids of each request, scattered as in an engine that has run for a while."""
    counts = [pages_of(shape, request) for request in requests]
    free = 1 + np.random.default_rng(seed).permutation(sum(counts) + SPARE_PAGES - 1)
    ends = np.cumsum(counts)
    pages = (free[end - count : end].tolist() for count, end in zip(counts, ends, strict=True))
    return dict(zip(requests, pages, strict=True))
