"""UCP's structures and constants, as its headers define them.

A structure begins with a mask of the fields that are set, so that other versions, with more fields
or fewer, use only those; fields that follow the last which the driver sets are left out here. The
numbers are from ``ucp/api/ucp.h`` and ``ucp/api/ucp_def.h`` of UCX 1.22.
"""

from __future__ import annotations

import ctypes
import enum
import re
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from kvferry.core.memory import CPU, CUDA

Pointer = ctypes.c_void_p
STATUS = ctypes.c_int8
"""``ucs_status_t`` is a packed enum: one byte."""

ON_ERROR = ctypes.CFUNCTYPE(None, Pointer, Pointer, STATUS)
"""``ucp_err_handler_cb_t``: the value given with the callback, the endpoint, the status."""

ON_MESSAGE = ctypes.CFUNCTYPE(
    STATUS, Pointer, Pointer, ctypes.c_size_t, Pointer, ctypes.c_size_t, Pointer
)
"""``ucp_am_recv_callback_t``: the value given with it, header, length, data, length, parameters."""


class Feature(enum.IntFlag):
    """The values of ``ucp_feature`` that the driver uses."""

    RMA = 1 << 1
    WAKEUP = 1 << 4
    AM = 1 << 6


class Code(enum.IntEnum):
    """The values of ``ucs_status_t`` that the driver names."""

    OK = 0
    IN_PROGRESS = 1
    IO_ERROR = -3
    NO_MEMORY = -4
    INVALID_PARAM = -5
    UNREACHABLE = -6
    INVALID_ADDR = -7
    NO_ELEM = -12
    NO_DEVICE = -14
    BUSY = -15
    CANCELED = -16
    TIMED_OUT = -20
    UNSUPPORTED = -22
    REJECTED = -23
    NOT_CONNECTED = -24
    CONNECTION_RESET = -25
    ENDPOINT_TIMEOUT = -80


LOST = frozenset(
    {
        Code.IO_ERROR,
        Code.UNREACHABLE,
        Code.TIMED_OUT,
        Code.REJECTED,
        Code.NOT_CONNECTED,
        Code.CONNECTION_RESET,
        Code.ENDPOINT_TIMEOUT,
    }
)
"""The statuses that mean that the peer, or the network path to it, is gone."""

SERIALIZED = 1  # UCS_THREAD_MODE_SERIALIZED: any thread may call, but only one at a time
MULTI = 2  # UCS_THREAD_MODE_MULTI, which a library reports that was built with threads
ERRORS_OF_PEER = 1  # UCP_ERR_HANDLING_MODE_PEER: else requests to a dead peer never complete
CLOSE_BY_FORCE = 1  # UCP_EP_CLOSE_FLAG_FORCE: close an endpoint without involving the peer
SEND_EAGERLY = 1 << 1  # UCP_AM_SEND_FLAG_EAGER: send data without asking the receiver first
SEND_A_COPY = 1 << 3  # UCP_AM_SEND_FLAG_COPY_HEADER: the header may be freed after the call
# ucp_wakeup_event_types: RMA, sends and receipts make a worker's file descriptor readable.
WAKE_FOR = (1 << 0) | (1 << 2) | (1 << 3) | (1 << 10) | (1 << 11)
WHOLE_MESSAGES = 1  # UCP_AM_FLAG_WHOLE_MSG: the callback gets all data of a message at once

MEMORY = {CPU: 0, CUDA: 1}
"""The values of ``ucs_memory_type_t``, by kvferry's names of memory kinds."""


_TYPES: dict[str, Any] = {
    "char": ctypes.c_char,
    "char*": ctypes.c_char_p,
    "int": ctypes.c_int,
    "on_error": ON_ERROR,
    "on_message": ON_MESSAGE,
    "size": ctypes.c_size_t,
    "uint": ctypes.c_uint,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "void*": Pointer,
}
_DECLARATION = re.compile(r"(\S+) (\w+)(?:\[(\d+)\])?(?: (\d+))?")

S = TypeVar("S", bound=type[ctypes.Structure])


def _fields(declarations: str) -> Callable[[S], S]:
    """Set a structure's fields. The number behind a field is its bit's index in the mask."""

    def declared(structure: S) -> S:
        found = [_DECLARATION.fullmatch(one).groups() for one in declarations.split(", ")]  # type: ignore[union-attr]
        structure._fields_ = [
            (name, _TYPES[kind] * int(count) if count else _TYPES[kind])
            for kind, name, count, _ in found
        ]
        structure._bits_ = {name: int(bit) for _, name, _, bit in found if bit}  # type: ignore[attr-defined]
        return structure

    return declared


class Masked(ctypes.Structure):
    """A structure that begins with the mask of the fields that are set."""

    _bits_: ClassVar[dict[str, int]]

    @classmethod
    def of(cls, **fields: Any) -> Any:  # noqa: ANN401 - ctypes' own types
        """Return a structure with these fields set, and with their bits in its mask."""
        made = cls(**fields)
        made.field_mask = cls.mask(*fields)
        return made

    @classmethod
    def asking(cls, *names: str) -> Any:  # noqa: ANN401 - likewise
        """Return a structure with the bits of these fields in its mask, for UCX to set them."""
        made = cls()
        made.field_mask = cls.mask(*names)
        return made

    @classmethod
    def mask(cls, *names: str) -> int:
        """Return the mask that selects the fields of these names."""
        bits = 0
        for name in names:
            bits |= 1 << cls._bits_[name]
        return bits


@_fields(
    "u64 field_mask, u64 features 0, size request_size, void* request_init, "
    "void* request_cleanup, u64 tag_sender_mask, int mt_workers_shared 5, "
    "size estimated_num_eps, size estimated_num_ppn, char* name 8"
)
class ContextParams(Masked):
    """``ucp_params_t``."""


@_fields("u64 field_mask, int max_thread_level 0")
class LibraryAttributes(Masked):
    """``ucp_lib_attr_t``."""


@_fields("u64 field_mask, size request_size, int thread_mode, u64 memory_types 2")
class ContextAttributes(Masked):
    """``ucp_context_attr_t``."""


@_fields(
    "u64 field_mask, int thread_mode 0, u64 cpu_mask[16], uint events 2, void* user_data, "
    "int event_fd, u64 flags 5"
)
class WorkerParams(Masked):
    """``ucp_worker_params_t``."""


@_fields(
    "u64 field_mask, int thread_mode 0, u32 address_flags, void* address 1, size address_length"
)
class WorkerAttributes(Masked):
    """``ucp_worker_attr_t``."""


@_fields(
    "u64 field_mask, char* address 0, int err_mode 1, on_error err_handler_cb 2, "
    "void* err_handler_arg 2"
)
class EndpointParams(Masked):
    """``ucp_ep_params_t``, with the members of its nested structures as fields of their own."""


@_fields("u64 field_mask, void* address 0, size length 1, uint flags, uint prot, int memory_type 4")
class MapParams(Masked):
    """``ucp_mem_map_params_t``."""


@_fields("u64 field_mask, uint id 0, u32 flags 1, on_message cb 2")
class HandlerParams(Masked):
    """``ucp_am_handler_param_t``."""


@_fields(
    "u32 field_mask, u32 flags 4, void* request, void* cb, u64 datatype, void* user_data, "
    "void* reply_buffer, int memory_type, void* recv_info, void* memh 8"
)
class RequestParams(Masked):
    """``ucp_request_param_t``; its mask has 32 bits."""


@_fields("char* transport_name, char* device_name")
class TransportEntry(ctypes.Structure):
    """``ucp_transport_entry_t``."""


@_fields(
    "u64 field_mask, char name[32], u64 local_sockaddr[16], u64 remote_sockaddr[16], "
    "void* entries 3, uint num_entries 3, size entry_size 3"
)
class EndpointAttributes(Masked):
    """``ucp_ep_attr_t``, with the members of ``transports`` as fields of their own."""
