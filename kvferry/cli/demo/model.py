"""The demo's model: what its KV cache holds, and where each engine keeps it.

The value of every element follows from what it is (request, layer, K or V, token, head, element)
and never from where it lies, so that a check of it owes nothing to the planner.
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
"""Those of Llama 3 8B."""

ROW_BYTES = HEAD_DIM * ELEMENT_BYTES
"""One head of one token."""
WORDS = ROW_BYTES // 8
TOKEN_BYTES = LAYERS * 2 * HEADS * ROW_BYTES
TOKEN_LIMIT = 1 << 32
ORDERS = ("HND", "NHD")
BLOCK_LIMIT = 1024
SPARE_PAGES = 4
"""Pages of no request: page 0, which stands for none, and some that must stay as they are."""

POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
_SCATTER = np.uint64(0x9E37_79B9_7F4A_7C15)

Words = npt.NDArray[np.uint64]
"""Elements by the eight bytes: two bytes are too few to say which element they are."""


class DemoError(KVFerryError):
    """The demo cannot be run, or cannot go on; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How an engine keeps the cache.

    Attributes:
        tp: over how many ranks the heads are spread.
        order: ``HND`` (a page has its tokens inside its heads) or ``NHD`` (heads inside tokens).
        block: tokens per page.

    Raises:
        DemoError: no engine of this model can have that shape.
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
        """The heads that a rank holds."""
        return range(HEADS * rank // self.tp, HEADS * (rank + 1) // self.tp)

    def pages(self, tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-tokens // self.block)

    def page_bytes(self, rank: int) -> int:
        """The bytes of one page of one layer's K, or V."""
        return self.block * len(self.heads(rank)) * ROW_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, by number, and how many tokens it has."""

    number: int
    tokens: int

    @property
    def name(self) -> str:
        return f"demo-{self.number}"

    @property
    def prompt(self) -> npt.NDArray[np.int64]:
        """Its token ids, which both engines know."""
        return np.random.default_rng(self.number).integers(0, 128_256, self.tokens)


def shape_of(text: str, tp: int | None = None) -> Shape:
    """A shape as it is written on the command line: ``2/HND/16``, or ``HND/16`` for one ``tp``.

    Raises:
        DemoError: it is not written like that, or there is no such shape.
    """
    pattern = "ORDER/TOKENS" if tp else "RANKS/ORDER/TOKENS"
    match (*([str(tp)] if tp else []), *text.split("/")):
        case (ranks, order, block) if ranks.isdecimal() and block.isdecimal():
            return Shape(tp=int(ranks), order=order.upper(), block=int(block))
    example = "NHD/32" if tp else "2/HND/16"
    raise DemoError(f"{text!r} is no shape of an engine: write {pattern}, such as {example}")


def requests_of(nbytes: int, count: int = 8) -> list[Request]:
    """Requests of rising length whose pages have so many bytes together, or a little more."""
    total = max(-(-nbytes // TOKEN_BYTES), 1)
    count = min(count, total)
    ends = [total * k * (k + 1) // (count * (count + 1)) for k in range(count + 1)]
    lengths = [max(end - start, 1) for start, end in pairwise(ends)]
    return [Request(number=number, tokens=tokens) for number, tokens in enumerate(lengths)]


def scattered_pages(shape: Shape, requests: Sequence[Request], seed: int) -> list[list[int]]:
    """Page ids for each request, in no order, as in an engine that has run for a while."""
    counts = [shape.pages(request.tokens) for request in requests]
    free = 1 + np.random.default_rng(seed).permutation(sum(counts) + SPARE_PAGES - 1)
    ends = np.cumsum(counts)
    return [free[end - count : end].tolist() for count, end in zip(counts, ends, strict=True)]


def make_cache(shape: Shape, rank: int, requests: Sequence[Request], fill: np.uint64) -> Words:
    """(layer, K or V, page, ...) in one buffer, every byte of it written once."""
    heads, pages = len(shape.heads(rank)), sum(shape.pages(r.tokens) for r in requests)
    inner = (heads, shape.block) if shape.order == "HND" else (shape.block, heads)
    return np.full((LAYERS, 2, pages + SPARE_PAGES, *inner, WORDS), fill, dtype=np.uint64)


def layout_of(shape: Shape, rank: int, cache: Words) -> Layout:
    """What this rank says about its cache: two fields per layer in one region."""
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
    """(token, head, word) of one layer's K (``index`` 0) or V (1): no two words are equal."""
    tensor = (request.number * LAYERS + layer) * 2 + index
    token = np.arange(request.tokens, dtype=np.uint64)[:, None, None]
    head = np.arange(heads.start, heads.stop, dtype=np.uint64)[None, :, None]
    word = np.arange(WORDS, dtype=np.uint64)[None, None, :]
    row = (np.uint64(tensor * TOKEN_LIMIT) + token) * np.uint64(HEADS) + head
    # Odd, so that different numbers stay different, and every byte of them is put to use.
    return (row * np.uint64(WORDS) + word + np.uint64(1)) * _SCATTER


def compute(shape: Shape, rank: int, cache: Words, request: Request, pages: Sequence[int]) -> None:
    """What a prefill leaves in a rank's pages: the values, and zeros after the last token."""
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
    """How many bytes of a request's pages are not what they must be, tails included."""
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
    """How many bytes of the pages of no request are not as ``make_cache`` left them."""
    spare = np.setdiff1d(np.arange(cache.shape[2]), used)
    poison = np.broadcast_to(POISON, cache[0, 0, spare].shape)
    return sum(
        _differing(cache[layer, index, spare], poison)
        for layer in range(LAYERS)
        for index in range(2)
    )


def _differing(found: Words, right: Words) -> int:
    if np.array_equal(found, right):
        return 0
    there = np.ascontiguousarray(found).view(np.uint8)
    return int(np.count_nonzero(there != np.ascontiguousarray(right).view(np.uint8)))
