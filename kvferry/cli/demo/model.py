"""The demo's model: its cache, its requests, and the shapes of engines that a user may name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

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


class DemoError(KVFerryError):
    """The demo cannot start or continue; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request of the demo.

    Attributes:
        number: The request's number.
        first_token: The id of the first token of its prompt; the next ones follow it.
        tokens: Number of tokens in the prompt.
    """

    number: int
    first_token: int
    tokens: int

    @property
    def name(self) -> str:
        """The request's id."""
        return f"demo-{self.number}"

    @property
    def prompt(self) -> range:
        """The token ids of the prompt, which both engines know, and no other request has."""
        return range(self.first_token, self.first_token + self.tokens)


def shape_of(text: str, tp: int | None = None) -> CacheShape:
    """Return the shape that ``RANKS/ORDER/TOKENS`` names, or ``ORDER/TOKENS`` if ``tp`` is given.

    It has no room for a request yet. The K and the V of a layer are layers of the shape, whose
    elements are words.
    """
    match (*([str(tp)] if tp else []), *text.split("/")):
        case (ranks, order, block) if ranks.isdecimal() and block.isdecimal():
            tp, order, tokens = int(ranks), order.upper(), int(block)
        case _:
            pattern, example = "RANKS/ORDER/TOKENS", "2/HND/16"
            if tp:
                pattern, example = "ORDER/TOKENS", "NHD/32"
            raise DemoError(
                f"{text!r} is no shape of an engine: write {pattern}, such as {example}"
            )
    if not 1 <= tp <= HEADS:
        raise DemoError(f"{tp} ranks: the model has {HEADS} heads, so 1 to {HEADS}")
    if order not in ORDERS:
        raise DemoError(f"order {order!r}: choose {' or '.join(ORDERS)}")
    if not 1 <= tokens <= BLOCK_LIMIT:
        raise DemoError(f"{tokens} tokens a page: choose 1 to {BLOCK_LIMIT}")
    return CacheShape(
        tp=tp,
        heads_first=order == ORDERS[0],
        block=tokens,
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
        Request(number=number, first_token=first, tokens=tokens)
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
