"""The functions of libucp that the driver uses, typed."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from kvferry.drivers.ucx import ucp_structs as structs
from kvferry.drivers.ucx.ucp_structs import Pointer

Calls = dict[str, Any]
"""By name."""

_SIZE = ctypes.c_size_t
_WORD = ctypes.c_uint64
_INT = ctypes.c_int
_STATUS = structs.STATUS
_OUT = ctypes.POINTER(Pointer)

# Name, result, arguments.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ucp_lib_query": (_STATUS, [Pointer]),
    "ucp_config_read": (_STATUS, [ctypes.c_char_p, ctypes.c_char_p, _OUT]),
    "ucp_config_modify": (_STATUS, [Pointer, ctypes.c_char_p, ctypes.c_char_p]),
    "ucp_config_release": (None, [Pointer]),
    "ucp_init_version": (_STATUS, [ctypes.c_uint, ctypes.c_uint, Pointer, Pointer, _OUT]),
    "ucp_cleanup": (None, [Pointer]),
    "ucp_context_query": (_STATUS, [Pointer, Pointer]),
    "ucp_worker_create": (_STATUS, [Pointer, Pointer, _OUT]),
    "ucp_worker_destroy": (None, [Pointer]),
    "ucp_worker_query": (_STATUS, [Pointer, Pointer]),
    "ucp_worker_release_address": (None, [Pointer, Pointer]),
    "ucp_worker_get_efd": (_STATUS, [Pointer, ctypes.POINTER(_INT)]),
    "ucp_worker_arm": (_STATUS, [Pointer]),
    "ucp_worker_progress": (ctypes.c_uint, [Pointer]),
    "ucp_worker_set_am_recv_handler": (_STATUS, [Pointer, Pointer]),
    "ucp_ep_create": (_STATUS, [Pointer, Pointer, _OUT]),
    "ucp_ep_close_nbx": (_WORD, [Pointer, Pointer]),
    "ucp_ep_flush_nbx": (_WORD, [Pointer, Pointer]),
    "ucp_ep_query": (_STATUS, [Pointer, Pointer]),
    "ucp_mem_map": (_STATUS, [Pointer, Pointer, _OUT]),
    "ucp_mem_unmap": (_STATUS, [Pointer, Pointer]),
    "ucp_rkey_pack": (_STATUS, [Pointer, Pointer, _OUT, ctypes.POINTER(_SIZE)]),
    "ucp_rkey_buffer_release": (None, [Pointer]),
    "ucp_ep_rkey_unpack": (_STATUS, [Pointer, ctypes.c_char_p, _OUT]),
    "ucp_rkey_destroy": (None, [Pointer]),
    "ucp_am_send_nbx": (
        _WORD,
        [Pointer, ctypes.c_uint, Pointer, _SIZE, Pointer, _SIZE, Pointer],
    ),
    "ucp_get_nbx": (_WORD, [Pointer, _WORD, _SIZE, _WORD, _WORD, _WORD]),
    "ucp_put_nbx": (_WORD, [Pointer, _WORD, _SIZE, _WORD, _WORD, _WORD]),
    "ucp_request_cancel": (None, [Pointer, Pointer]),
}

_LOOKING: dict[str, tuple[Any, list[Any]]] = {
    "ucp_request_check_status": (_STATUS, [_WORD]),
    "ucp_request_free": (None, [_WORD]),
}


def typed(library: ctypes.CDLL) -> tuple[Calls, Calls]:
    """For calls from Python, and for those from compiled loops.

    All release the interpreter's lock; but in Python those do not that only look.

    Raises:
        AttributeError: the library has no function of that name.
    """
    looking = ctypes.PyDLL(None, handle=library._handle)
    calls = _typed(library, _FUNCTIONS) | _typed(looking, _LOOKING)
    return calls, calls | _typed(library, _LOOKING)


def _typed(library: ctypes.CDLL, functions: Mapping[str, tuple[Any, list[Any]]]) -> Calls:
    found: Calls = {}
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        found[name] = function
    return found
