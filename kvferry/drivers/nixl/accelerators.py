"""The accelerators whose memory NIXL calls VRAM, and which of them this machine has."""

from __future__ import annotations

import ctypes

from kvferry.core.memory import CUDA
from kvferry.drivers.cuda import find_cuda

_LIBRARIES = {
    "libhsa-runtime64.so.1": CUDA,  # ROCm's
    "libze_loader.so.1": "xpu",
    "libhl-thunk.so": "hpu",
}
"""The driver libraries of accelerators other than NVIDIA's (see ``find_cuda``), which UCX's modules
need, too, and the kind of memory of each."""

KINDS = frozenset({CUDA, *_LIBRARIES.values()})
"""The memory kinds of accelerators, by the names that torch gives to their devices."""


def present() -> frozenset[str]:
    """Return the memory kinds of the accelerators whose driver this machine has.

    NIXL's backends claim VRAM on every machine. UCX must also have been built for the accelerator;
    that shows only when memory is registered. NIXL's wheels have UCX's modules for CUDA only.
    """
    found = {kind for library, kind in _LIBRARIES.items() if _loads(library)}
    return frozenset(found if find_cuda() is None else found | {CUDA})


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
