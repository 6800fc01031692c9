"""The binding to libucp: the functions that the driver calls, and their statuses as exceptions.

UCP's handles are addresses; here they are integers. UCP calls the driver's callbacks from within
``progress`` and ``send``, in the calling thread. An *answer* (``ucs_status_ptr_t``) is 0 (done), an
error status, or the address of a request that completes later.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Mapping
from typing import Any, NewType

from kvferry.core.errors import DriverError, PeerLostError, TransportError
from kvferry.core.memory import Region
from kvferry.drivers.ucx import dlopen
from kvferry.drivers.ucx import ucp_structs as structs
from kvferry.drivers.ucx.library import LOWEST
from kvferry.drivers.ucx.ucp_structs import Code, Pointer

Context = NewType("Context", int)
WorkerHandle = NewType("WorkerHandle", int)
Endpoint = NewType("Endpoint", int)
Memory = NewType("Memory", int)
RemoteKey = NewType("RemoteKey", int)

ERRORS_FROM = (1 << 64) - 100
"""Answers from this value on are error statuses, as unsigned numbers."""

MAX_WORKER_ADDRESS = 1 << 16
MAX_PACKED_KEY = 1 << 12
_MARGIN = bytes(256)
"""Appended to bytes of which UCX does not know the length, since it may read beyond their end."""

BRIEF_BYTES = 1 << 16
"""Calls that move no more than this keep the lock: they take 10 µs, to get it back up to 5 ms."""

_MESSAGE_ID = 1

_SIZE = ctypes.c_size_t
_WORD = ctypes.c_uint64
_INT = ctypes.c_int
_STATUS = structs.STATUS
_OUT = ctypes.POINTER(Pointer)

# For each function, by its name: the type of its result, and the types of its arguments.
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
    "ucp_request_check_status": (_STATUS, [_WORD]),
    "ucp_request_free": (None, [_WORD]),
}


class Ucp:
    """A loaded libucp (or a test's substitute), whose methods raise ``TransportError``.

    Raises ``DriverError`` if it lacks a function, or was built without support for threads.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        major, minor, patch = dlopen.version(library)
        self.version = major, minor, patch
        # Calls by the second keep the interpreter's lock: for those that end at once.
        self._library, self._brief = library, ctypes.PyDLL(None, handle=library._handle)
        try:
            for each, (name, types) in itertools.product(
                (library, self._brief), _FUNCTIONS.items()
            ):
                getattr(each, name).restype, getattr(each, name).argtypes = types
        except AttributeError as exc:
            raise DriverError(f"UCX {self.version}: {exc}: its build is not complete") from exc
        self.check = self._brief.ucp_request_check_status
        self.free = self._brief.ucp_request_free
        self.get = self._brief.ucp_get_nbx
        self.destroy_key = library.ucp_rkey_destroy
        self.destroy_worker = library.ucp_worker_destroy  # with its endpoints
        self.destroy_context = library.ucp_cleanup  # without workers and registered memory
        found = structs.LibraryAttributes.asking("max_thread_level")
        self._try("ucp_lib_query", found, trouble="UCX does not answer")
        if found.max_thread_level != structs.MULTI:
            raise DriverError(
                f"UCX {self.version} was built without threads (thread level "
                f"{found.max_thread_level}): driver_options: library names another"
            )
        # The driver reports errors itself. The function is in libucs; without it, UCX prints.
        if "UCX_LOG_LEVEL" not in os.environ:
            with contextlib.suppress(AttributeError):
                library.ucs_global_opts_set_value(b"LOG_LEVEL", b"fatal")
        self._plain = structs.RequestParams()
        self._force = structs.RequestParams.of(flags=structs.CLOSE_BY_FORCE)
        self._eager = structs.RequestParams.of(flags=structs.SEND_EAGERLY | structs.SEND_A_COPY)

    # Contexts and memory.

    def create_context(
        self, name: str, settings: Mapping[str, str], defaults: Mapping[str, str]
    ) -> Context:
        """Create a context; the user's ``settings`` override ``defaults``, both without ``UCX_``.

        Raises ``DriverError`` if UCX does not take one of the user's settings, or does not start.
        """
        config = self._new("ucp_config_read", None, None, trouble="UCX reads no configuration")
        params = structs.ContextParams.of(
            features=structs.Feature.RMA | structs.Feature.AM | structs.Feature.WAKEUP,
            mt_workers_shared=1,
            name=name.encode(),
        )
        try:
            for key, value in defaults.items():
                self._library.ucp_config_modify(config, key.encode(), value.encode())
            for key, value in settings.items():
                code = self._library.ucp_config_modify(config, key.encode(), value.encode())
                if code:
                    raise DriverError(
                        f"driver_options of ucx: UCX {self.version} does not take "
                        f"{key}={value!r} ({describe(code)})"
                    )
            return Context(
                self._new(
                    "ucp_init_version", *LOWEST[:2], params, config, trouble="UCX does not start"
                )
            )
        except TransportError as exc:
            raise DriverError(
                f"{exc} with {dict(settings) or 'its defaults'}: driver_options: transports and "
                "devices must name some that this machine has; UCX_LOG_LEVEL=info says more"
            ) from exc
        finally:
            self._library.ucp_config_release(config)

    def memory_kinds(self, context: Context) -> frozenset[str]:
        """Return the kinds of memory that a context can register, by kvferry's names."""
        found = structs.ContextAttributes.asking("memory_types")
        self._try("ucp_context_query", context, found, trouble="UCX does not answer")
        return frozenset(k for k, bit in structs.MEMORY.items() if found.memory_types >> bit & 1)

    def register(self, context: Context, region: Region) -> tuple[Memory, bytes]:
        """Register memory; return the handle for ``unmap``, and the packed key for peers."""
        params = structs.MapParams.of(
            address=region.address,
            length=region.nbytes,
            memory_type=structs.MEMORY[region.kind],
        )
        trouble = (
            f"cannot register {region.nbytes} bytes of {region.kind} memory at {region.address:#x}"
        )
        memory = Memory(self._new("ucp_mem_map", context, params, trouble=trouble))
        buffer, size = Pointer(), _SIZE()
        pack = self._library.ucp_rkey_pack
        code = pack(context, memory, ctypes.byref(buffer), ctypes.byref(size))
        if code:
            self.unmap(context, memory)
            raise error(code, "cannot describe registered memory to peers")
        packed = ctypes.string_at(buffer, size.value)
        self._library.ucp_rkey_buffer_release(buffer)
        return memory, packed

    def unmap(self, context: Context, memory: Memory) -> None:
        """Deregister memory, by the handle that ``register`` returned."""
        self._try("ucp_mem_unmap", context, memory, trouble="cannot deregister memory")

    # Workers.

    def create_worker(self, context: Context, on_message: Any) -> tuple[WorkerHandle, bytes, int]:  # noqa: ANN401
        """Create a worker; return its handle, its address, and its file descriptor.

        Any thread may use it, but only one at a time. It passes messages to an ``ON_MESSAGE``,
        which must live as long. The descriptor is readable on an event after ``arm``; never close
        it. Raise ``DriverError`` if ``ucp_structs`` are not UCX's.
        """
        params = structs.WorkerParams.of(
            thread_mode=structs.SERIALIZED, events=structs.WAKE_FOR, flags=1
        )
        worker = WorkerHandle(
            self._new("ucp_worker_create", context, params, trouble="cannot create a worker")
        )
        try:
            address, descriptor = self._prepare_worker(worker, on_message)
        except (TransportError, DriverError):
            self.destroy_worker(worker)
            raise
        return worker, address, descriptor

    def _prepare_worker(self, worker: WorkerHandle, on_message: Any) -> tuple[bytes, int]:  # noqa: ANN401
        handler = structs.HandlerParams.of(
            id=_MESSAGE_ID, flags=structs.WHOLE_MESSAGES, cb=on_message
        )
        name = "ucp_worker_set_am_recv_handler"
        self._try(name, worker, handler, trouble="cannot receive messages")
        found = structs.WorkerAttributes.asking("address", "thread_mode")
        self._try("ucp_worker_query", worker, found, trouble="UCX does not answer")
        if found.thread_mode < structs.SERIALIZED or not (
            0 < found.address_length <= MAX_WORKER_ADDRESS and found.address
        ):
            raise DriverError(
                f"UCX {self.version} describes a worker with thread mode {found.thread_mode} and "
                f"an address of {found.address_length} bytes: its structures are others than "
                "those that are known"
            )
        address = ctypes.string_at(found.address, found.address_length)
        self._library.ucp_worker_release_address(worker, found.address)
        event = _INT()
        name = "ucp_worker_get_efd"
        self._try(name, worker, ctypes.byref(event), trouble="no event descriptor")
        return address, event.value

    def arm(self, worker: WorkerHandle) -> bool:
        """Arm a worker's descriptor for its next event; return False if there is work already."""
        return bool(self._library.ucp_worker_arm(worker) == Code.OK)

    def progress(self, worker: WorkerHandle, *, briefly: bool = False) -> int:
        """Let UCP work; return 0 if there was nothing to do. ``briefly`` keeps Python's lock."""
        return int((self._brief if briefly else self._library).ucp_worker_progress(worker))

    # Endpoints.

    def create_endpoint(
        self,
        worker: WorkerHandle,
        address: bytes,
        on_error: Any,  # noqa: ANN401
        number: int,
    ) -> Endpoint:
        """Connect to the worker at an address; raise ``PeerLostError`` if it is unreachable.

        If that shows later, or the peer dies, ``on_error`` (an ``ON_ERROR``, which the caller keeps
        alive) is called once, with the caller's positive number.
        """
        params = structs.EndpointParams.of(
            address=address + _MARGIN,
            err_mode=structs.ERRORS_OF_PEER,
            err_handler_cb=on_error,
            err_handler_arg=number,
        )
        return Endpoint(self._new("ucp_ep_create", worker, params, trouble="cannot connect"))

    def close_endpoint(self, endpoint: Endpoint) -> int:
        """Close an endpoint at once; its requests complete with an error. Return the answer."""
        return int(self._library.ucp_ep_close_nbx(endpoint, ctypes.byref(self._force)))

    def flush(self, endpoint: Endpoint) -> int:
        """Return the answer for when all that was posted on an endpoint has arrived there."""
        return int(self._library.ucp_ep_flush_nbx(endpoint, ctypes.byref(self._plain)))

    def send(self, endpoint: Endpoint, head: bytes, body: bytes | int, nbytes: int) -> int:
        """Send a message; return the answer. Until then, the caller keeps the body's data alive."""
        send = (self._library if nbytes > BRIEF_BYTES else self._brief).ucp_am_send_nbx
        params = ctypes.byref(self._eager)
        return int(send(endpoint, _MESSAGE_ID, head, len(head), body, nbytes, params))

    def transports(self, endpoint: Endpoint) -> list[str]:
        """Return an endpoint's transports, such as ``tcp/eth0``, some repeatedly; [] if unknown."""
        entries = (structs.TransportEntry * 64)()
        found = structs.EndpointAttributes.of(
            entries=ctypes.addressof(entries),
            num_entries=64,
            entry_size=ctypes.sizeof(structs.TransportEntry),
        )
        if self._library.ucp_ep_query(endpoint, ctypes.byref(found)):
            return []
        used = entries[: min(64, found.num_entries)]
        return [f"{e.transport_name.decode()}/{e.device_name.decode()}" for e in used]

    def unpack_key(self, endpoint: Endpoint, packed: bytes) -> RemoteKey:
        """Return a key to a peer's memory, valid on one endpoint until ``destroy_key``."""
        trouble = "cannot reach the peer's memory over this connection"
        return RemoteKey(
            self._new("ucp_ep_rkey_unpack", endpoint, packed + _MARGIN, trouble=trouble)
        )

    def function(self, name: str) -> Any:  # noqa: ANN401
        """Return a ctypes function of libucp, by its name."""
        return getattr(self._library, name)

    def _try(self, name: str, *arguments: object, trouble: str) -> None:
        passed = (ctypes.byref(a) if isinstance(a, structs.Masked) else a for a in arguments)
        code = getattr(self._library, name)(*passed)
        if code:
            raise error(code, trouble)

    def _new(self, name: str, *arguments: object, trouble: str) -> int:
        made = Pointer()
        self._try(name, *arguments, ctypes.byref(made), trouble=trouble)
        return made.value or 0


def status_of(answer: int) -> int:
    """Return the status of an answer: 0, negative, or ``Code.IN_PROGRESS`` for a request."""
    if answer == 0:
        return Code.OK
    return answer - (1 << 64) if answer >= ERRORS_FROM else Code.IN_PROGRESS


def describe(code: int) -> str:
    """Return a status as text, such as "timed out, -20"."""
    try:
        return f"{Code(code).name.lower().replace('_', ' ')}, {code}"
    except ValueError:
        return f"status {code}"


def error(code: int, trouble: str) -> TransportError:
    """Return the exception for a negative status: ``PeerLostError`` if it is in ``LOST``."""
    if code in structs.LOST:
        return PeerLostError(f"{trouble}: UCX says {describe(code)}")
    return TransportError(f"{trouble}: UCX says {describe(code)}; UCX_LOG_LEVEL=info says more")
