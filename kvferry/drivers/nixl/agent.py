"""A typed wrapper of NIXL's native agent: a method for each call that the driver makes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import DriverError, PeerLostError, TransportError
from kvferry.core.memory import CPU, CUDA, Region
from kvferry.drivers.cuda import find_cuda
from kvferry.drivers.nixl.library import NixlLibrary
from kvferry.drivers.nixl.native_threads import NativeThreads
from kvferry.drivers.nixl.options import NixlOptions, parameters, threads

_ACCELERATORS = {
    "libhsa-runtime64.so.1": CUDA,  # ROCm's
    "libze_loader.so.1": "xpu",
    "libhl-thunk.so": "hpu",
}
"""Kinds of memory by driver library, which UCX needs, too; for NVIDIA's see ``find_cuda``."""

SEGMENTS = {CPU: "DRAM_SEG", CUDA: "VRAM_SEG", "xpu": "VRAM_SEG", "hpu": "VRAM_SEG"}
"""NIXL's names of memory kinds, by those that torch gives to their devices."""

Registration = NewType("Registration", object)
"""NIXL's handle of registered memory."""

Rows = npt.NDArray[np.uint64] | list[tuple[int, int, int]]
"""One side of n copies: (n, 3) uint64, C-contiguous, or n tuples: address, bytes, device index."""

StridedRows = npt.NDArray[np.uint64]
"""(n, 5) uint64, rows of evenly spaced descriptors: first address, bytes, device, stride, count."""

PreparedList = NewType("PreparedList", int)
"""NIXL's handle of descriptors that one agent has prepared, until ``Agent.release_list``."""

Indices = npt.NDArray[np.int32]
"""(n,) int32, indices of descriptors in a ``PreparedList``."""


# Not frozen, as ``Handle``: to make a frozen dataclass takes a microsecond.
@dataclass(slots=True, kw_only=True, eq=False)
class TransferChunk:
    """The copies that one NIXL transfer makes, as NIXL's descriptors, which any agent can use."""

    local: object
    remote: object


@dataclass(slots=True, kw_only=True, eq=False)
class Handle:
    """A NIXL transfer, valid until ``Agent.release``."""

    agent: Agent
    native: object  # of NIXL's native agent
    name: str  # of the remote agent


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
        self._bindings = library.api.nixlBind
        self._read: object = self._bindings.NIXL_READ
        self._success: object = self._bindings.NIXL_SUCCESS
        self._under_way: object = self._bindings.NIXL_IN_PROG
        self._failed = False
        self._own = NativeThreads()
        with self._own.starting():
            self._native: Any = self._bindings.nixlAgent(name, self._config(options))
            started = parameters(options, library, self._native)
            self._threads = threads(started)
            self.memory = self._start(options.backend, started)
        self.notifies = True
        try:
            self.notifications()
        except TransportError:
            self.notifies = False
        # Keeps it alive until ``close``, even while the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._native))

    def close(self, *, quiet: bool) -> None:
        """Destroy NIXL's agent with its threads; the caller has released all handles.

        Both stay if a transfer has ever failed, or bytes may still land (``quiet`` is false).
        """
        native, self._native = self._native, None
        if quiet and not self._failed:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(native))

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
        rows = [(region.address, region.nbytes, region.device, "")]
        descriptors = self._bindings.nixlRegDList(self._segment(region.kind), rows)
        self._call(f"cannot register {region}", "registerMem", descriptors)
        return Registration(descriptors)

    def deregister(self, registration: Registration) -> None:
        """Deregister memory from NIXL."""
        self._call("cannot deregister memory", "deregisterMem", registration)

    # Peers.

    def metadata(self) -> bytes:
        """Return NIXL's metadata of this agent: how to reach it, and its registered memory."""
        metadata: bytes = self._call("cannot say its address", "getLocalMD")
        return metadata

    def add(self, metadata: bytes) -> str:
        """Load a remote agent's metadata, in addition to older metadata of it; return its name."""
        name: bytes = self._call("cannot take the address", "loadRemoteMD", metadata)
        return name.decode(errors="replace")

    def remove(self, name: str) -> None:
        """Close the connection to a remote agent, unless NIXL has closed it by itself."""
        self._give_back("invalidateRemoteMD", name)

    # Transfers.

    def make_chunk(self, *, kinds: tuple[str, str], local: Rows, remote: Rows) -> TransferChunk:
        """Return a chunk of n >= 1 copies between two kinds. NIXL copies the arrays."""
        near, far = kinds
        make = self._bindings.nixlXferDList
        try:
            return TransferChunk(
                local=make(self._segment(near), local), remote=make(self._segment(far), remote)
            )
        except self._library.errors as exc:
            raise self._error(exc, "cannot describe a transfer") from exc

    def prepare(self, chunk: TransferChunk, name: str) -> Handle:
        """Make a NIXL transfer, which ``post`` starts; the peer's metadata has been loaded."""
        return self._made(name, "createXferReq", chunk.local, chunk.remote, name, b"", [])

    def prepare_list(self, rows: StridedRows, kind: str, name: str) -> PreparedList:
        """Prepare a list of descriptors, which transfers can name by index.

        ``name`` is the remote agent that has the memory, empty for this side's memory. The
        descriptors of a row follow those of the row before it.
        """
        owner = name or self._bindings.NIXL_INIT_AGENT
        arguments = (owner, self._segment(kind), rows)
        why = "cannot prepare descriptors"
        return PreparedList(self._call(why, "prepXferDlist", *arguments, known=bool(name)))

    def release_list(self, prepared: PreparedList) -> None:
        """Release a prepared list; transfers that were made of it go on."""
        self._give_back("releasedDlistH", prepared)

    def prepare_indexed(
        self, near: PreparedList, local: Indices, far: PreparedList, remote: Indices, name: str
    ) -> Handle:
        """Make a NIXL transfer that reads descriptors of prepared lists (local, remote)."""
        return self._made(name, "makeXferReq", near, local, far, remote, b"", [], False)

    def post(self, handle: Handle) -> bool:
        """Start a transfer, perhaps for as long as it takes; return whether it has succeeded."""
        return self._ended(handle, "postXferReq", handle.native, b"")

    def check(self, handle: Handle) -> bool:
        """Make progress with a posted transfer, and return whether it has succeeded."""
        return self._ended(handle, "getXferStatus", handle.native)

    def release(self, handle: Handle) -> None:
        """Release a handle. NIXL tries to cancel a running transfer, without waiting for it."""
        self._give_back("releaseXferReq", handle.native)

    # Notifications.

    def notify(self, name: str, payload: bytes) -> None:
        """Send a notification of at least one byte, as NIXL drops empty ones, to a remote agent."""
        self._call(f"cannot notify {name}", "genNotif", name, payload, known=True)

    def notifications(self) -> dict[str, list[bytes]]:
        """Return the payloads that arrived since the last call, by the sending agent's name."""
        why = "cannot look for notifications"
        arrived: dict[str, list[bytes]] = self._call(why, "getNotifs", {})
        return arrived

    # Calls. The native agent's methods are named by text: the frames in an error's traceback must
    # hold no reference to that agent, which would keep it alive after ``close``.

    def _call(self, trouble: str, method: str, *arguments: object, known: bool = False) -> Any:  # noqa: ANN401
        """Call the native agent. ``known``: an agent that it does not find, it knew before."""
        try:
            return getattr(self._native, method)(*arguments)
        except self._library.errors as exc:
            raise self._error(exc, trouble, known=known) from exc

    def _made(self, name: str, method: str, *arguments: object) -> Handle:
        # Without ``_call``, as in ``_ended``: to make its text takes time in every transfer.
        try:
            native = getattr(self._native, method)(self._read, *arguments)
        except self._library.errors as exc:
            raise self._error(exc, f"cannot prepare a transfer with {name}", known=True) from exc
        return Handle(agent=self, native=native, name=name)

    def _ended(self, handle: Handle, method: str, *arguments: object) -> bool:
        """Call the native agent; return whether a transfer has succeeded, or raise if it failed."""
        try:
            status = getattr(self._native, method)(*arguments)
        except self._library.errors as exc:
            self._failed = True
            raise self._error(exc, f"a transfer with {handle.name} failed", known=True) from exc
        if status == self._success:
            return True
        if status == self._under_way:
            return False
        self._failed = True
        raise TransportError(f"a transfer with {handle.name} failed: NIXL says {status}")

    def _give_back(self, method: str, native: object) -> None:
        # What NIXL refuses to give up, it keeps until the agent is destroyed. Not
        # ``contextlib.suppress``, which takes as long as the call.
        try:  # noqa: SIM105
            getattr(self._native, method)(native)
        except self._library.errors:
            pass

    def _error(self, error: Exception, trouble: str, *, known: bool = False) -> TransportError:
        error.__traceback__ = None  # its frames would keep the agent alive
        if isinstance(error, self._library.lost):
            return PeerLostError(f"{trouble}: the connection is broken ({error})")
        # NIXL drops a peer when the connection breaks, and does not find it from then on.
        if known and isinstance(error, self._library.unknown):
            return PeerLostError(f"{trouble}: the connection was closed ({error})")
        return TransportError(
            f"{trouble}: {type(error).__name__}: {error}; NIXL_LOG_LEVEL=DEBUG says more"
        )

    def _segment(self, kind: str) -> object:
        return getattr(self._bindings, SEGMENTS[kind])

    def _config(self, options: NixlOptions) -> object:
        config = self._bindings.nixlAgentConfig()
        config.useProgThread = options.progress_thread
        config.pthrDelay = options.progress_milliseconds * 1000
        config.captureTelemetry = options.telemetry
        # Calls come from different threads, if one at a time.
        config.syncMode = self._bindings.NIXL_THREAD_SYNC_STRICT
        return config

    def _start(self, backend: str, params: dict[str, str]) -> frozenset[str]:
        """Start the backend, and return the kinds of memory that it supports here."""
        why = f"does not start with {params}"
        try:
            handle = self._native.createBackend(backend, params)
            why = "reaches no other process"
            self._native.getLocalMD()
            _, supported = self._native.getBackendParams(handle)
        except self._library.errors as exc:
            raise DriverError(
                f"backend {backend} of {self._library} {why} ({exc}); NIXL_LOG_LEVEL=DEBUG "
                "says more, and driver_options: backend names another"
            ) from exc
        return frozenset(kind for kind in accelerators() | {CPU} if SEGMENTS[kind] in supported)


def accelerators() -> frozenset[str]:
    """Return the memory kinds of the accelerators whose driver this machine has."""
    # NIXL's backends claim VRAM on every machine. Whether UCX was built for it, too (NIXL's wheels:
    # CUDA only), shows only when memory is registered.
    found = {kind for library, kind in _ACCELERATORS.items() if _loads(library)}
    return frozenset(found if find_cuda() is None else found | {CUDA})


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
