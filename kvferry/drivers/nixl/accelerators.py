"""The accelerators whose memory NIXL calls VRAM, and which of them this machine has."""

from __future__ import annotations

import ctypes

from kvferry.drivers.cuda import CUDA, find_cuda

_LIBRARIES = {
    CUDA: "libhsa-runtime64.so.1",  # of ROCm: torch names AMD's memory "cuda", too
    "xpu": "libze_loader.so.1",
    "hpu": "libhl-thunk.so",
}
"""The driver library of each kind of memory, which UCX's module for that kind needs, too."""

KINDS = frozenset(_LIBRARIES)
"""The memory kinds of accelerators, by the names that torch gives to their devices."""


def present() -> frozenset[str]:
    """Return the memory kinds of the accelerators whose driver this machine has.

    NIXL's backends claim VRAM on every machine. UCX must also have been built for the accelerator;
    that shows only when memory is registered. NIXL's wheels have UCX's modules for CUDA only.
    """
    found = {kind for kind, library in _LIBRARIES.items() if _loads(library)}
    return frozenset(found if find_cuda() is None else found | {CUDA})


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
