"""The demo's model: the content of its KV cache, and where each engine stores it.

The value of every element depends on what it is (request, layer, K or V, token, head, element) and
never on where it is stored, so that it can be checked without the planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import KVFerryError
from kvferry.core.layout import Field, Group, GroupKind, Layout, axis
from kvferry.core.memory import region_of

LAYERS, HEADS, HEAD_DIM, DTYPE, ELEMENT_BYTES = 32, 8, 128, "bfloat16", 2
"""The dimensions are those of Llama 3 8B."""

ROW_BYTES = HEAD_DIM * ELEMENT_BYTES
"""Bytes of one head of one token."""
WORDS = ROW_BYTES // 8
"""Number of words of eight bytes in one head of one token."""
TOKEN_BYTES = LAYERS * 2 * HEADS * ROW_BYTES
"""Bytes of one token in all layers, K and V."""
TOKEN_LIMIT = 1 << 32
"""More than the number of tokens in any request."""
ORDERS = ("HND", "NHD")
BLOCK_LIMIT = 1024
"""Largest number of tokens in a page."""
SPARE_PAGES = 4
"""Number of pages that belong to no request: page 0, whose id stands for a hole, and three others.

No load may change these pages.
"""

POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
"""The word that fills decode's cache before the loads."""
_SCATTER = np.uint64(0x9E37_79B9_7F4A_7C15)

Words = npt.NDArray[np.uint64]
"""An array of words. A word holds four elements, enough bits for a value that occurs only once."""


class DemoError(KVFerryError):
    """The demo cannot start or continue; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How an engine stores the cache.

    Attributes:
        tp: Number of tensor-parallel ranks, which share the heads.
        order: Order within a page: ``HND`` (all tokens of a head, then those of the next head) or
            ``NHD`` (all heads of a token, then those of the next token).
        block: Tokens per page.

    Raises:
        DemoError: No engine of this model can have this shape.
    """

    tp: int
    order: str
    block: int

    def __post_init__(self) -> None:
        if not 1 <= self.tp <= HEADS:
            raise DemoError(f"{self.tp} ranks: the model has {HEADS} heads, so 1 to {HEADS}")
        if self.order not in ORDERS:
            raise DemoError(f"order {self.order!r}: choose {' or '.join(ORDERS)}")
        if not 1 <= self.block <= BLOCK_LIMIT:
            raise DemoError(f"{self.block} tokens a page: choose 1 to {BLOCK_LIMIT}")

    def heads(self, rank: int) -> range:
        """Return the indices of the heads that a rank stores."""
        return range(HEADS * rank // self.tp, HEADS * (rank + 1) // self.tp)

    def pages(self, tokens: int) -> int:
        """Return how many pages a number of tokens takes."""
        return -(-tokens // self.block)

    def page_bytes(self, rank: int) -> int:
        """Return the size in bytes of a page of K, or of V, of one layer on a rank."""
        return self.block * len(self.heads(rank)) * ROW_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request of the demo.

    Attributes:
        number: The request's number, which is also the seed of the random tokens of its prompt.
        tokens: Number of tokens in the prompt.
    """

    number: int
    tokens: int

    @property
    def name(self) -> str:
        """The request's id."""
        return f"demo-{self.number}"

    @property
    def prompt(self) -> npt.NDArray[np.int64]:
        """The token ids of the prompt, which both engines know."""
        return np.random.default_rng(self.number).integers(0, 128_256, self.tokens)


def shape_of(text: str, tp: int | None = None) -> Shape:
    """Return the shape that an option's text names.

    Args:
        text: ``RANKS/ORDER/TOKENS`` such as ``2/HND/16``, or ``ORDER/TOKENS`` if ``tp`` is given.
        tp: Number of ranks; ``None`` if the text has it.

    Raises:
        DemoError: The text is written in another way, or there is no such shape.
    """
    pattern = "ORDER/TOKENS" if tp else "RANKS/ORDER/TOKENS"
    match (*([str(tp)] if tp else []), *text.split("/")):
        case (ranks, order, block) if ranks.isdecimal() and block.isdecimal():
            return Shape(tp=int(ranks), order=order.upper(), block=int(block))
    example = "NHD/32" if tp else "2/HND/16"
    raise DemoError(f"{text!r} is no shape of an engine: write {pattern}, such as {example}")


def requests_of(nbytes: int, count: int = 8) -> list[Request]:
    """Return requests of increasing length whose prompts together fill a cache.

    Args:
        nbytes: Size of the cache in bytes, rounded up to whole tokens.
        count: Number of requests; fewer if the cache has fewer tokens.
    """
    total = max(-(-nbytes // TOKEN_BYTES), 1)
    count = min(count, total)
    ends = [total * k * (k + 1) // (count * (count + 1)) for k in range(count + 1)]
    lengths = [max(end - start, 1) for start, end in pairwise(ends)]
    return [Request(number=number, tokens=tokens) for number, tokens in enumerate(lengths)]


def scattered_pages(shape: Shape, requests: Sequence[Request], seed: int) -> list[list[int]]:
    """Return the page ids of each request, scattered as in an engine that has run for a while.

    Args:
        shape: How the engine stores the cache.
        requests: The requests.
        seed: Seed of the random order. Engines with different seeds use different pages.
    """
    counts = [shape.pages(request.tokens) for request in requests]
    free = 1 + np.random.default_rng(seed).permutation(sum(counts) + SPARE_PAGES - 1)
    ends = np.cumsum(counts)
    return [free[end - count : end].tolist() for count, end in zip(counts, ends, strict=True)]


def make_cache(shape: Shape, rank: int, requests: Sequence[Request], fill: np.uint64) -> Words:
    """Return a rank's cache, an array of shape (layers, 2 for K and V, pages, ..., ``WORDS``).

    The dots stand for (heads, tokens) if the order is HND, otherwise for (tokens, heads).
    ``WORDS`` is the number of 8-byte words in one head of one token.

    Args:
        shape: How the engine stores the cache.
        rank: The rank's index.
        requests: The requests for which the cache must have room.
        fill: The value of every word.
    """
    heads, pages = len(shape.heads(rank)), sum(shape.pages(r.tokens) for r in requests)
    inner = (heads, shape.block) if shape.order == "HND" else (shape.block, heads)
    return np.full((LAYERS, 2, pages + SPARE_PAGES, *inner, WORDS), fill, dtype=np.uint64)


def layout_of(shape: Shape, rank: int, cache: Words) -> Layout:
    """Return the layout of a rank's cache: two fields per layer in one region.

    Args:
        shape: How the engine stores the cache.
        rank: The rank's index.
        cache: The cache that ``make_cache`` returned; the layout has only its address.
    """
    heads, page = shape.heads(rank), shape.page_bytes(rank)
    token, head = ROW_BYTES, shape.block * ROW_BYTES
    if shape.order == "NHD":
        token, head = len(heads) * ROW_BYTES, ROW_BYTES
    pages = cache.shape[2]
    fields = tuple(
        Field(
            key=f"layers.{layer}/{name}",
            group=0,
            region=0,
            offset=(2 * layer + index) * pages * page,
            page_stride=page,
            pages=pages,
            dtype=DTYPE,
            unit=ROW_BYTES,
            tokens=axis((shape.block, token)),
            shard=axis((len(heads), head)),
            shard_range=(heads.start, heads.stop),
        )
        for layer in range(LAYERS)
        for index, name in enumerate("kv")
    )
    group = Group(kind=GroupKind.PAGED, block_tokens=shape.block)
    return Layout(regions=(region_of(cache),), groups=(group,), fields=fields)


def values(request: Request, layer: int, index: int, heads: range) -> Words:
    """Return the words of K or of V of a request in one layer; no word occurs twice.

    Args:
        request: The request.
        layer: The layer's index.
        index: 0 for K, 1 for V.
        heads: The indices of the heads to return.

    Returns:
        An array of shape (tokens, heads, ``WORDS``).
    """
    tensor = (request.number * LAYERS + layer) * 2 + index
    token = np.arange(request.tokens, dtype=np.uint64)[:, None, None]
    head = np.arange(heads.start, heads.stop, dtype=np.uint64)[None, :, None]
    word = np.arange(WORDS, dtype=np.uint64)[None, None, :]
    row = (np.uint64(tensor * TOKEN_LIMIT) + token) * np.uint64(HEADS) + head
    # The factor is odd, so different numbers stay different; the products use all eight bytes.
    return (row * np.uint64(WORDS) + word + np.uint64(1)) * _SCATTER


def compute(shape: Shape, rank: int, cache: Words, request: Request, pages: Sequence[int]) -> None:
    """Write a request's values into its pages on a rank, and zeros after its last token.

    Args:
        shape: How the engine stores the cache.
        rank: The rank's index.
        cache: The rank's cache, from ``make_cache``.
        request: The request.
        pages: The ids of the request's pages.
    """
    heads = shape.heads(rank)
    rows = np.zeros((len(pages) * shape.block, len(heads), WORDS), dtype=np.uint64)
    for layer in range(LAYERS):
        for index in range(2):
            rows[: request.tokens] = values(request, layer, index, heads)
            blocks = rows.reshape(len(pages), shape.block, len(heads), WORDS)
            cache[layer, index, pages] = blocks.swapaxes(1, 2) if shape.order == "HND" else blocks


def wrong_bytes(
    shape: Shape, rank: int, cache: Words, request: Request, pages: Sequence[int]
) -> int:
    """Return how many bytes of a request's pages are wrong; after its last token, they must be 0.

    Args:
        shape: How the engine stores the cache.
        rank: The rank's index.
        cache: The rank's cache, from ``make_cache``.
        request: The request.
        pages: The ids of the request's pages.
    """
    heads, wrong = shape.heads(rank), 0
    for layer in range(LAYERS):
        for index in range(2):
            blocks = cache[layer, index, pages]
            if shape.order == "HND":
                blocks = blocks.swapaxes(1, 2)
            rows = blocks.reshape(-1, len(heads), WORDS)
            right = values(request, layer, index, heads)
            wrong += _differing(rows[: request.tokens], right)
            wrong += int(np.count_nonzero(rows[request.tokens :].view(np.uint8)))
    return wrong


def wrong_spare_bytes(cache: Words, used: Sequence[int]) -> int:
    """Return how many bytes of unused pages are not ``POISON`` any more.

    Args:
        cache: A cache that ``make_cache`` filled with ``POISON``.
        used: The ids of the pages of all requests.
    """
    spare = np.setdiff1d(np.arange(cache.shape[2]), used)
    poison = np.broadcast_to(POISON, cache[0, 0, spare].shape)
    return sum(
        _differing(cache[layer, index, spare], poison)
        for layer in range(LAYERS)
        for index in range(2)
    )


def _differing(found: Words, right: Words) -> int:
    """Return the number of bytes in which two arrays of equal shape differ."""
    if np.array_equal(found, right):
        return 0
    there = np.ascontiguousarray(found).view(np.uint8)
    return int(np.count_nonzero(there != np.ascontiguousarray(right).view(np.uint8)))
