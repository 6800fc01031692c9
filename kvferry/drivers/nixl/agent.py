"""A typed wrapper of NIXL's agent: a method for each call that the driver makes.

It turns the exceptions that NIXL raises into ``TransportError``, and NIXL's strings for the states
of a transfer into booleans.
"""

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
"""One side of n copies: address, length in bytes and device index of each, as (n, 3) uint64,
C-contiguous, or as a list of n tuples."""

StridedRows = npt.NDArray[np.uint64]
"""(n, 5) uint64, n series of descriptors that are evenly spaced: address of the first, length of
each in bytes, device index, bytes from one to the next, and number of descriptors."""


# Not frozen, as ``Handle``: to make a frozen dataclass takes a microsecond.
@dataclass(slots=True, kw_only=True, eq=False)
class TransferChunk:
    """The copies that one NIXL transfer makes, as NIXL's descriptors.

    The descriptors do not refer to the arrays that they were made from. Each agent of this
    transport (see ``AgentPair``) can use them.

    Attributes:
        write: whether the local side is the source.
        local: NIXL's descriptors of the local side.
        remote: NIXL's descriptors of the remote side.
    """

    write: bool
    local: object
    remote: object


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedList:
    """A list of descriptors that one agent has prepared, valid until ``Agent.release_list``.

    Attributes:
        agent: the agent that prepared the list.
        native: the handle of NIXL's Python API, which owns the list.
    """

    agent: Agent
    native: Any


Indices = npt.NDArray[np.int32]
"""(n,) int32, indices of descriptors in a ``PreparedList``."""


@dataclass(slots=True, kw_only=True, eq=False)
class Handle:
    """A NIXL transfer, valid until ``Agent.release``.

    Attributes:
        agent: the agent that made the transfer.
        native: the handle of NIXL's native agent.
        name: the name of the remote agent.
    """

    agent: Agent
    native: object
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What NIXL measured of one of its transfers, which has succeeded.

    Attributes:
        nbytes: how many bytes the transfer moved.
        descriptors: how many pieces these bytes were in, after NIXL had merged adjacent copies.
        post_seconds: how many seconds posting took.
        seconds: how many seconds the whole transfer took, posting included.
    """

    nbytes: int
    descriptors: int
    post_seconds: float
    seconds: float


class Agent:
    """An agent of NIXL with one backend. NIXL serialises calls, so any thread may make them.

    NIXL's native agent is destroyed by ``close`` only, never by the garbage collector. Once one of
    the agent's transfers has failed, not even ``close`` destroys it (docs/adr/0018).

    Args:
        library: the imported NIXL.
        name: the agent's name, unique among all agents anywhere.
        options: the backend and its parameters.

    Attributes:
        name: the agent's name.
        library: the name and version of NIXL's package, as text.
        memory: the memory kinds that the backend supports on this machine.
        notifies: whether the backend carries notifications.

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
        self.memory = self._memory()
        self.notifies = self._probe_notifications()
        _pin(self._agent.agent)

    def close(self, *, quiet: bool) -> None:
        """Destroy NIXL's agent with its threads. The caller has released all handles.

        If ``quiet`` is false, or a transfer of the agent has ever failed, NIXL's agent is not
        destroyed: it and its threads stay until the process ends.

        Args:
            quiet: whether no byte of the agent's transfers can land any more.
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
        """Whether the agent must not post any further transfer; its other calls stay allowed.

        True once a transfer has failed, if the backend has threads besides its progress thread.
        These threads may still hold a part of the failed transfer, and would run that part together
        with the next transfer (docs/adr/0020).
        """
        return self._failed and self._threads > 0

    def wait_idle(self, deadline: float) -> bool:
        """Wait until the copies that NIXL's threads are making now have ended.

        Args:
            deadline: when to give up, by ``time.monotonic``.

        Returns:
            Whether they ended before the deadline.
        """
        return self._own.wait_idle(deadline)

    # Memory.

    def register(self, region: Region) -> Registration:
        """Register memory with NIXL, and return the handle that ``deregister`` takes.

        Raises:
            TransportError: NIXL refuses.
        """
        entry = (region.address, region.nbytes, region.device, "")
        with self._mapped(f"cannot register {region}"):
            return Registration(self._agent.register_memory([entry], SEGMENTS[region.kind]))

    def deregister(self, registration: Registration) -> None:
        """Deregister memory from NIXL.

        Raises:
            TransportError: NIXL refuses.
        """
        with self._mapped("cannot deregister memory"):
            self._agent.deregister_memory(registration)

    # Peers.

    def metadata(self) -> bytes:
        """Return NIXL's metadata of this agent: how to reach it, and the memory it has registered.

        Raises:
            TransportError: NIXL refuses.
        """
        with self._mapped("cannot say its address"):
            metadata: bytes = self._agent.get_agent_metadata()
            return metadata

    def add(self, metadata: bytes) -> str:
        """Load the metadata of another agent, so that transfers with that agent can be prepared.

        If older metadata of the other agent are loaded already, NIXL adds what is new.

        Returns:
            The name of the other agent, according to the metadata.

        Raises:
            TransportError: NIXL refuses the metadata.
        """
        with self._mapped("cannot take the address"):
            name: bytes | str = self._agent.add_remote_agent(metadata)
        return name.decode(errors="replace") if isinstance(name, bytes) else name

    def remove(self, name: str) -> bool:
        """Close the connection to another agent.

        Returns:
            Whether the connection was still open: NIXL closes a broken one by itself.

        Raises:
            TransportError: NIXL refuses.
        """
        try:
            with self._mapped(f"cannot disconnect {name}", known=True):
                self._agent.remove_remote_agent(name)
        except PeerLostError:
            return False
        return True

    # Transfers.

    def make_chunk(
        self, *, write: bool, kinds: tuple[str, str], local: Rows, remote: Rows
    ) -> TransferChunk:
        """Return a chunk for ``prepare``. NIXL copies the arrays, so the caller may reuse them.

        Args:
            write: whether the local side is the source.
            kinds: the memory kinds of the local and of the remote side.
            local: the local side of n copies, n at least 1.
            remote: the remote side of these copies.

        Raises:
            TransportError: NIXL refuses.
        """
        near, far = kinds
        make, memory = self._library.api.nixlBind.nixlXferDList, self._agent.nixl_mems
        try:
            return TransferChunk(
                write=write,
                local=make(memory[SEGMENTS[near]], local),
                remote=make(memory[SEGMENTS[far]], remote),
            )
        except self._library.errors as exc:
            raise self._error(exc, "cannot describe a transfer") from exc

    def prepare(self, chunk: TransferChunk, name: str) -> Handle:
        """Make a NIXL transfer for the copies of a chunk. ``post`` starts the transfer.

        Args:
            chunk: the copies to make.
            name: the name of the remote agent, whose metadata this agent has loaded.

        Raises:
            PeerLostError: NIXL has dropped the remote agent.
            TransportError: NIXL refuses.
        """
        op = self._agent.nixl_ops["WRITE" if chunk.write else "READ"]
        try:
            native = self._agent.agent.createXferReq(op, chunk.local, chunk.remote, name, b"", [])
        except self._library.errors as exc:
            raise self._error(exc, f"cannot prepare a transfer with {name}", known=True) from exc
        return Handle(agent=self, native=native, name=name)

    def prepare_list(self, rows: StridedRows, kind: str, name: str) -> PreparedList:
        """Prepare a list of descriptors, so that transfers can name them by index.

        What NIXL keeps grows with the rows, not with the descriptors that they stand for.

        Args:
            rows: (n, 5) uint64, C-contiguous: the rows of the list. The descriptors of a row follow
                those of the row before it.
            kind: the memory kind of all descriptors.
            name: the name of the remote agent that has the memory; empty for this side's memory.

        Raises:
            PeerLostError: NIXL has dropped the remote agent.
            TransportError: NIXL refuses.
        """
        try:
            native = self._agent.prep_xfer_dlist(name, rows, SEGMENTS[kind])
        except self._library.errors as exc:
            raise self._error(exc, "cannot prepare descriptors", known=bool(name)) from exc
        return PreparedList(agent=self, native=native)

    def release_list(self, prepared: PreparedList) -> None:
        """Release a prepared list; transfers that were made of it go on.

        Raises:
            TransportError: NIXL refuses.
        """
        try:
            self._agent.release_dlist_handle(prepared.native)
        except self._library.errors as exc:
            raise self._error(exc, "cannot release prepared descriptors") from exc

    def prepare_indexed(
        self, lists: tuple[PreparedList, PreparedList], local: Indices, remote: Indices, name: str
    ) -> Handle:
        """Make a NIXL transfer that reads descriptors of prepared lists. ``post`` starts it.

        Args:
            lists: the local list and the remote one.
            local: (n,) int32, indices in the local list.
            remote: (n,) int32, indices in the remote list.
            name: the name of the remote agent.

        Raises:
            PeerLostError: NIXL has dropped the remote agent.
            TransportError: NIXL refuses.
        """
        near, far = lists
        op, here, there = self._agent.nixl_ops["READ"], near.native._handle, far.native._handle
        try:
            native = self._agent.agent.makeXferReq(op, here, local, there, remote, b"", [], False)
        except self._library.errors as exc:
            raise self._error(exc, f"cannot prepare a transfer with {name}", known=True) from exc
        return Handle(agent=self, native=native, name=name)

    def post(self, handle: Handle) -> bool:
        """Start a transfer. The call may take as long as the whole transfer.

        Returns:
            True if the transfer has already succeeded, False if it is under way.

        Raises:
            TransportError: the transfer failed; ``PeerLostError`` if NIXL has lost the peer.
        """
        try:
            status = self._agent.agent.postXferReq(handle.native, b"")
        except self._library.errors as exc:
            raise self._failing(exc, handle.name) from exc
        return self._succeeded(status, handle.name)

    def check(self, handle: Handle) -> bool:
        """Make progress with a posted transfer, and return whether it has succeeded.

        Returns:
            True if the transfer has succeeded, False if it is under way.

        Raises:
            TransportError: the transfer failed; ``PeerLostError`` if NIXL has lost the peer.
        """
        try:
            status = self._agent.agent.getXferStatus(handle.native)
        except self._library.errors as exc:
            raise self._failing(exc, handle.name) from exc
        return self._succeeded(status, handle.name)

    def release(self, handle: Handle) -> None:
        """Release a handle. NIXL tries to cancel a running transfer, but does not wait for its end.

        Raises:
            TransportError: NIXL refuses.
        """
        try:
            self._agent.agent.releaseXferReq(handle.native)
        except self._library.errors as exc:
            raise self._error(exc, "cannot release a transfer") from exc

    def telemetry(self, handle: Handle) -> Telemetry:
        """Return what NIXL measured of a transfer that has succeeded.

        Raises:
            TransportError: NIXL has no telemetry of the transfer.
        """
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
        """Send a notification to another agent.

        Args:
            name: the name of the remote agent.
            payload: the bytes to send, at least one: NIXL drops empty notifications.

        Raises:
            PeerLostError: the connection is broken, or NIXL has dropped the remote agent.
            TransportError: NIXL refuses.
        """
        try:
            self._agent.agent.genNotif(name, payload)
        except self._library.errors as exc:
            raise self._error(exc, f"cannot notify {name}", known=True) from exc

    def notifications(self) -> dict[str, list[bytes]]:
        """Return the payloads that arrived since the last call, by the sending agent's name.

        Raises:
            TransportError: NIXL refuses, or its backend carries no notifications.
        """
        try:
            arrived: dict[str, list[bytes]] = self._agent.get_new_notifs()
        except self._library.errors as exc:
            raise self._error(exc, "cannot look for notifications") from exc
        return arrived

    @contextlib.contextmanager
    def _mapped(self, trouble: str, *, known: bool = False) -> Iterator[None]:
        """Within the context, turn an error of NIXL into a ``TransportError``.

        Methods that are called for each transfer or notification do not use this context manager,
        since entering one costs as much as a call of NIXL.

        Args:
            trouble: what failed, for the error's text.
            known: whether this agent knew the peer and its memory before the call (see ``_error``).
        """
        try:
            yield
        except self._library.errors as exc:
            raise self._error(exc, trouble, known=known) from exc

    def _error(self, error: Exception, trouble: str, *, known: bool = False) -> TransportError:
        """Return the exception to raise for an error of NIXL, and strip the error's traceback.

        Args:
            error: what NIXL raised.
            trouble: what failed, for the exception's text.
            known: whether this agent knew the peer and its memory before the call. If so, NIXL's
                "not found" error means that NIXL has dropped the peer, as it does when a connection
                breaks.

        Returns:
            A ``PeerLostError`` if the connection to the peer is gone, else a ``TransportError``.
        """
        bare(error)
        if isinstance(error, self._library.lost):
            return PeerLostError(f"{trouble}: the connection is broken ({error})")
        if known and isinstance(error, self._library.unknown):
            return PeerLostError(f"{trouble}: the connection was closed ({error})")
        return TransportError(
            f"{trouble}: {type(error).__name__}: {error}; NIXL_LOG_LEVEL=DEBUG says more"
        )

    def _failing(self, error: Exception, name: str) -> TransportError:
        """Return the exception to raise for a failed transfer, and record that one has failed.

        From then on ``close`` does not destroy NIXL's agent; see also ``must_not_post``.

        Args:
            error: what NIXL raised for the transfer.
            name: the name of the remote agent.
        """
        self._failed = True
        return self._error(error, f"a transfer with {name} failed", known=True)

    def _succeeded(self, status: object, name: str) -> bool:
        """Return whether a posted transfer has succeeded, given NIXL's status of it.

        Args:
            status: the status, of NIXL's enumeration.
            name: the name of the remote agent.

        Returns:
            True if the transfer has succeeded, False if it is under way.

        Raises:
            TransportError: the transfer has failed.
        """
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
    """Return an error without its traceback.

    The traceback's frames refer to the agent and its handles, which a stored error would keep
    alive.
    """
    return error.with_traceback(None)


def _pin(native: Any) -> None:  # noqa: ANN401
    """Keep a Python object alive until ``_unpin``, even while the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


def _unpin(native: Any) -> None:  # noqa: ANN401
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(native))
