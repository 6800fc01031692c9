"""What the driver does with libucp; and what its statuses mean for kvferry.

Handles are addresses, as integers. UCP's callbacks come while ``progress`` or a call that sends
runs, in its thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping
from typing import Any, NewType

from kvferry.core.errors import DriverError, PeerLostError, TransportError
from kvferry.drivers.ucx import ucp_functions as functions
from kvferry.drivers.ucx import ucp_structs as structs
from kvferry.drivers.ucx.ucp_structs import Code, Pointer

Context = NewType("Context", int)
WorkerHandle = NewType("WorkerHandle", int)
Endpoint = NewType("Endpoint", int)
Memory = NewType("Memory", int)
RemoteKey = NewType("RemoteKey", int)

MAJOR = 1
"""Of all versions that are known. Another one may lay out its structures otherwise."""

MINOR = 21
"""The interface that is asked for: that of the oldest version that was tested."""

ERRORS_FROM = (1 << 64) - 100
"""A ``ucs_status_ptr_t`` is 0 (done), an error's status from here on, or a request's address."""

MAX_WORKER_ADDRESS = 1 << 16
MAX_PACKED_KEY = 1 << 12
_MARGIN = bytes(256)
"""Behind what UCX reads without its length: within a transport's part it takes its own for it."""

_MESSAGE_ID = 1
_SIZE = ctypes.c_size_t
_INT = ctypes.c_int


class Ucp:
    """A loaded libucp.

    Args:
        library: as ``kvferry.drivers.ucx.library.load`` gives it, or what stands in for it.

    Raises:
        DriverError: it is of an unknown version, lacks a function, or was not built for threads.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.version = _version(library)
        if self.version[0] != MAJOR or self.version[1] < MINOR:
            raise DriverError(
                f"UCX {'.'.join(map(str, self.version))} is not one that is known: it must be "
                f"{MAJOR}.{MINOR} or later, and below {MAJOR + 1}.0; driver_options: library names "
                "another"
            )
        try:
            self._calls, self._loopable = functions.typed(library)
        except AttributeError as exc:
            raise DriverError(f"UCX {self.version}: {exc}: its build is not complete") from exc
        self.check = self._calls["ucp_request_check_status"]
        self.free = self._calls["ucp_request_free"]
        self._check_threads()
        self._quieten(library)
        self._plain = structs.RequestParams()
        self._force = structs.RequestParams.of(flags=structs.CLOSE_BY_FORCE)
        self._eager = structs.RequestParams.of(flags=structs.SEND_EAGERLY | structs.SEND_A_COPY)

    # What belongs to a whole transport.

    def open(self, name: str, settings: Mapping[str, str], wishes: Mapping[str, str]) -> Context:
        """A context with a configuration of its own.

        Args:
            name: for UCX's messages.
            settings: by UCX's names, without their prefix.
            wishes: likewise, which come first, and do not matter where they are unknown.

        Raises:
            DriverError: UCX does not take one of the settings, or does not start with them.
        """
        config = self._new("ucp_config_read", None, None, trouble="UCX reads no configuration")
        try:
            for key, value in wishes.items():
                self._calls["ucp_config_modify"](config, key.encode(), value.encode())
            for key, value in settings.items():
                code = self._calls["ucp_config_modify"](config, key.encode(), value.encode())
                if code:
                    raise DriverError(
                        f"driver_options of ucx: UCX {self.version} does not take "
                        f"{key}={value!r} ({said(code)})"
                    )
            return Context(self._started(name, config, settings))
        finally:
            self._calls["ucp_config_release"](config)

    def _started(self, name: str, config: int, settings: Mapping[str, str]) -> int:
        params = structs.ContextParams.of(
            features=structs.Feature.RMA | structs.Feature.AM | structs.Feature.WAKEUP,
            mt_workers_shared=1,
            name=name.encode(),
        )
        try:
            return self._new(
                "ucp_init_version", MAJOR, MINOR, params, config, trouble="UCX does not start"
            )
        except TransportError as exc:
            raise DriverError(
                f"{exc} with {dict(settings) or 'its defaults'}: driver_options: transports and "
                "devices must name some that this machine has; UCX_LOG_LEVEL=info says more"
            ) from exc

    def shut(self, context: Context) -> None:
        """Let a context go; its workers have been destroyed, its memory is unmapped."""
        self._calls["ucp_cleanup"](context)

    def memory_kinds(self, context: Context) -> frozenset[str]:
        """The kinds of memory that a context can register."""
        found = structs.ContextAttributes()
        found.field_mask = structs.ContextAttributes.mask("memory_types")
        self._try("ucp_context_query", context, ctypes.byref(found), trouble="UCX does not answer")
        return frozenset(k for k, bit in structs.MEMORY.items() if found.memory_types >> bit & 1)

    def map(self, context: Context, address: int, nbytes: int, kind: str) -> Memory:
        """Register memory.

        Raises:
            TransportError: UCX refuses.
        """
        params = structs.MapParams.of(
            address=address, length=nbytes, memory_type=structs.MEMORY[kind]
        )
        trouble = f"cannot register {nbytes} bytes of {kind} memory at {address:#x}"
        return Memory(self._new("ucp_mem_map", context, params, trouble=trouble))

    def unmap(self, context: Context, memory: Memory) -> None:
        """Undo ``map``."""
        self._try("ucp_mem_unmap", context, memory, trouble="cannot deregister memory")

    def pack(self, context: Context, memory: Memory) -> bytes:
        """What peers need to reach registered memory."""
        buffer, size = Pointer(), _SIZE()
        self._try(
            "ucp_rkey_pack",
            context,
            memory,
            ctypes.byref(buffer),
            ctypes.byref(size),
            trouble="cannot describe registered memory to peers",
        )
        packed = ctypes.string_at(buffer, size.value)
        self._calls["ucp_rkey_buffer_release"](buffer)
        return packed

    # Workers.

    def create_worker(self, context: Context) -> WorkerHandle:
        """A worker for one thread at a time."""
        params = structs.WorkerParams.of(
            thread_mode=structs.SERIALIZED, events=structs.WAKE_FOR, flags=1
        )
        return WorkerHandle(
            self._new("ucp_worker_create", context, params, trouble="cannot create a worker")
        )

    def destroy_worker(self, worker: WorkerHandle) -> None:
        """Undo it, with all that hangs on it."""
        self._calls["ucp_worker_destroy"](worker)

    def worker_address(self, worker: WorkerHandle) -> bytes:
        """Where a worker can be reached.

        Raises:
            DriverError: what comes back does not fit the structures that are known.
        """
        found = structs.WorkerAttributes()
        found.field_mask = structs.WorkerAttributes.mask("address", "thread_mode")
        self._try("ucp_worker_query", worker, ctypes.byref(found), trouble="UCX does not answer")
        if found.thread_mode < structs.SERIALIZED or not (
            0 < found.address_length <= MAX_WORKER_ADDRESS and found.address
        ):
            raise DriverError(
                f"UCX {self.version} describes a worker with thread mode {found.thread_mode} and "
                f"an address of {found.address_length} bytes: its structures are others than "
                "those that are known"
            )
        address = ctypes.string_at(found.address, found.address_length)
        self._calls["ucp_worker_release_address"](worker, found.address)
        return address

    def descriptor(self, worker: WorkerHandle) -> int:
        """The file descriptor that becomes readable when an armed worker has something to do."""
        found = _INT()
        self._try("ucp_worker_get_efd", worker, ctypes.byref(found), trouble="no event descriptor")
        return found.value

    def arm(self, worker: WorkerHandle) -> bool:
        """Whether ``descriptor`` will say when there is something to do; else there is already."""
        return bool(self._calls["ucp_worker_arm"](worker) == Code.OK)

    def progress(self, worker: WorkerHandle) -> int:
        """Do some of what there is to do; 0: there was nothing."""
        done: int = self._calls["ucp_worker_progress"](worker)
        return done

    def receive(self, worker: WorkerHandle, callback: Any) -> None:  # noqa: ANN401
        """Let messages go to an ``ON_MESSAGE``, which the caller keeps alive."""
        params = structs.HandlerParams.of(id=_MESSAGE_ID, flags=structs.WHOLE_MESSAGES, cb=callback)
        self._try(
            "ucp_worker_set_am_recv_handler", worker, params, trouble="cannot receive messages"
        )

    # Endpoints.

    def create_endpoint(
        self,
        worker: WorkerHandle,
        address: bytes,
        on_error: Any,  # noqa: ANN401
        number: int,
    ) -> Endpoint:
        """Connect to a worker; that it cannot be reached may be known later only.

        Args:
            worker: of this side.
            address: of the other.
            on_error: an ``ON_ERROR``, which the caller keeps alive; called once, with ``number``.
            number: positive.

        Raises:
            PeerLostError: it is known already.
            TransportError: UCX refuses.
        """
        params = structs.EndpointParams.of(
            address=address + _MARGIN,
            err_mode=structs.ERRORS_OF_PEER,
            err_handler_cb=on_error,
            err_handler_arg=number,
        )
        return Endpoint(self._new("ucp_ep_create", worker, params, trouble="cannot connect"))

    def close_endpoint(self, endpoint: Endpoint) -> int:
        """Close one at once: what runs on it ends, with an error. As ``flush``."""
        return self._nbx("ucp_ep_close_nbx", endpoint, ctypes.byref(self._force))

    def flush(self, endpoint: Endpoint) -> int:
        """Learn when everything that was posted has arrived: 0, an error, or a request."""
        return self._nbx("ucp_ep_flush_nbx", endpoint, ctypes.byref(self._plain))

    def send(self, endpoint: Endpoint, head: bytes, body: bytes | int, nbytes: int) -> int:
        """Send a message. As ``flush``.

        Args:
            endpoint: to its peer.
            head: what comes first, which may be nothing; copied.
            body: what comes then, or where that lies; kept until the request has ended.
            nbytes: of it.
        """
        params = ctypes.byref(self._eager)
        return self._nbx(
            "ucp_am_send_nbx", endpoint, _MESSAGE_ID, head, len(head), body, nbytes, params
        )

    def transports(self, endpoint: Endpoint) -> list[str]:
        """What moves the bytes of an endpoint, such as ``tcp/eth0``; repeated for each use."""
        entries = (structs.TransportEntry * 64)()
        found = structs.EndpointAttributes(
            entries=entries, num_entries=64, entry_size=ctypes.sizeof(structs.TransportEntry)
        )
        found.field_mask = structs.EndpointAttributes.mask("entries")
        if self._calls["ucp_ep_query"](endpoint, ctypes.byref(found)):
            return []
        used = entries[: min(64, found.num_entries)]
        return [f"{e.transport_name.decode()}/{e.device_name.decode()}" for e in used]

    def unpack(self, endpoint: Endpoint, packed: bytes) -> RemoteKey:
        """The key to a peer's memory, for one endpoint.

        Raises:
            TransportError: it is none, or the endpoint cannot use it.
        """
        trouble = "cannot reach the peer's memory over this connection"
        return RemoteKey(
            self._new("ucp_ep_rkey_unpack", endpoint, packed + _MARGIN, trouble=trouble)
        )

    def destroy_key(self, key: RemoteKey) -> None:
        """Undo ``unpack``."""
        self._calls["ucp_rkey_destroy"](key)

    def function(self, name: str) -> Any:  # noqa: ANN401
        """A function of ctypes, for a loop over many copies."""
        return self._calls[name]

    def looping(self, name: str) -> Any:  # noqa: ANN401
        """The same for a compiled loop, which has no use for one that keeps the lock."""
        return self._loopable[name]

    def _check_threads(self) -> None:
        found = structs.LibraryAttributes()
        found.field_mask = structs.LibraryAttributes.mask("max_thread_level")
        self._try("ucp_lib_query", ctypes.byref(found), trouble="UCX does not answer")
        if found.max_thread_level != structs.MULTI:
            raise DriverError(
                f"UCX {self.version} was built without threads (thread level "
                f"{found.max_thread_level}): driver_options: library names another"
            )

    def _quieten(self, library: ctypes.CDLL) -> None:
        """Let UCX not print what the driver handles and says itself, unless its user set a level.

        The function is libucs's; where there is none of that name, it prints.
        """
        if "UCX_LOG_LEVEL" not in os.environ:
            with contextlib.suppress(AttributeError):
                library.ucs_global_opts_set_value(b"LOG_LEVEL", b"fatal")

    def _try(self, name: str, *arguments: object, trouble: str) -> None:
        code = self._calls[name](*(map(_passed, arguments)))
        if code:
            raise error(code, trouble)

    def _new(self, name: str, *arguments: object, trouble: str) -> int:
        made = Pointer()
        self._try(name, *arguments, ctypes.byref(made), trouble=trouble)
        return made.value or 0

    def _nbx(self, name: str, *arguments: object) -> int:
        answer: int = self._calls[name](*arguments)
        return answer


def status_of(answer: int) -> int:
    """The status in a ``ucs_status_ptr_t``: ``Code.IN_PROGRESS`` for a request."""
    if answer == 0:
        return Code.OK
    return answer - (1 << 64) if answer >= ERRORS_FROM else Code.IN_PROGRESS


def said(code: int) -> str:
    """A status, for people."""
    try:
        return f"{Code(code).name.lower().replace('_', ' ')}, {code}"
    except ValueError:
        return f"status {code}"


def error(code: int, trouble: str) -> TransportError:
    """The error for a status that is one; the only place where they are told apart."""
    if code in structs.LOST:
        return PeerLostError(f"{trouble}: UCX says {said(code)}")
    return TransportError(f"{trouble}: UCX says {said(code)}; UCX_LOG_LEVEL=info says more")


def _passed(argument: object) -> object:
    return ctypes.byref(argument) if isinstance(argument, structs.Masked) else argument


def _version(library: ctypes.CDLL) -> tuple[int, int, int]:
    numbers = [ctypes.c_uint() for _ in range(3)]
    library.ucp_get_version(*map(ctypes.byref, numbers))
    major, minor, patch = (number.value for number in numbers)
    return major, minor, patch
