"""List the transports that a UCX finds on this machine, and the devices of each."""

from __future__ import annotations

import ctypes
import re
from typing import Any

_RESOURCE = re.compile(r"^#\s+resource \d+\s.*--\s+(\S+?)/(\S+)\s*$", re.MULTILINE)

Devices = dict[str, list[str]]
"""Names of devices by transport, such as ``{"tcp": ["eth0", "lo"]}``."""


def devices(library: Any, context: int) -> Devices:  # noqa: ANN401 - a C library
    """Return what a ``ucp_context_h`` can use, from what UCX prints, for lack of a function."""
    found: Devices = {}
    text = _printed(library.ucp_context_print_info, ctypes.c_void_p(context))
    for transport, device in _RESOURCE.findall(text):
        found.setdefault(transport, []).append(device)
    return found


def listed(found: Devices) -> str:
    """Return transports and devices as text, without the entry "memory", which is no device."""
    return ", ".join(
        transport if names == ["memory"] else f"{transport} ({', '.join(names)})"
        for transport, names in found.items()
    )


def _printed(function: Any, context: ctypes.c_void_p) -> str:  # noqa: ANN401 - of a C library
    """Return what a C function prints to the ``FILE *`` that it takes as its second argument."""
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, length = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(length)))
    function(context, stream)
    libc.fclose(stream)
    printed = (text.value or b"").decode(errors="replace")
    libc.free(text)
    return printed
