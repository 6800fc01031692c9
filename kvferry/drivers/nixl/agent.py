"""NIXL's agent, typed: a method for each call that the driver makes.

Here and nowhere else, what NIXL raises becomes a ``TransportError``, and its strings for states
become values.
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
from kvferry.drivers.nixl.library import NixlLibrary
from kvferry.drivers.nixl.native_threads import NativeThreads
from kvferry.drivers.nixl.options import NixlOptions, has_cuda, parameters, threads

CUDA = "cuda"
SEGMENTS = {CPU: "DRAM", CUDA: "VRAM"}
"""NIXL's names for memory kinds."""

CHUNK_ROWS = 4096
"""How many copies a chunk has at most. Posting a chunk may take as long as moving it."""

Registration = NewType("Registration", object)
"""NIXL's handle of registered memory."""

Rows = npt.NDArray[np.uint64]
"""(n, 3) uint64: address, bytes and device of each copy, on one side."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferChunk:
    """What one transfer of NIXL's is to move: descriptors that any agent can use.

    Attributes:
        write: whether the local side is the source.
        local: NIXL's descriptors of the local side, which own copies of the rows.
        remote: those of the remote side.
    """

    write: bool
    local: object
    remote: object


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Handle:
    """A transfer of NIXL's, until ``Agent.release``.

    Attributes:
        agent: the agent that made it.
        native: NIXL's own handle.
        name: the name of the remote agent.
    """

    agent: Agent
    native: object
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What NIXL measured of a transfer that is DONE.

    Attributes:
        nbytes: how many bytes it moved.
        descriptors: in how many pieces, after NIXL had merged neighbours.
        post_seconds: the seconds until it had been posted.
        seconds: the seconds until it had ended.
    """

    nbytes: int
    descriptors: int
    post_seconds: float
    seconds: float


class Agent:
    """One agent with one backend. NIXL serialises calls, so any thread may make them.

    NIXL's object is destroyed by ``close`` and nowhere else, least of all by the garbage collector.
    If a transfer of it has failed, it is never destroyed (docs/adr/0012).

    Args:
        library: NIXL.
        name: the agent's name, unique among all agents anywhere.
        options: the backend and its parameters.

    Raises:
        DriverError: the backend does not start, or reaches no other process.
    """

    def __init__(self, library: NixlLibrary, name: str, options: NixlOptions) -> None:
        self.name = name
        self.library = str(library)
        self._library = library
        self._backend = options.backend
        api = library.api
        config = api.nixl_agent_config(
            backends=[],
            capture_telemetry=options.telemetry,
            # Calls come from different threads, if one at a time.
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
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
        """Destroy NIXL's agent, with its threads. All handles have been released.

        Args:
            quiet: whether all of its transfers have ended. If not, NIXL's agent lives on.
        """
        agent, self._agent = self._agent, None
        if quiet and not self._failed:
            _unpin(agent.agent)
        # A reference to NIXL's Python object, in a traceback say, keeps nothing native alive.
        agent.agent = None

    @property
    def must_not_post(self) -> bool:
        """Whether the agent must not post any more; everything else it may do.

        The threads that its backend has besides its progress thread may keep part of a transfer
        that has failed, and would run it when they next move anything (docs/adr/0018).
        """
        return self._failed and self._threads > 0

    def wait_idle(self, deadline: float) -> bool:
        """Wait until none of its threads is in a copy that it is in now.

        Args:
            deadline: when to give up, by ``time.monotonic``.

        Returns:
            Whether that was in time.
        """
        return self._own.wait_idle(deadline)

    # Memory.

    def register(self, region: Region) -> Registration:
        """Register memory with NIXL."""
        entry = (region.address, region.nbytes, region.device, "")
        with self._mapped(f"cannot register {region}"):
            return Registration(self._agent.register_memory([entry], SEGMENTS[region.kind]))

    def deregister(self, registration: Registration) -> None:
        """Deregister memory."""
        with self._mapped("cannot deregister memory"):
            self._agent.deregister_memory(registration)

    # Peers.

    def metadata(self) -> bytes:
        """Return NIXL's metadata: how to reach this agent and what it has registered."""
        with self._mapped("cannot say its address"):
            metadata: bytes = self._agent.get_agent_metadata()
            return metadata

    def add(self, metadata: bytes) -> str:
        """Load the metadata of another agent, or newer metadata of a known one.

        Returns:
            The name of that agent.
        """
        with self._mapped("cannot take the address"):
            name: bytes | str = self._agent.add_remote_agent(metadata)
        return name.decode(errors="replace") if isinstance(name, bytes) else name

    def remove(self, name: str) -> bool:
        """Close the connection to another agent.

        Returns:
            Whether it was open: NIXL closes a broken one by itself.
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
        """Copy rows into a chunk for ``prepare``.

        Args:
            write: whether the local side is the source.
            kinds: the memory kinds of the local and of the remote side.
            local: (n, 3) rows, C-contiguous; n is at least 1.
            remote: likewise.
        """
        try:
            return TransferChunk(
                write=write,
                local=self._agent.get_xfer_descs(local, SEGMENTS[kinds[0]]),
                remote=self._agent.get_xfer_descs(remote, SEGMENTS[kinds[1]]),
            )
        except self._library.errors as exc:
            raise self._error(exc, "cannot describe a transfer") from exc

    def prepare(self, part: TransferChunk, name: str) -> Handle:
        """Make a transfer of a chunk with another agent. Nothing moves yet."""
        op = "WRITE" if part.write else "READ"
        try:
            native = self._agent.initialize_xfer(op, part.local, part.remote, name)
        except self._library.errors as exc:
            raise self._error(exc, f"cannot prepare a transfer with {name}", known=True) from exc
        return Handle(agent=self, native=native, name=name)

    def post(self, handle: Handle) -> bool:
        """Start a transfer. The call may take as long as the whole transfer.

        Returns:
            Whether the transfer has ended already.
        """
        try:
            state = self._agent.transfer(handle.native)
        except self._library.errors as exc:
            raise self._failing(exc, handle.name) from exc
        return state == "DONE" or self._running(state, handle.name)

    def check(self, handle: Handle) -> bool:
        """Drive a transfer and return whether it has ended."""
        try:
            state = self._agent.check_xfer_state(handle.native)
        except self._library.errors as exc:
            raise self._failing(exc, handle.name) from exc
        return state == "DONE" or self._running(state, handle.name)

    def release(self, handle: Handle) -> None:
        """Release a handle. NIXL tries to cancel what still runs, and does not wait for it."""
        try:
            self._agent.release_xfer_handle(handle.native)
        except self._library.errors as exc:
            raise self._error(exc, "cannot release a transfer") from exc

    def telemetry(self, handle: Handle) -> Telemetry:
        """Return what NIXL measured of a transfer, which has ended well: before, that is noise."""
        with self._mapped("has no telemetry"):
            native = self._agent.get_xfer_telemetry(handle.native)
        return Telemetry(
            nbytes=native.totalBytes,
            descriptors=native.descCount,
            post_seconds=native.postDuration / 1e6,
            seconds=native.xferDuration / 1e6,
        )

    # Notifications.

    def notify(self, name: str, payload: bytes) -> None:
        """Send a notification, which must not be empty: NIXL drops empty ones."""
        with self._mapped(f"cannot notify {name}", known=True):
            self._agent.send_notif(name, payload)

    def notifications(self) -> dict[str, list[bytes]]:
        """Return the notifications that arrived since the last call, by sender."""
        with self._mapped("cannot look for notifications"):
            arrived: dict[str, list[bytes]] = self._agent.get_new_notifs()
            return arrived

    @contextlib.contextmanager
    def _mapped(self, trouble: str, *, known: bool = False) -> Iterator[None]:
        """Turn NIXL's errors into a ``TransportError``.

        Methods that are called for each transfer do without it: a context manager costs as much as
        a call of NIXL's.
        """
        try:
            yield
        except self._library.errors as exc:
            raise self._error(exc, trouble, known=known) from exc

    def _error(self, error: Exception, trouble: str, *, known: bool = False) -> TransportError:
        """Return what to raise for an error of NIXL's, and take the error's frames from it.

        Args:
            error: what NIXL raised.
            trouble: what failed.
            known: whether NIXL knew the peer and its memory. If it then says that it knows no such
                thing, it has dropped the peer, as it does by itself when a connection breaks.
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
        """Return what to raise for a transfer that failed, and remember that one has."""
        self._failed = True
        return self._error(error, f"a transfer with {name} failed", known=True)

    def _running(self, state: str, name: str) -> bool:
        """Return false for a transfer that is under way, and raise for one that has failed."""
        if state == "PROC":
            return False
        self._failed = True
        raise TransportError(f"a transfer with {name} failed: NIXL says {state}")

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
        kinds = {kind for kind, segment in SEGMENTS.items() if segment in known}
        # NIXL's backends claim it regardless.
        return frozenset(kinds if has_cuda() else kinds - {CUDA})

    def _probe_notifications(self) -> bool:
        try:
            self.notifications()
        except TransportError:
            return False
        return True


E = TypeVar("E", bound=Exception)


def bare(error: E) -> E:
    """Return an error without its traceback.

    The frames hold the agent and its handles, and a kept error would keep them.
    """
    return error.with_traceback(None)


def _pin(native: Any) -> None:  # noqa: ANN401
    """Keep an object alive, even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


def _unpin(native: Any) -> None:  # noqa: ANN401
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(native))
