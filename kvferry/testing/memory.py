"""Memory that tests fill and inspect without a transport.

``allocate`` knows the kinds ``cpu`` and ``cuda`` (by torch; ``cuda:1`` is the second device). For
memory of any other kind, name a function that takes a number of bytes and returns a ``Buffer``, as
``package.module:function``.
"""

from __future__ import annotations

import importlib
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.core.memory import Region, region_of
from kvferry.core.transport import EnterThread, Transport, enter_nothing
from kvferry.core.transport.threads import takes_enter

Bytes = npt.NDArray[np.uint8]


class Buffer(ABC):
    """A piece of memory, which is freed when nothing refers to the buffer any more."""

    @property
    @abstractmethod
    def region(self) -> Region:
        """The whole memory, as a region."""

    @abstractmethod
    def get(self, offset: int = 0, nbytes: int | None = None) -> Bytes:
        """Wait for the device's enqueued work, and return a copy of some bytes, in CPU memory."""

    @abstractmethod
    def put(self, data: Bytes, offset: int = 0) -> None:
        """Overwrite bytes, and return when the new bytes are in place."""

    def part(self, offset: int, nbytes: int) -> Region:
        """Return a part of the buffer as a region."""
        return replace(self.region, address=self.region.address + offset, nbytes=nbytes)


class CpuBuffer(Buffer):
    """Anonymous memory of this process, aligned to a page."""

    def __init__(self, nbytes: int) -> None:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes: Bytes = np.frombuffer(memory, np.uint8)
        self._region = region_of(self._bytes)

    @property
    def region(self) -> Region:
        """The whole memory, as a region."""
        return self._region

    def get(self, offset: int = 0, nbytes: int | None = None) -> Bytes:
        """Return a copy of some bytes; see ``Buffer.get``."""
        return self._bytes[offset:][:nbytes].copy()

    def put(self, data: Bytes, offset: int = 0) -> None:
        """Overwrite bytes; see ``Buffer.put``."""
        self._bytes[offset : offset + len(data)] = data


class CudaBuffer(Buffer):
    """Memory of a CUDA device, allocated by torch."""

    def __init__(self, nbytes: int, device: int = 0) -> None:
        missing = _why_no_cuda(device)
        if missing:
            raise RuntimeError(
                f"memory = 'cuda:{device}' of these tests: {missing}; install a CUDA build of "
                "torch on a machine with a GPU, or test with memory = 'cpu'"
            )
        self._torch: Any = importlib.import_module("torch")
        self._bytes = self._torch.zeros(nbytes, dtype=self._torch.uint8, device=f"cuda:{device}")
        self._torch.cuda.synchronize(device)
        self._region = region_of(self._bytes)

    @property
    def region(self) -> Region:
        """The whole memory, as a region."""
        return self._region

    def get(self, offset: int = 0, nbytes: int | None = None) -> Bytes:
        """Return a copy of some bytes in CPU memory; see ``Buffer.get``."""
        self._torch.cuda.synchronize(self._region.device)
        copied: Bytes = self._bytes[offset:][:nbytes].cpu().numpy()
        return copied

    def put(self, data: Bytes, offset: int = 0) -> None:
        """Overwrite bytes of the device; see ``Buffer.put``."""
        source = self._torch.from_numpy(np.ascontiguousarray(data))
        self._bytes[offset : offset + len(data)] = source.to(self._bytes.device)
        self._torch.cuda.synchronize(self._region.device)


def allocate(memory: str, nbytes: int) -> Buffer:
    """Return a new buffer of zeros; raise ``RuntimeError`` if the device is not available."""
    kind, _, rest = memory.partition(":")
    if kind == "cpu":
        return CpuBuffer(nbytes)
    if kind == "cuda":
        return CudaBuffer(nbytes, int(rest or 0))
    make: Callable[[int], Buffer] = imported(memory)
    return make(nbytes)


def thread_setup(memory: str) -> EnterThread:
    """Return what each thread that uses a buffer does first: for CUDA, choose the device."""
    kind, _, rest = memory.partition(":")
    if kind != "cuda" or _why_no_cuda(int(rest or 0)):
        return enter_nothing
    device = int(rest or 0)

    def enter() -> None:
        torch: Any = importlib.import_module("torch")
        torch.cuda.set_device(device)
        torch.zeros(1, device=f"cuda:{device}")  # makes the thread's context

    return enter


def make_transport(factory: str, options: Mapping[str, object], memory: str) -> Transport:
    """Return what ``factory`` makes, once this thread has done what the memory needs."""
    make: Callable[..., Transport] = imported(factory)
    enter = thread_setup(memory)
    enter()
    return make(**options, enter=enter) if takes_enter(make) else make(**options)


def available(kind: str) -> bool:
    """Return whether ``allocate`` can make memory of this kind on this machine."""
    return kind == "cpu" or (kind == "cuda" and not _why_no_cuda(0))


def _why_no_cuda(device: int) -> str:
    """Return why the CUDA device of this index cannot be used; an empty string if it can."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    if device >= torch.cuda.device_count():
        return f"there are {torch.cuda.device_count()} CUDA devices, from 0 on"
    return ""


def imported(name: str) -> Any:  # noqa: ANN401 - the caller knows its type
    """Return the object that ``package.module:attribute`` names; raise ``ImportError``."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError as exc:
        raise ImportError(f"module {module!r} has no {attribute!r}: write module:name") from exc


def pattern(nbytes: int, seed: int) -> Bytes:
    """Return random bytes from 1 to 255, always the same for a seed: no byte fits another place."""
    return np.random.default_rng(seed).integers(1, 256, nbytes, np.uint8)
