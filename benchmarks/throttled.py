"""Loopback whose reads keep to a rate, as over a network, for ``benchmarks.early``.

Reads that are under way at the same time get equal shares of the rate. So a small read ends soon
beside a large one. The bytes, and the notification that is bound to a read, may arrive sooner.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.core.errors import TransportError
from kvferry.core.transport import EnterThread, State, Status, TransferRequest, enter_nothing
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback.transport import LoopbackConnection
from kvferry.drivers.loopback.worker_pool import LoopbackTransfer

_PENDING = Status(state=State.PENDING)


class ReadPacer:
    """Decide when reads may end, so that all of them together keep to a rate."""

    def __init__(
        self, bytes_per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._time = clock()
        self._share = 0.0  # bytes that a read which never ends would have been given
        self._ends: dict[object, float] = {}  # for each read under way, the share at which it ends

    def begin(self, read: object, nbytes: int) -> None:
        """Count a read as under way from now on."""
        self._advance()
        self._ends[read] = self._share + nbytes

    def is_under_way(self, read: object) -> bool:
        """Return whether a read that has begun may not end yet."""
        self._advance()
        return read in self._ends

    def end(self, read: object) -> None:
        """End a read at once, whatever is left of it; the others share the rate."""
        self._advance()
        self._ends.pop(read, None)

    def _advance(self) -> None:
        """Give the reads under way their shares of the time since the last call."""
        now = self._clock()
        while self._ends:
            first = min(self._ends, key=self._ends.__getitem__)
            each = self._rate / len(self._ends)
            ended = self._time + (self._ends[first] - self._share) / each
            if ended > now:
                self._share += (now - self._time) * each
                break
            self._share, self._time = self._ends.pop(first), ended
        self._time = now


@dataclass(slots=True, eq=False)
class PacedTransfer:
    """A transfer of loopback that is not DONE before its time."""

    inner: LoopbackTransfer
    pacer: ReadPacer

    @property
    def status(self) -> Status:
        """The status of the transfer, PENDING until its bytes have had their time."""
        found = self.inner.status
        early = found.state is State.DONE and self.pacer.is_under_way(self)
        return _PENDING if early else found


class ThrottledTransport(LoopbackTransport):
    """Loopback whose reads together keep to ``bytes_per_second``, if given."""

    def __init__(
        self, *, bytes_per_second: float = math.inf, enter: EnterThread = enter_nothing
    ) -> None:
        super().__init__(enter=enter)
        self._pacer = ReadPacer(bytes_per_second)

    def wake_when_ended(self, wake: Callable[[], None]) -> bool:
        """Only ``poll`` tells."""
        del wake
        return False

    def _start(self, request: TransferRequest[LoopbackConnection]) -> LoopbackTransfer:
        transfer = PacedTransfer(super()._start(request), self._pacer)
        self._pacer.begin(transfer, request.copies.total)
        return transfer  # type: ignore[return-value] # a status is all that the base needs

    def _fail(self, transfer: LoopbackTransfer, error: TransportError) -> None:
        if isinstance(transfer, PacedTransfer):
            self._pacer.end(transfer)
            transfer = transfer.inner
        super()._fail(transfer, error)
