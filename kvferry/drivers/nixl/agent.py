"""A typed wrapper of NIXL's agent: a method for each call that the driver makes."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NewType, TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import (
    DriverError,
    PeerLostError,
    TransportError,
)
from kvferry.core.memory import CPU, Region
from kvferry.drivers.nixl import accelerators
from kvferry.drivers.nixl.library import NixlLibrary
from kvferry.drivers.nixl.native_threads import NativeThreads
from kvferry.drivers.nixl.options import NixlOptions, parameters, threads

SEGMENTS = {CPU: "DRAM", **dict.fromkeys(accelerators.KINDS, "VRAM")}
"""NIXL's names of memory kinds, by kvferry's names."""

CHUNK_ROWS = 4096
"""The most copies of a chunk: posting a chunk may take as long as moving it."""

Registration = NewType("Registration", object)
"""NIXL's handle of registered memory."""

Rows = npt.NDArray[np.uint64] | list[tuple[int, int, int]]
"""One side of n copies: (n, 3) uint64, C-contiguous, or n tuples: address, bytes, device index."""

StridedRows = npt.NDArray[np.uint64]
"""(n, 5) uint64, rows of evenly spaced descriptors: first address, bytes, device, stride, count."""


# Not frozen, as ``Handle``: to make a frozen dataclass takes a microsecond.
@dataclass(slots=True, kw_only=True, eq=False)
class TransferChunk:
    """The copies that one NIXL transfer makes, as NIXL's descriptors, which any agent can use."""

    local: object
    remote: object


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedList:
    """A list of descriptors that one agent has prepared, valid until ``Agent.release_list``."""

    agent: Agent
    native: Any  # of NIXL's Python API; owns the list


Indices = npt.NDArray[np.int32]
"""(n,) int32, indices of descriptors in a ``PreparedList``."""


@dataclass(slots=True, kw_only=True, eq=False)
class Handle:
    """A NIXL transfer, valid until ``Agent.release``."""

    agent: Agent
    native: object  # of NIXL's native agent
    name: str  # of the remote agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What NIXL measured of one of its transfers, which has succeeded."""

    nbytes: int
    descriptors: int  # after NIXL had merged adjacent copies
    post_seconds: float
    seconds: float  # of the whole transfer, posting included


class Agent:
    """An agent of NIXL with one backend. NIXL serialises calls, so any thread may make them.

    Methods raise ``TransportError`` if NIXL refuses, and ``PeerLostError``, where they name a
    remote agent, if NIXL has dropped it. NIXL's native agent is destroyed by ``close`` only, and
    never once one of its transfers has failed (docs/adr/0018). The name must be unique among all
    agents anywhere.

    Raises:
        DriverError: the backend or a parameter is unknown, or the backend does not load, does not
            start, or reaches no other process.
    """

    def __init__(self, library: NixlLibrary, name: str, options: NixlOptions) -> None:
        self.name = name
        self.library = str(library)
        self._library = library
        self._backend = options.backend
        api = library.api
        config = api.nixl_agent_config(
            enable_prog_thread=options.progress_thread,
            backends=[],
            capture_telemetry=options.telemetry,
            # Calls come from different threads, if one at a time.
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self._success: object = api.nixlBind.NIXL_SUCCESS
        self._under_way: object = api.nixlBind.NIXL_IN_PROG
        self._own = NativeThreads()
        with self._own.starting():
            with library.patient(options.progress_milliseconds):
                self._agent: Any = api.nixl_agent(name, config)
            self._failed = False
            started = parameters(options, library, self._agent.agent)
            self._threads = threads(started)
            self._start(started)
        self.memory = self._memory()  # kinds that the backend supports here
        self.notifies = self._probe_notifications()
        _pin(self._agent.agent)

    def close(self, *, quiet: bool) -> None:
        """Destroy NIXL's agent with its threads. The caller has released all handles.

        Both stay until the process ends if a transfer has ever failed, or if bytes may still land
        (``quiet`` is false).
        """
        agent, self._agent = self._agent, None
        if quiet and not self._failed:
            _unpin(agent.agent)
        else:
            # A progress thread whose peer was killed may spin for as long as the agent lives.
            self._own.run_last()
        # So that a reference to NIXL's Python object, in a traceback say, does not keep the native
        # agent alive.
        agent.agent = None

    @property
    def must_not_post(self) -> bool:
        """Whether the agent must not post any further transfer; its other calls stay allowed."""
        # The backend's threads may still hold a part of a failed transfer, and would run it
        # together with the next transfer (docs/adr/0020).
        return self._failed and self._threads > 0

    def wait_idle(self, deadline: float) -> bool:
        """Wait until a deadline (monotonic); return whether NIXL's threads ended their copies."""
        return self._own.wait_idle(deadline)

    # Memory.

    def register(self, region: Region) -> Registration:
        """Register memory with NIXL, and return the handle that ``deregister`` takes."""
        entry = (region.address, region.nbytes, region.device, "")
        with self._mapped(f"cannot register {region}"):
            return Registration(self._agent.register_memory([entry], SEGMENTS[region.kind]))

    def deregister(self, registration: Registration) -> None:
        """Deregister memory from NIXL."""
        with self._mapped("cannot deregister memory"):
            self._agent.deregister_memory(registration)

    # Peers.

    def metadata(self) -> bytes:
        """Return NIXL's metadata of this agent: how to reach it, and its registered memory."""
        with self._mapped("cannot say its address"):
            metadata: bytes = self._agent.get_agent_metadata()
            return metadata

    def add(self, metadata: bytes) -> str:
        """Load a remote agent's metadata, in addition to older metadata of it; return its name."""
        with self._mapped("cannot take the address"):
            name: bytes | str = self._agent.add_remote_agent(metadata)
        return name.decode(errors="replace") if isinstance(name, bytes) else name

    def remove(self, name: str) -> bool:
        """Close the connection to a remote agent; return False if NIXL had closed it by itself."""
        try:
            with self._mapped(f"cannot disconnect {name}", known=True):
                self._agent.remove_remote_agent(name)
        except PeerLostError:
            return False
        return True

    # Transfers.

    def make_chunk(self, *, kinds: tuple[str, str], local: Rows, remote: Rows) -> TransferChunk:
        """Return a chunk of n >= 1 copies between two kinds. NIXL copies the arrays."""
        near, far = kinds
        make, memory = self._library.api.nixlBind.nixlXferDList, self._agent.nixl_mems
        try:
            return TransferChunk(
                local=make(memory[SEGMENTS[near]], local),
                remote=make(memory[SEGMENTS[far]], remote),
            )
        except self._library.errors as exc:
            raise self._error(exc, "cannot describe a transfer") from exc

    def prepare(self, chunk: TransferChunk, name: str) -> Handle:
        """Make a NIXL transfer, which ``post`` starts; the peer's metadata has been loaded."""
        op = self._agent.nixl_ops["READ"]
        try:
            native = self._agent.agent.createXferReq(op, chunk.local, chunk.remote, name, b"", [])
        except self._library.errors as exc:
            raise self._error(exc, f"cannot prepare a transfer with {name}", known=True) from exc
        return Handle(agent=self, native=native, name=name)

    def prepare_list(self, rows: StridedRows, kind: str, name: str) -> PreparedList:
        """Prepare a list of descriptors, which transfers can name by index.

        ``name`` is the remote agent that has the memory, empty for this side's memory. The
        descriptors of a row follow those of the row before it.
        """
        try:
            native = self._agent.prep_xfer_dlist(name, rows, SEGMENTS[kind])
        except self._library.errors as exc:
            raise self._error(exc, "cannot prepare descriptors", known=bool(name)) from exc
        return PreparedList(agent=self, native=native)

    def release_list(self, prepared: PreparedList) -> None:
        """Release a prepared list; transfers that were made of it go on."""
        try:
            self._agent.release_dlist_handle(prepared.native)
        except self._library.errors as exc:
            raise self._error(exc, "cannot release prepared descriptors") from exc

    def prepare_indexed(
        self, lists: tuple[PreparedList, PreparedList], local: Indices, remote: Indices, name: str
    ) -> Handle:
        """Make a NIXL transfer that reads descriptors of prepared lists (local, remote)."""
        near, far = lists
        op, here, there = self._agent.nixl_ops["READ"], near.native._handle, far.native._handle
        try:
            native = self._agent.agent.makeXferReq(op, here, local, there, remote, b"", [], False)
        except self._library.errors as exc:
            raise self._error(exc, f"cannot prepare a transfer with {name}", known=True) from exc
        return Handle(agent=self, native=native, name=name)

    def post(self, handle: Handle) -> bool:
        """Start a transfer, perhaps for as long as it takes; return whether it has succeeded."""
        try:
            status = self._agent.agent.postXferReq(handle.native, b"")
        except self._library.errors as exc:
            raise self._failing(exc, handle.name) from exc
        return self._succeeded(status, handle.name)

    def check(self, handle: Handle) -> bool:
        """Make progress with a posted transfer, and return whether it has succeeded."""
        try:
            status = self._agent.agent.getXferStatus(handle.native)
        except self._library.errors as exc:
            raise self._failing(exc, handle.name) from exc
        return self._succeeded(status, handle.name)

    def release(self, handle: Handle) -> None:
        """Release a handle. NIXL tries to cancel a running transfer, without waiting for it."""
        try:
            self._agent.agent.releaseXferReq(handle.native)
        except self._library.errors as exc:
            raise self._error(exc, "cannot release a transfer") from exc

    def telemetry(self, handle: Handle) -> Telemetry:
        """Return what NIXL measured of a transfer that has succeeded."""
        with self._mapped("has no telemetry"):
            native = self._agent.agent.getXferTelemetry(handle.native)
        return Telemetry(
            nbytes=native.totalBytes,
            descriptors=native.descCount,
            post_seconds=native.postDuration / 1e6,
            seconds=native.xferDuration / 1e6,
        )

    # Notifications.

    def notify(self, name: str, payload: bytes) -> None:
        """Send a notification of at least one byte, as NIXL drops empty ones, to a remote agent."""
        try:
            self._agent.agent.genNotif(name, payload)
        except self._library.errors as exc:
            raise self._error(exc, f"cannot notify {name}", known=True) from exc

    def notifications(self) -> dict[str, list[bytes]]:
        """Return the payloads that arrived since the last call, by the sending agent's name."""
        try:
            arrived: dict[str, list[bytes]] = self._agent.get_new_notifs()
        except self._library.errors as exc:
            raise self._error(exc, "cannot look for notifications") from exc
        return arrived

    @contextlib.contextmanager
    def _mapped(self, trouble: str, *, known: bool = False) -> Iterator[None]:
        """Turn NIXL's errors into ``TransportError``; too slow for calls of each transfer."""
        try:
            yield
        except self._library.errors as exc:
            raise self._error(exc, trouble, known=known) from exc

    def _error(self, error: Exception, trouble: str, *, known: bool = False) -> TransportError:
        """Return the exception for NIXL's error. ``known``: this agent knew the peer before."""
        bare(error)
        if isinstance(error, self._library.lost):
            return PeerLostError(f"{trouble}: the connection is broken ({error})")
        # NIXL drops a peer when the connection breaks, and does not find it from then on.
        if known and isinstance(error, self._library.unknown):
            return PeerLostError(f"{trouble}: the connection was closed ({error})")
        return TransportError(
            f"{trouble}: {type(error).__name__}: {error}; NIXL_LOG_LEVEL=DEBUG says more"
        )

    def _failing(self, error: Exception, name: str) -> TransportError:
        """Return the exception for a failed transfer, and record that one has failed."""
        self._failed = True
        return self._error(error, f"a transfer with {name} failed", known=True)

    def _succeeded(self, status: object, name: str) -> bool:
        if status == self._success:
            return True
        if status == self._under_way:
            return False
        self._failed = True
        raise TransportError(f"a transfer with {name} failed: NIXL says {status}")

    def _start(self, params: dict[str, str]) -> None:
        try:
            self._agent.create_backend(self._backend, params)
            self._agent.get_agent_metadata()
        except self._library.errors as exc:
            started = self._backend in self._agent.backends
            why = "reaches no other process" if started else f"does not start with {params}"
            raise DriverError(
                f"backend {self._backend} of {self._library} {why} ({exc}); NIXL_LOG_LEVEL=DEBUG "
                "says more, and driver_options: backend names another"
            ) from exc

    def _memory(self) -> frozenset[str]:
        known = {
            name.removesuffix("_SEG") for name in self._agent.get_backend_mem_types(self._backend)
        }
        here = accelerators.present() | {CPU}
        return frozenset(kind for kind in here if SEGMENTS[kind] in known)

    def _probe_notifications(self) -> bool:
        try:
            self.notifications()
        except TransportError:
            return False
        return True


E = TypeVar("E", bound=Exception)


def bare(error: E) -> E:
    """Return an error without its traceback, whose frames would keep the agent alive."""
    return error.with_traceback(None)


def _pin(native: Any) -> None:  # noqa: ANN401
    """Keep a Python object alive until ``_unpin``, even while the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


def _unpin(native: Any) -> None:  # noqa: ANN401
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(native))
