"""One transfer: its status, and which groups of its copies (windows) are under way."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvferry.core.errors import TransportError, TransportUnsupportedError
from kvferry.core.memory import CPU, U64Array
from kvferry.core.transport import EnterThread, State, Status
from kvferry.core.transport.merged_copies import NO_RUNS, MergedCopies
from kvferry.drivers.cuda import CudaDriver, DeviceWait
from kvferry.drivers.ucx import ucp
from kvferry.drivers.ucx.address import KeyId, UcxRegion
from kvferry.drivers.ucx.connection import ConnectionState, UcxConnection, Window
from kvferry.drivers.ucx.messages import MAX_RELAY_BYTES, MAX_RELAY_ROWS, build_rows
from kvferry.drivers.ucx.ucp_structs import Code

_WINDOW = 1 << 11, 8 << 20
"""The most runs and bytes of a window."""

MAX_WINDOWS = 2
"""The most windows per connection: a limit to UCX's memory, and to a cancelled transfer's wait."""

# If GPU memory takes part, NICs and GPUs move a window while no thread of this process runs: at 400
# Gbit/s, two last 2.7 ms, and that long a thread may wait for the interpreter's lock before it
# posts the next. The runs suffice for pieces of 8 KiB. A cancelled transfer waits for two: some 5
# ms over PCIe, and 70 ms if the pieces are small and a GPU makes a copy of each.
_DEVICE_WINDOW = 1 << 13, 64 << 20

MAX_MESSAGE_WINDOWS = 16
"""The most windows of a transfer that are under way at once if its bytes go by messages."""

_NO_REQUESTS: U64Array = np.empty(0, np.uint64)
_ONLY_CPU = frozenset({CPU})
_PENDING, _DONE = Status(state=State.PENDING), Status(state=State.DONE)

# Statuses of a read that no transport of the connection can carry out. If UCX (1.21 and
# 1.22) has no protocol for a read, it reports ``CANCELED`` at once; the connection stays usable.
_NO_TRANSPORT = frozenset(
    {Code.CANCELED, Code.UNSUPPORTED, Code.UNREACHABLE, Code.INVALID_ADDR, Code.NO_DEVICE}
)

WITHOUT_NIC = frozenset(
    ("self", "tcp", "sysv", "posix", "cma", "knem", "xpmem", "cuda_copy", "cuda_ipc", "gdr_copy")
)
"""The UCX transports by which no NIC writes into a GPU's memory."""


class LocalDevices:
    """The GPUs whose memory a transfer reads into.

    UCX reports the end of its requests. But copies may still wait in a GPU's queues, and the GPU
    may not see yet what a NIC has written. CUDA's driver API knows both.
    """

    def __init__(self, cuda: CudaDriver, devices: Iterable[int], enter: EnterThread) -> None:
        self._cuda = cuda
        self._devices = sorted(set(devices))
        self._enter = enter
        self._wait: DeviceWait | None = None

    def are_quiet(self) -> bool:
        """Return whether all that was enqueued before the first call is done. Never block."""
        if self._wait is None:
            self._wait = DeviceWait(self._cuda, self._devices, self._enter)
        return self._wait.quiet

    def flush(self, transports: frozenset[str]) -> None:
        """Make what ``transports`` (empty: unknown) have moved visible to new work on the GPUs."""
        if transports and transports <= WITHOUT_NIC:
            return
        for device in self._devices:
            self._cuda.flush(device)


@dataclass(slots=True, kw_only=True, eq=False)
class UcxTransfer:
    """One transfer, whose runs are posted in windows (see ``Window``).

    It is DONE when all runs have completed without an error. Once ``fail`` was called, it is
    FAILING and nothing more is posted; it is FAILED when no window is under way. But copies may
    wait in the queues of local GPUs: then it is FAILED only when these have done them.
    """

    connection: UcxConnection
    # For each segment: the address of the local ``RequestParams``, and the remote region.
    segments: list[tuple[int, UcxRegion]]
    notify: bytes | None  # the bound notification
    runs: MergedCopies = NO_RUNS  # that are to be posted; none of a small read, which has been
    memory_kinds: frozenset[str] = _ONLY_CPU  # of both sides
    second_connection: UcxConnection | None = None  # to post on, too, when it is ready
    devices: LocalDevices | None = None  # with local memory
    status: Status = _PENDING
    last_progress: float = field(default_factory=time.monotonic)  # when a run last completed
    position: int = 0  # how many runs have been posted
    windows: list[Window] = field(default_factory=list)  # under way
    reported: bool = False  # whether ``poll`` has returned that it is final
    remote_keys: frozenset[KeyId] = field(init=False)

    def __post_init__(self) -> None:
        self.remote_keys = frozenset(KeyId(region.key) for _, region in self.segments)

    @property
    def final(self) -> bool:
        """Whether the transfer is DONE or FAILED: it touches no memory any more."""
        return self.status.state.final

    def advance(self, now: float, idle_timeout: float) -> None:
        """Collect requests, post windows, update the status; fail if idle for too long."""
        if self.final:
            return
        self._sweep(now)
        server = self.connection.server.name
        if self.connection.error is not None:
            self.fail(self.connection.error)
        elif any(self.remote_keys & connection.withdrawn for connection in self._connections):
            self.fail(TransportError(f"{server} has deregistered memory that it names"))
        elif now - self.last_progress > idle_timeout:
            why = f"{server} may be stopped, or the network cut (driver_options: deadline_seconds)"
            self.fail(TransportError(f"nothing has moved for {idle_timeout:g} s: {why}"))
        while self._may_post() and (connection := self._free_connection()) is not None:
            self._post(connection)
        if not self.windows:
            self._conclude()

    def fail(self, error: TransportError) -> None:
        """Make the transfer FAILING if it is PENDING; else its status stays as it is."""
        if self.status.state is State.PENDING:
            self.status = Status(state=State.FAILING, error=error)
        # Answers to messages are not copied any more.
        for window in self.windows:
            window.targets = None

    def uses(self, connection: UcxConnection) -> bool:
        """Return whether runs, or a GPU's copies of a failed transfer, may use a connection."""
        if self.devices is not None and self.position:
            return connection in self._connections
        return any(window.connection is connection for window in self.windows)

    def _may_post(self) -> bool:
        return (
            self.status.state is State.PENDING
            and self.connection.state is ConnectionState.READY
            and self.position < len(self.runs)
        )

    def _free_connection(self) -> UcxConnection | None:
        """Return the connection to post the next window on, or ``None`` if all have enough."""
        if self._by_messages:
            return self.connection if len(self.windows) < MAX_MESSAGE_WINDOWS else None
        posted = [window.connection for window in self.windows]
        ready = [
            connection
            for connection in self._connections
            if connection.state is ConnectionState.READY
            and (connection.native or not self._in_cpu_memory)
        ]
        connection = min(ready, key=posted.count)
        return connection if posted.count(connection) < MAX_WINDOWS else None

    @property
    def _connections(self) -> list[UcxConnection]:
        return [*filter(None, (self.connection, self.second_connection))]

    @property
    def _by_messages(self) -> bool:
        # Messages carry CPU memory only.
        return self._in_cpu_memory and not self.connection.native

    @property
    def _in_cpu_memory(self) -> bool:
        return self.memory_kinds <= _ONLY_CPU

    def _post(self, connection: UcxConnection) -> None:
        if self._by_messages:
            self._post_message()
            return
        limits = _WINDOW if self._in_cpu_memory else _DEVICE_WINDOW
        stop = self.runs.window_end(self.position, *limits)
        window = slice(self.position, stop)
        segment = self.runs.segment[window]
        used = np.unique(segment)
        keys, params = np.zeros((2, int(used[-1]) + 1), np.uint64)
        try:
            for index in used.tolist():
                params[index], region = self.segments[index]
                keys[index] = connection.remote_key(region)
        except TransportError as exc:
            if not self._in_cpu_memory:
                exc = _unreachable_memory_error(self.memory_kinds, connection, exc)
            self.fail(exc)
            return
        requests = connection.worker.poster.post(
            connection.endpoint,
            self.runs.local[window],
            self.runs.nbytes[window],
            self.runs.remote[window],
            keys[segment],
            params[segment],
        )
        self.position = stop
        self.windows.append(Window(connection=connection, requests=requests))

    def _post_message(self) -> None:
        """Ask for the next window by a message (``Fetch``)."""
        self.runs = self.runs.split(MAX_RELAY_BYTES)
        start = self.position
        stop = self.runs.window_end(start, MAX_RELAY_ROWS, MAX_RELAY_BYTES)
        keys = np.array([region.key for _, region in self.segments], np.uint64)
        local, nbytes = self.runs.local[start:stop], self.runs.nbytes[start:stop]
        rows = build_rows(keys[self.runs.segment[start:stop]], self.runs.remote[start:stop], nbytes)
        window = Window(connection=self.connection, requests=_NO_REQUESTS, targets=(local, nbytes))
        self.position = stop
        self.windows.append(window)
        self.connection.fetch(rows.tobytes(), window)

    def _sweep(self, now: float) -> None:
        for window in list(self.windows):
            before, poster = window.swept, window.connection.worker.poster
            window.swept, code = poster.sweep(window.requests, before)
            window.code = window.code or code
            if window.swept != before:
                self.last_progress = now
            if self._has_ended(window):
                self.windows.remove(window)
                self.last_progress = now
                self._note_outcome(window)

    def _has_ended(self, window: Window) -> bool:
        """Return whether all requests of a window have completed, or its message is answered."""
        if not window.by_message:
            return window.swept == len(window.requests)
        if window.refusal:
            server = window.connection.server.name
            self.fail(TransportError(f"{server} refuses: {window.refusal}"))
        elif window.refusal is None and window.connection.state is ConnectionState.BROKEN:
            window.code = Code.CANCELED
        return window.refusal is not None or bool(window.code)

    def _note_outcome(self, window: Window) -> None:
        if not window.code:
            return
        connection, reason = window.connection, f"UCX says {ucp.describe(window.code)}"
        trouble = f"a transfer with {connection.server.name} failed"
        if connection.state is ConnectionState.BROKEN:
            # The reason why the connection broke says more than the status of its requests.
            self.fail(connection.error or ucp.error(window.code, trouble))
        elif window.code in _NO_TRANSPORT and not self._in_cpu_memory:
            self.fail(_unreachable_memory_error(self.memory_kinds, connection, reason))
        else:
            self.fail(ucp.error(window.code, trouble))

    def _conclude(self) -> None:
        if self.status.state is State.FAILING:
            # A GPU may still have copies of the failed transfer to make.
            if self.devices is None or not self.position or self.devices.are_quiet():
                self.status = Status(state=State.FAILED, error=self.status.error)
        elif self.position == len(self.runs) and self.connection.state is ConnectionState.READY:
            self.complete()

    def complete(self) -> None:
        """Become DONE, since all bytes have arrived, and send the bound notification."""
        if self.devices is not None:
            try:
                self.devices.flush(self.connection.transports)
            except TransportError as exc:
                # No byte is under way any more, so there is nothing to wait for.
                self.status = Status(state=State.FAILED, error=exc)
                return
        if self.notify is not None:
            self.connection.notify(self.notify)
        self.status = _DONE


def _unreachable_memory_error(
    kinds: Iterable[str], connection: UcxConnection, reason: object
) -> TransportUnsupportedError:
    """Return the error for a transfer that UCX cannot carry out, with what to look at."""
    return TransportUnsupportedError(
        f"UCX cannot move {' and '.join(sorted(kinds))} memory from or to "
        f"{connection.server.name} over {', '.join(sorted(connection.transports))}: {reason}. "
        "Between hosts, this needs RDMA, and nvidia_peermem or dmabuf on both, so that the NIC "
        "reaches the GPU's memory; on one host RDMA or cuda_ipc, for which containers must share "
        "their IPC and PID namespaces. Both sides must allow these transports (driver_options: "
        "transports); UCX_PROTO_INFO=y prints which ones UCX uses"
    )
