"""Memory that a test fills and inspects without a transport.

``allocate`` knows the kinds ``cpu`` and ``cuda`` (by torch, ``cuda:1`` being the second device).
For any other, name a function that takes a number of bytes and returns a ``Buffer``, as
``package.module:function``.
"""

from __future__ import annotations

import importlib
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvferry.core.memory import Region, region_of

Bytes = npt.NDArray[np.uint8]


class Buffer(ABC):
    """A piece of memory. It is given back when nothing refers to the buffer any more."""

    @property
    @abstractmethod
    def region(self) -> Region:
        """All of it."""

    @abstractmethod
    def get(self, offset: int = 0, nbytes: int | None = None) -> Bytes:
        """A copy, in CPU memory, of bytes from ``offset`` on (all that follow, by default).

        It is what they are after all device work that has been enqueued.
        """

    @abstractmethod
    def put(self, data: Bytes, offset: int = 0) -> None:
        """Overwrite from ``offset`` on; has happened when it returns."""

    def part(self, offset: int, nbytes: int) -> Region:
        """The region of some of its bytes."""
        whole = self.region
        return Region(
            address=whole.address + offset, nbytes=nbytes, kind=whole.kind, device=whole.device
        )


class CpuBuffer(Buffer):
    """Anonymous memory of this process, from the start of a page."""

    def __init__(self, nbytes: int) -> None:
        self._map(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def _map(self, memory: mmap.mmap) -> None:
        self._bytes: Bytes = np.frombuffer(memory, np.uint8)
        self._region = region_of(self._bytes)

    @property
    def region(self) -> Region:
        return self._region

    def get(self, offset: int = 0, nbytes: int | None = None) -> Bytes:
        return self._bytes[offset:][:nbytes].copy()

    def put(self, data: Bytes, offset: int = 0) -> None:
        self._bytes[offset : offset + len(data)] = data


class SharedBuffer(CpuBuffer):
    """A file's memory: whoever maps it sees what it is, also while another's process is stopped."""

    def __init__(self, path: str, nbytes: int) -> None:
        self.path = path
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map(mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED))
        finally:
            os.close(file)

    @classmethod
    def made(cls, nbytes: int) -> Self:
        """A new one. By ``path`` others can map it, as long as it is there."""
        file = os.memfd_create("kvferry-testing", os.MFD_CLOEXEC)
        os.ftruncate(file, nbytes)
        made = cls(f"/proc/{os.getpid()}/fd/{file}", nbytes)
        weakref.finalize(made, os.close, file)
        return made


class CudaBuffer(Buffer):
    """Memory of a CUDA device, by torch.

    Raises:
        RuntimeError: there is no torch, or none that sees this device; says which.
    """

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
        return self._region

    def get(self, offset: int = 0, nbytes: int | None = None) -> Bytes:
        self._torch.cuda.synchronize(self._region.device)
        copied: Bytes = self._bytes[offset:][:nbytes].cpu().numpy()
        return copied

    def put(self, data: Bytes, offset: int = 0) -> None:
        source = self._torch.from_numpy(np.ascontiguousarray(data))
        self._bytes[offset : offset + len(data)] = source.to(self._bytes.device)
        self._torch.cuda.synchronize(self._region.device)


def allocate(memory: str, nbytes: int) -> Buffer:
    """A buffer of zeros.

    Args:
        memory: ``cpu``, ``shared:PATH`` (of ``SharedBuffer``), ``cuda``, ``cuda:INDEX``, or
            ``package.module:function``.
        nbytes: its size.

    Raises:
        ImportError: the function is not there.
        RuntimeError: the device is not there; says why.
    """
    kind, _, rest = memory.partition(":")
    if kind == "cpu":
        return CpuBuffer(nbytes)
    if kind == "shared":
        return SharedBuffer(rest, nbytes)
    if kind == "cuda":
        return CudaBuffer(nbytes, int(rest or 0))
    make: Callable[[int], Buffer] = imported(memory)
    return make(nbytes)


def available(kind: str) -> bool:
    """Whether ``allocate`` can make memory of this kind on this machine."""
    return kind == "cpu" or (kind == "cuda" and not _why_no_cuda(0))


def _why_no_cuda(device: int) -> str:
    """What is missing for memory of a CUDA device; empty if nothing is."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    if device >= torch.cuda.device_count():
        return f"there are {torch.cuda.device_count()} CUDA devices, from 0 on"
    return ""


def imported(name: str) -> Any:  # noqa: ANN401 - whoever asks knows what it is
    """What ``package.module:attribute`` names.

    Raises:
        ImportError: there is no such module, or no such attribute in it.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError as exc:
        raise ImportError(f"module {module!r} has no {attribute!r}: write module:name") from exc


def pattern(nbytes: int, seed: int) -> Bytes:
    """Bytes that tell their place, and none of them zero."""
    return np.random.default_rng(seed).integers(1, 256, nbytes, np.uint8)
