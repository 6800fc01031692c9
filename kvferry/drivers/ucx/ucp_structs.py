"""UCP's structures and constants, as its headers define them.

A structure begins with a mask of the fields that are set, so that other versions, with more fields
or fewer, use only those; fields that follow the last which the driver sets are left out here. The
numbers are from ``ucp/api/ucp.h`` and ``ucp/api/ucp_def.h`` of UCX
1.22.
"""

from __future__ import annotations

import ctypes
import enum
from typing import Any, ClassVar

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

SERIALIZED = 1
"""``UCS_THREAD_MODE_SERIALIZED``: any thread may call, but only one at a time."""

MULTI = 2
"""``UCS_THREAD_MODE_MULTI``: what a library reports that was built with support for threads."""

ERRORS_OF_PEER = 1
"""``UCP_ERR_HANDLING_MODE_PEER``: else requests to a dead peer never complete."""

CLOSE_BY_FORCE = 1
"""``UCP_EP_CLOSE_FLAG_FORCE``: close an endpoint without involving the peer."""

SEND_EAGERLY = 1 << 1
"""``UCP_AM_SEND_FLAG_EAGER``: send the data with the header, without asking the receiver first."""

SEND_A_COPY = 1 << 3
"""``UCP_AM_SEND_FLAG_COPY_HEADER``: the header may be freed once the call has returned."""

WAKE_FOR = (1 << 0) | (1 << 2) | (1 << 3) | (1 << 10) | (1 << 11)
"""``ucp_wakeup_event_types``: RMA, sends and receipts make a worker's file descriptor readable."""

WHOLE_MESSAGES = 1
"""``UCP_AM_FLAG_WHOLE_MSG``: the callback gets all data of a message at once."""

MEMORY = {CPU: 0, CUDA: 1}
"""The values of ``ucs_memory_type_t``, by kvferry's names of memory kinds."""


class Masked(ctypes.Structure):
    """A structure that begins with the mask of the fields that are set."""

    _bits_: ClassVar[dict[str, int]]
    """The index of each field's bit in the mask. Several fields may share a bit."""

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


class ContextParams(Masked):
    """``ucp_params_t``."""

    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("features", ctypes.c_uint64),
        ("request_size", ctypes.c_size_t),
        ("request_init", Pointer),
        ("request_cleanup", Pointer),
        ("tag_sender_mask", ctypes.c_uint64),
        ("mt_workers_shared", ctypes.c_int),
        ("estimated_num_eps", ctypes.c_size_t),
        ("estimated_num_ppn", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
    ]
    _bits_ = {"features": 0, "mt_workers_shared": 5, "name": 8}


class LibraryAttributes(Masked):
    """``ucp_lib_attr_t``."""

    _fields_ = [("field_mask", ctypes.c_uint64), ("max_thread_level", ctypes.c_int)]
    _bits_ = {"max_thread_level": 0}


class ContextAttributes(Masked):
    """``ucp_context_attr_t``."""

    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("request_size", ctypes.c_size_t),
        ("thread_mode", ctypes.c_int),
        ("memory_types", ctypes.c_uint64),
    ]
    _bits_ = {"memory_types": 2}


class WorkerParams(Masked):
    """``ucp_worker_params_t``."""

    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("thread_mode", ctypes.c_int),
        ("cpu_mask", ctypes.c_uint64 * 16),
        ("events", ctypes.c_uint),
        ("user_data", Pointer),
        ("event_fd", ctypes.c_int),
        ("flags", ctypes.c_uint64),
    ]
    _bits_ = {"thread_mode": 0, "events": 2, "flags": 5}


class WorkerAttributes(Masked):
    """``ucp_worker_attr_t``."""

    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("thread_mode", ctypes.c_int),
        ("address_flags", ctypes.c_uint32),
        ("address", Pointer),
        ("address_length", ctypes.c_size_t),
    ]
    _bits_ = {"thread_mode": 0, "address": 1}


class EndpointParams(Masked):
    """``ucp_ep_params_t``, with the members of its nested structures as fields of their own."""

    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("address", ctypes.c_char_p),
        ("err_mode", ctypes.c_int),
        ("err_handler_cb", ON_ERROR),
        ("err_handler_arg", Pointer),
    ]
    _bits_ = {"address": 0, "err_mode": 1, "err_handler_cb": 2, "err_handler_arg": 2}


class MapParams(Masked):
    """``ucp_mem_map_params_t``."""

    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("address", Pointer),
        ("length", ctypes.c_size_t),
        ("flags", ctypes.c_uint),
        ("prot", ctypes.c_uint),
        ("memory_type", ctypes.c_int),
    ]
    _bits_ = {"address": 0, "length": 1, "memory_type": 4}


class HandlerParams(Masked):
    """``ucp_am_handler_param_t``."""

    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("id", ctypes.c_uint),
        ("flags", ctypes.c_uint32),
        ("cb", ON_MESSAGE),
    ]
    _bits_ = {"id": 0, "flags": 1, "cb": 2}


class RequestParams(Masked):
    """``ucp_request_param_t``; its mask has 32 bits."""

    _fields_ = [
        ("field_mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("request", Pointer),
        ("cb", Pointer),
        ("datatype", ctypes.c_uint64),
        ("user_data", Pointer),
        ("reply_buffer", Pointer),
        ("memory_type", ctypes.c_int),
        ("recv_info", Pointer),
        ("memh", Pointer),
    ]
    _bits_ = {"flags": 4, "memh": 8}


class TransportEntry(ctypes.Structure):
    """``ucp_transport_entry_t``."""

    _fields_ = [("transport_name", ctypes.c_char_p), ("device_name", ctypes.c_char_p)]


class EndpointAttributes(Masked):
    """``ucp_ep_attr_t``, with the members of ``transports`` as fields of their own."""

    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_sockaddr", ctypes.c_uint64 * 16),
        ("remote_sockaddr", ctypes.c_uint64 * 16),
        ("entries", ctypes.POINTER(TransportEntry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
    ]
    _bits_ = {"entries": 3, "num_entries": 3, "entry_size": 3}
