"""A GPU's memory, streams and events by torch, with counterparts on a CPU; and a cache there."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvferry.core.layout import Layout
from kvferry.core.layout.paged_layout import paged_layout
from kvferry.core.memory import CUDA

PAGE_TOKENS = 16
POISON = 0x7FC07FC0  # two NaNs of bfloat16
_MASK = 0x3FFF3FFF  # no word is the poison, and no value is a NaN


def load_torch() -> Any:
    """Import torch; mypy does not know its types."""
    return importlib.import_module("torch")


class Device:
    """A GPU, or the CPU in a rehearsal.

    On the CPU, work is done when a call returns: streams do nothing, and events have passed.
    """

    def __init__(self, name: str) -> None:
        self.torch = load_torch()
        kind, _, index = name.partition(":")
        self.is_cuda = kind == CUDA
        self.index = int(index or 0)
        self.name = f"{kind}:{self.index}" if self.is_cuda else kind

    def enter(self) -> None:
        """Let this thread use the device; an ``EnterThread`` of kvferry.

        ``set_device`` alone leaves a thread of device 0 without a context; an operation makes one.
        """
        if self.is_cuda:
            self.torch.cuda.set_device(self.index)
            self.torch.zeros(1, device=self.name)

    def new_stream(self) -> Any:
        """Return a new stream of high priority; ``None`` on the CPU."""
        return self.torch.cuda.Stream(device=self.name, priority=-1) if self.is_cuda else None

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Within the context, torch enqueues work on a stream."""
        if stream is None:
            yield
            return
        with self.torch.cuda.stream(stream):
            yield

    def record(self) -> Callable[[], bool]:
        """Mark the current stream, and return a function that tells whether the mark has passed."""
        if not self.is_cuda:
            return lambda: True
        event = self.torch.cuda.Event()
        event.record()
        passed: Callable[[], bool] = event.query
        return passed

    def wait(self, stream: Any = None) -> None:
        """Wait for the work on a stream; for that of the whole device if no stream is given."""
        if stream is not None:
            stream.synchronize()
        elif self.is_cuda:
            self.torch.cuda.synchronize(self.index)

    def zeros(self, nbytes: int) -> Any:
        """Return bytes of zeros, as a tensor of 32-bit words."""
        tensor = self.torch.zeros(nbytes // 4, dtype=self.torch.int32, device=self.name)
        self.wait()
        return tensor

    def spin(self, seconds: float) -> None:
        """Enqueue a kernel that takes about so many seconds and one multiprocessor; CUDA only."""
        properties = self.torch.cuda.get_device_properties(self.index)
        kilohertz = getattr(properties, "clock_rate", 1_900_000)
        self.torch.cuda._sleep(int(seconds * kilohertz * 1000))

    def describe(self) -> str:
        """Return the name of the GPU's model, or ``CPU``."""
        return self.torch.cuda.get_device_name(self.index) if self.is_cuda else "CPU"


class BusyDevice:
    """Within the context, matrix products run one after the other on the default stream."""

    def __init__(self, device: Device) -> None:
        self.products = 0
        self._device, self._stopped = device, threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-check-matmul")

    def __enter__(self) -> BusyDevice:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        self._device.enter()
        torch, size = self._device.torch, 8192 if self._device.is_cuda else 64
        dtype = torch.bfloat16 if self._device.is_cuda else torch.float32
        left = torch.randn(size, size, device=self._device.name).to(dtype)
        out = torch.empty_like(left)
        enqueued: list[Callable[[], bool]] = []
        while not self._stopped.is_set():
            torch.matmul(left, left, out=out)
            self.products += 1
            enqueued.append(self._device.record())
            while len(enqueued) > 8 and not enqueued[-8]() and not self._stopped.is_set():
                time.sleep(0.0005)
            if not self._device.is_cuda:
                time.sleep(0.005)  # the endpoint's thread needs the interpreter
            del enqueued[:-8]


# A cache.


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The shape of a cache, each of whose pages has a piece in each layer."""

    pages: int
    layers: int
    piece_bytes: int


class Cache:
    """A paged cache on a device whose every byte follows from the page and a seed."""

    def __init__(self, device: Device, shape: CacheShape) -> None:
        self.device, self.shape = device, shape
        self.tensor = device.zeros(shape.pages * shape.layers * shape.piece_bytes)
        # (page, layer, word), whatever their order in memory.
        by_layer = self.tensor.view(shape.layers, shape.pages, shape.piece_bytes // 4)
        self.words = by_layer.transpose(0, 1)

    @property
    def layout(self) -> Layout:
        """The layout of the cache, as an integration would describe it: a field for each layer."""
        values = self.words.view(self.device.torch.bfloat16)
        tensors = {
            f"layers.{layer:03}": values[:, layer].unflatten(-1, (PAGE_TOKENS, -1))
            for layer in range(self.shape.layers)
        }
        return paged_layout(tensors, dims=("page", "token", "element"))

    def expected(self, pages: Sequence[int], seed: int, tokens: int) -> Any:
        """Return the words of a producer's pages, as (page, layer, word), with zeros at the end."""
        torch, shape = self.device.torch, self.shape
        words = shape.piece_bytes // 4
        index = torch.arange(shape.layers * words, dtype=torch.int64, device=self.device.name)
        key = (self.index(pages) * 40_503 + seed * 69_069).unsqueeze(1)
        made = ((index * 2_654_435_761 + key * 2_246_822_519) & _MASK).to(torch.int32)
        made = made.view(len(pages), shape.layers, words)
        last = tokens % PAGE_TOKENS or PAGE_TOKENS
        made[-1, :, words * last // PAGE_TOKENS :] = 0
        return made

    def fill(self, pages: Sequence[int], seed: int, tokens: int) -> None:
        """Enqueue the writing of a request's words into pages."""
        self.words[self.index(pages)] = self.expected(pages, seed, tokens)

    def poison(self, pages: Sequence[int]) -> None:
        """Enqueue the overwriting of pages with NaNs."""
        self.words[self.index(pages)] = POISON

    def wrong_words(self, index: Any, expected: Any) -> int:
        """Count the words of pages that differ, by their ``index`` from before they were loaded."""
        return int((self.words[index] != expected).sum().item())

    def index(self, pages: Sequence[int]) -> Any:
        """Return pages as a tensor on the device.

        Its copy may order what a NIC has written before: make it before the load to compare.
        """
        torch = self.device.torch
        return torch.tensor(list(pages), dtype=torch.int64, device=self.device.name)
