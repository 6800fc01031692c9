"""NIXL's agent, typed: a method for each of its calls that the driver makes.

What NIXL raises becomes a ``TransportError`` here and nowhere else, and its words for states become
values.
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
    TransportUnsupportedError,
)
from kvferry.core.memory import CPU, Region
from kvferry.drivers.nixl.library import NixlLibrary
from kvferry.drivers.nixl.native_threads import NativeThreads
from kvferry.drivers.nixl.options import NixlOptions, has_cuda, parameters, threads

CUDA = "cuda"
SEGMENTS = {CPU: "DRAM", CUDA: "VRAM"}
"""NIXL's names for memory kinds."""

CHUNK_ROWS = 4096
"""How many copies a part has at most. Posting one may take as long as moving it."""

Registration = NewType("Registration", object)
"""NIXL's handle of registered memory."""

Rows = npt.NDArray[np.uint64]
"""(n, 3): address, bytes and device of each copy, on one side."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferChunk:
    """What one transfer of NIXL's is to move: rows that NIXL has copied, for any agent."""

    write: bool
    local: object
    remote: object


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Handle:
    """A transfer of NIXL's. It lasts until ``Agent.release``.

    Attributes:
        agent: whose it is.
        native: NIXL's own handle.
        name: of the agent with the remote side.
    """

    agent: Agent
    native: object
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What NIXL measured of a transfer that is DONE.

    Attributes:
        nbytes: moved.
        descriptors: how many pieces they were in, after NIXL had merged neighbours.
        post_seconds: until it had been posted, and ``seconds``: until it had ended.
    """

    nbytes: int
    descriptors: int
    post_seconds: float
    seconds: float


class Agent:
    """One agent with one backend. Calls are serialised by NIXL, so any thread may make them.

    It ends in ``close`` and nowhere else, least of all when garbage is collected; one of which a
    transfer has failed never ends (docs/adr/0012).

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
        """End the agent, with its threads; its handles have been released.

        Args:
            quiet: whether all of its transfers have ended. If not, it lives on.
        """
        agent, self._agent = self._agent, None
        if quiet and not self._failed:
            _unpin(agent.agent)
        # Whoever still has NIXL's object, in a traceback say, does not keep what it is made of.
        agent.agent = None

    @property
    def must_not_post(self) -> bool:
        """Whether it must post nothing more: the threads that its backend has beside its progress
        thread may keep something of a transfer that has failed, and would run it when they next
        move anything (docs/adr/0018). It can do all else."""
        return self._failed and self._threads > 0

    def wait_idle(self, deadline: float) -> bool:
        """Wait until its threads have left whatever copy they were in; whether that was in time."""
        return self._own.wait_idle(deadline)

    # Memory.

    def register(self, region: Region) -> Registration:
        """Make memory reachable."""
        entry = (region.address, region.nbytes, region.device, "")
        with self._mapped(f"cannot register {region}"):
            return Registration(self._agent.register_memory([entry], SEGMENTS[region.kind]))

    def deregister(self, registration: Registration) -> None:
        """Make memory unreachable."""
        with self._mapped("cannot deregister memory"):
            self._agent.deregister_memory(registration)

    # Peers.

    def metadata(self) -> bytes:
        """How to reach this agent and what it has registered."""
        with self._mapped("cannot say its address"):
            metadata: bytes = self._agent.get_agent_metadata()
            return metadata

    def add(self, metadata: bytes) -> str:
        """Get to know an agent, or more of one that is known; its name."""
        with self._mapped("cannot take the address"):
            name: bytes | str = self._agent.add_remote_agent(metadata)
        return name.decode(errors="replace") if isinstance(name, bytes) else name

    def remove(self, name: str) -> bool:
        """Close the connection to an agent; whether NIXL had not done so before."""
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
        """Copy rows, for a transfer that ``prepare`` makes.

        Args:
            write: the direction.
            kinds: the memory kinds of the local and of the remote side.
            local: (n, 3), C-contiguous; n is at least 1.
            remote: likewise.
        """
        try:
            return TransferChunk(
                write=write,
                local=self._agent.get_xfer_descs(local, SEGMENTS[kinds[0]]),
                remote=self._agent.get_xfer_descs(remote, SEGMENTS[kinds[1]]),
            )
        except self._library.errors as exc:
            raise self._ours(exc, "cannot describe a transfer") from exc

    def prepare(self, part: TransferChunk, name: str) -> Handle:
        """Make a transfer with an agent, of which nothing moves yet."""
        op = "WRITE" if part.write else "READ"
        try:
            native = self._agent.initialize_xfer(op, part.local, part.remote, name)
        except self._library.errors as exc:
            raise self._ours(exc, f"cannot prepare a transfer with {name}", known=True) from exc
        return Handle(agent=self, native=native, name=name)

    def post(self, handle: Handle) -> bool:
        """Start a transfer, which may take as long as all of it; whether it has ended already."""
        try:
            state = self._agent.transfer(handle.native)
        except self._library.errors as exc:
            raise self._failing(exc, handle.name) from exc
        return state == "DONE" or self._running(state, handle.name)

    def check(self, handle: Handle) -> bool:
        """Whether a transfer has ended. Drives it, too."""
        try:
            state = self._agent.check_xfer_state(handle.native)
        except self._library.errors as exc:
            raise self._failing(exc, handle.name) from exc
        return state == "DONE" or self._running(state, handle.name)

    def release(self, handle: Handle) -> None:
        """Give a handle back. NIXL tries to cancel what still runs, and does not wait for it."""
        try:
            self._agent.release_xfer_handle(handle.native)
        except self._library.errors as exc:
            raise self._ours(exc, "cannot release a transfer") from exc

    def telemetry(self, handle: Handle) -> Telemetry:
        """Of a transfer that has ended well; before, NIXL gives numbers that mean nothing."""
        with self._mapped("has no telemetry"):
            found = self._agent.get_xfer_telemetry(handle.native)
        return Telemetry(
            nbytes=found.totalBytes,
            descriptors=found.descCount,
            post_seconds=found.postDuration / 1e6,
            seconds=found.xferDuration / 1e6,
        )

    # Notifications.

    def notify(self, name: str, payload: bytes) -> None:
        """Send a notification. NIXL drops empty ones."""
        with self._mapped(f"cannot notify {name}", known=True):
            self._agent.send_notif(name, payload)

    def notifications(self) -> dict[str, list[bytes]]:
        """Those that arrived since the last call, by sender."""
        with self._mapped("cannot look for notifications"):
            found: dict[str, list[bytes]] = self._agent.get_new_notifs()
            return found

    @contextlib.contextmanager
    def _mapped(self, trouble: str, *, known: bool = False) -> Iterator[None]:
        """Turn NIXL's errors into ours. What is called per transfer does without this: a context
        manager costs as much as a call of NIXL's."""
        try:
            yield
        except self._library.errors as exc:
            raise self._ours(exc, trouble, known=known) from exc

    def _ours(self, error: Exception, trouble: str, *, known: bool = False) -> TransportError:
        """What to raise for an error of NIXL's, which loses its frames.

        If the peer and its memory are ``known``, and NIXL says that it knows no such thing, then
        it has dropped the peer, which it does by itself when a connection breaks.
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
        """As ``_ours``, for what moves bytes: remember that it has failed."""
        self._failed = True
        return self._ours(error, f"a transfer with {name} failed", known=True)

    def _running(self, state: str, name: str) -> bool:
        """False, if a transfer that has not ended has not failed either."""
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
    """An error without the frames in which it was raised, which hold an agent and its handles.

    Whoever keeps an error keeps what its frames hold.
    """
    return error.with_traceback(None)


def _pin(native: Any) -> None:  # noqa: ANN401
    """Let an object outlive everything that refers to it, the interpreter included."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


def _unpin(native: Any) -> None:  # noqa: ANN401
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(native))


def unsupported(region: Region, backend: str, memory: frozenset[str]) -> TransportUnsupportedError:
    """The error for a region of a kind that cannot be registered."""
    kinds = ", ".join(sorted(memory)) or "no memory"
    return TransportUnsupportedError(
        f"nixl with backend {backend} reaches {kinds} here, not {region.kind}: {region}"
    )
