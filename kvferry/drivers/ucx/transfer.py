"""One transfer: the windows that are under way of it, and where it stands."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvferry.core.errors import TransportError, TransportUnsupportedError
from kvferry.core.memory import CPU, Region, U64Array
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.drivers.ucx import ucp
from kvferry.drivers.ucx.address import KeyId, UcxRegion
from kvferry.drivers.ucx.connection import ConnectionState, ScatterTarget, UcxConnection
from kvferry.drivers.ucx.merged_copies import MergedCopies
from kvferry.drivers.ucx.message_transfer import lined_up, reached_natively, rows_of
from kvferry.drivers.ucx.messages import MAX_RELAY_BYTES, MAX_RELAY_ROWS, ROW_BYTES
from kvferry.drivers.ucx.posting import PostedRuns, Poster
from kvferry.drivers.ucx.ucp_structs import Code

WINDOW_RUNS = 1 << 11
WINDOW_BYTES = 8 << 20
WINDOWS = 2
"""What is posted of a transfer on a line at once: bounds UCX's memory, and what a cancelled one
waits for."""

ASKED = 16
"""Likewise, where it goes by messages."""

_NOTHING: U64Array = np.empty(0, np.uint64)
_PENDING = Status(state=State.PENDING)
_DONE = Status(state=State.DONE)


@dataclass(slots=True, kw_only=True, eq=False)
class Window:
    """Runs that were posted together.

    Attributes:
        requests: what UCP answered, for each run; ``swept``: how many of them have ended.
        flush: of a write: 0, or the request that ends when they have all arrived.
        asked: of one by messages: its number.
    """

    line: UcxConnection
    requests: U64Array
    flush: int = 0
    asked: int = 0
    swept: int = 0
    code: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class UcxTransfer:
    """A transfer.

    It ends in one of two ways. All of it was posted and has ended well: it is DONE. Or ``fail``
    was called: nothing more is posted, it is FAILING, and when nothing that was posted is under way
    it is FAILED; unless it is a write of which UCX has not confirmed all that was posted. Of that,
    bytes may lie in the peer's queues: it is FAILED when ``settle`` says that they have been
    dropped.

    Attributes:
        segments: of each segment, the local registration's parameters and the remote region.
        local: the local regions that it uses, and ``keys``: the remote registrations.
        beside: a second line, on which it may go on, too, when that is ready.
        send: sends its notification.
        moved: when it last moved on, by ``time.monotonic``.
        unconfirmed: whether it is such a write.
    """

    id: TransferId
    peer: PeerId
    line: UcxConnection
    write: bool
    runs: MergedCopies
    segments: list[tuple[int, UcxRegion]]
    local: frozenset[Region]
    keys: frozenset[KeyId]
    send: Callable[[], None] | None
    poster: Poster
    moved: float = field(default_factory=time.monotonic)
    beside: UcxConnection | None = None
    status: Status = _PENDING
    position: int = 0
    windows: list[Window] = field(default_factory=list)
    unconfirmed: bool = False

    @property
    def final(self) -> bool:
        """Whether its buffers are quiet."""
        return self.status.state.final

    def advance(self, now: float, patience: float) -> None:
        """Sweep, post, end; whatever is possible now."""
        if self.final:
            return
        self._sweep(now)
        if self.line.stage is ConnectionState.BROKEN and self.line.error is not None:
            self.fail(self.line.error)
        elif any(self.keys & line.withdrawn for line in self._lines):
            self.fail(
                TransportError(f"{self.line.host.name} has deregistered memory that it names")
            )
        elif now - self.moved > patience:
            self.fail(
                TransportError(
                    f"nothing has moved for {patience:g} s: {self.line.host.name} may be stopped, "
                    "or the network cut (driver_options: deadline_seconds)"
                )
            )
        while self._may_post() and (line := self._free()) is not None:
            self._post(line)
        if not self.windows:
            self._conclude()

    def fail(self, error: TransportError) -> None:
        """Let it fail; its first error stays."""
        if self.status.state is State.PENDING:
            self.status = Status(state=State.FAILING, error=error)
        for window in self.windows:
            window.line.sinks.pop(window.asked, None)

    def settle(self) -> None:
        """The peer has dropped whatever had not arrived."""
        self.unconfirmed = False
        if not self.windows:
            self._conclude()

    def _may_post(self) -> bool:
        return (
            self.status.state is State.PENDING
            and self.line.stage is ConnectionState.READY
            and self.position < len(self.runs)
        )

    def _free(self) -> UcxConnection | None:
        """A line on which more may be posted."""
        if self._by_messages:
            return self.line if len(self.windows) < ASKED else None
        posted = [window.line for window in self.windows]
        ready = [s for s in self._lines if s.stage is ConnectionState.READY and self._natively(s)]
        line = min(ready, key=posted.count)
        return line if posted.count(line) < WINDOWS else None

    def uses(self, line: UcxConnection) -> bool:
        """Whether something of it is under way there."""
        return any(window.line is line for window in self.windows)

    @property
    def _lines(self) -> list[UcxConnection]:
        return [self.line] if self.beside is None else [self.line, self.beside]

    @property
    def _by_messages(self) -> bool:
        """Whether UCX cannot do it without the peer's help."""
        return not self._natively(self.line)

    def _natively(self, line: UcxConnection) -> bool:
        return reached_natively(line.transports, self._kinds)

    @property
    def _kinds(self) -> frozenset[str]:
        kinds = {region.kind for _, region in self.segments}
        return frozenset(kinds | {region.kind for region in self.local})

    def _ask(self) -> None:
        """Post a window as a message."""
        if self._kinds - {CPU}:
            over = ", ".join(sorted(self.line.transports))
            self.fail(
                TransportUnsupportedError(
                    f"over {over} ucx reaches CPU memory only; {', '.join(sorted(self._kinds))} "
                    "needs RDMA or, on one host, cuda_ipc (driver_options: transports)"
                )
            )
            return
        self.runs = self.runs.cut(MAX_RELAY_BYTES)
        start = self.position
        stop = self.runs.stop(start, MAX_RELAY_ROWS, MAX_RELAY_BYTES)
        keys = np.array([region.key for _, region in self.segments], np.uint64)
        local, nbytes = self.runs.local[start:stop], self.runs.nbytes[start:stop]
        rows = rows_of(keys[self.runs.segment[start:stop]], self.runs.remote[start:stop], nbytes)
        if self.write:
            asked = self._store(rows, local, nbytes)
        else:
            asked = self.line.fetch(rows.tobytes(), ScatterTarget(addresses=local, nbytes=nbytes))
        self.windows.append(Window(line=self.line, requests=_NOTHING, asked=asked))
        self.position = stop
        self.line.windows += 1

    def _store(self, rows: U64Array, local: U64Array, nbytes: U64Array) -> int:
        body, head = self.line.outlet.worker.buffers.take(), ROW_BYTES * len(rows)
        body.array[:head] = rows.view(np.uint8).reshape(-1)
        self.poster.move(lined_up(body.address + head, nbytes), local, nbytes)
        return self.line.store(len(rows), body, head + int(nbytes.sum()))

    def _post(self, line: UcxConnection) -> None:
        if self._by_messages:
            self._ask()
            return
        start = self.position
        stop = self.runs.stop(start, WINDOW_RUNS, WINDOW_BYTES)
        try:
            batch = self._batch(line, start, stop)
        except TransportError as exc:
            self.fail(exc)
            return
        requests = self.poster.post(line.endpoint, batch, write=self.write)
        window = Window(line=line, requests=requests)
        if self.write:
            window.flush = line.library.flush(line.endpoint)
        self.position = stop
        self.windows.append(window)
        line.windows += 1

    def _batch(self, line: UcxConnection, start: int, stop: int) -> PostedRuns:
        segment = self.runs.segment[start:stop]
        used = np.unique(segment)
        keys, params = np.zeros((2, int(used[-1]) + 1), np.uint64)
        for index in used.tolist():
            params[index], region = self.segments[index]
            keys[index] = line.key(region)
        return PostedRuns(
            local=self.runs.local[start:stop],
            nbytes=self.runs.nbytes[start:stop],
            remote=self.runs.remote[start:stop],
            keys=keys[segment],
            params=params[segment],
        )

    def _sweep(self, now: float) -> None:
        for window in list(self.windows):
            before = window.swept
            window.swept, code = self.poster.sweep(window.requests, before)
            window.code = window.code or code
            if window.swept != before:
                self.moved = now
            if window.swept == len(window.requests) and self._flushed(window):
                self.windows.remove(window)
                window.line.windows -= 1
                self.moved = now
                self._note(window)

    def _flushed(self, window: Window) -> bool:
        if window.asked:
            return self._answered(window)
        code = ucp.status_of(window.flush)
        if code == Code.IN_PROGRESS:
            library = window.line.library
            code = library.check(window.flush)
            if code == Code.IN_PROGRESS:
                return False
            library.free(window.flush)
            window.flush = 0
        window.code = window.code or code
        return True

    def _answered(self, window: Window) -> bool:
        """Whether it is known what became of a message, or never will be."""
        refusal = window.line.answers.pop(window.asked, None)
        if refusal is None:
            window.code = Code.CANCELED
            return window.line.stage is ConnectionState.BROKEN
        window.code = Code.OK
        if refusal:
            self.fail(TransportError(f"{window.line.host.name} refuses: {refusal}"))
        return True

    def _note(self, window: Window) -> None:
        if window.code:
            self.unconfirmed |= self.write
            error = window.line.error
            if error is None or window.line.stage is not ConnectionState.BROKEN:
                error = ucp.error(window.code, f"a transfer with {window.line.host.name} failed")
            self.fail(error)

    def _conclude(self) -> None:
        if self.status.state is State.FAILING:
            if not self.unconfirmed:
                self.status = Status(state=State.FAILED, error=self.status.error)
        elif self.position == len(self.runs) and self.line.stage is ConnectionState.READY:
            if self.send is not None:
                self.send()
            self.status = _DONE
