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
"""Kinds of memory by driver library, which UCX needs, too; for NVIDIA's see ``find_cuda``."""

KINDS = frozenset({CUDA, *_LIBRARIES.values()})
"""The memory kinds of accelerators, by the names that torch gives to their devices."""


def present() -> frozenset[str]:
    """Return the memory kinds of the accelerators whose driver this machine has."""
    # NIXL's backends claim VRAM on every machine. Whether UCX was built for it, too (NIXL's wheels:
    # CUDA only), shows only when memory is registered.
    found = {kind for library, kind in _LIBRARIES.items() if _loads(library)}
    return frozenset(found if find_cuda() is None else found | {CUDA})


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
