"""A paged cache on a device whose every byte follows from the page and a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.core.layout import Layout
from kvferry.core.layout.paged_layout import paged_layout

from .devices import Device

PAGE_TOKENS = 16

POISON = 0x7FC07FC0
"""Two NaNs of bfloat16."""

_MASK = 0x3FFF3FFF  # no word is the poison, and no value is a NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The shape of a cache.

    Attributes:
        pages: how many pages the cache has.
        layers: how many pieces a page has.
        piece_bytes: the size of a piece, which is one layer of one page.
        by_page: whether all layers of a page lie together (the order BLHNC), rather than all pages
            of a layer (LBHNC).
    """

    pages: int
    layers: int
    piece_bytes: int
    by_page: bool = False

    @property
    def page_bytes(self) -> int:
        """The size of a page with all layers."""
        return self.layers * self.piece_bytes

    @property
    def nbytes(self) -> int:
        """The size of the cache."""
        return self.pages * self.page_bytes


class Cache:
    """A cache in the memory of a device.

    Args:
        device: the device.
        shape: the shape.

    Attributes:
        tensor: all words of the cache, as one tensor.
        words: the words as (page, layer, word), whatever their order in memory.
    """

    def __init__(self, device: Device, shape: CacheShape) -> None:
        self.device, self.shape = device, shape
        self.tensor = device.zeros(shape.nbytes)
        words = shape.piece_bytes // 4
        if shape.by_page:
            self.words = self.tensor.view(shape.pages, shape.layers, words)
        else:
            self.words = self.tensor.view(shape.layers, shape.pages, words).transpose(0, 1)

    @property
    def layout(self) -> Layout:
        """The layout of the cache, as an integration would describe it: a field for each layer."""
        values = self.words.view(self.device.torch.bfloat16)
        shape = (self.shape.pages, PAGE_TOKENS, -1)
        tensors = {
            f"layers.{layer:03}": values[:, layer].unflatten(-1, shape[1:])
            for layer in range(self.shape.layers)
        }
        return paged_layout(tensors, dims=("page", "token", "element"))

    def expected(self, pages: Sequence[int], seed: int, tokens: int) -> Any:
        """Return the words of a request's pages, as (page, layer, word), with zeros at the end.

        Args:
            pages: the pages of the producer, in the order of the request.
            seed: the seed that the producer filled the pages with.
            tokens: how many tokens the request has.
        """
        torch, shape = self.device.torch, self.shape
        words = shape.piece_bytes // 4
        index = torch.arange(shape.layers * words, dtype=torch.int64, device=self.device.name)
        page = torch.tensor(list(pages), dtype=torch.int64, device=self.device.name)
        key = (page * 40_503 + seed * 69_069).unsqueeze(1)
        made = ((index * 2_654_435_761 + key * 2_246_822_519) & _MASK).to(torch.int32)
        made = made.view(len(pages), shape.layers, words)
        made[-1, :, words * self._last_tokens(tokens) // PAGE_TOKENS :] = 0
        return made

    def fill(self, pages: Sequence[int], seed: int, tokens: int) -> None:
        """Enqueue the writing of a request's words into pages."""
        self.words[self.index(pages)] = self.expected(pages, seed, tokens)

    def poison(self, pages: Sequence[int]) -> None:
        """Enqueue the overwriting of pages with NaNs."""
        self.words[self.index(pages)] = POISON

    def wrong_words(self, index: Any, expected: Any) -> int:
        """Count the words of pages that differ from the expected ones, on the current stream.

        Args:
            index: what ``index`` returned for the pages, before they were loaded.
            expected: the expected words.
        """
        return int((self.words[index] != expected).sum().item())

    def index(self, pages: Sequence[int]) -> Any:
        """Return pages as a tensor on the device.

        Its copy to the device takes a while, and may order what a NIC has written before. So make
        it before a load whose bytes are to be compared at once.
        """
        torch = self.device.torch
        return torch.tensor(list(pages), dtype=torch.int64, device=self.device.name)

    @staticmethod
    def _last_tokens(tokens: int) -> int:
        """Return how many tokens the last page of a request has."""
        return (tokens - 1) % PAGE_TOKENS + 1
