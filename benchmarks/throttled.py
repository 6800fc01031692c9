"""Loopback whose reads keep to a rate, as over a network, for ``benchmarks.early``.

Reads take their time one after the other, in the order in which they were posted. The bytes, and
the notification that is bound to a read, may arrive sooner.
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


@dataclass(slots=True, eq=False)
class PacedTransfer:
    """A transfer of loopback that is not DONE before its time."""

    inner: LoopbackTransfer
    due: float

    @property
    def status(self) -> Status:
        """The status of the transfer, PENDING until its bytes have had their time."""
        found = self.inner.status
        early = found.state is State.DONE and time.monotonic() < self.due
        return Status(state=State.PENDING) if early else found


class ThrottledTransport(LoopbackTransport):
    """Loopback whose reads together keep to ``bytes_per_second``, if given."""

    def __init__(
        self, *, bytes_per_second: float = math.inf, enter: EnterThread = enter_nothing
    ) -> None:
        super().__init__(enter=enter)
        self._rate = bytes_per_second
        self._due = 0.0  # when the last read may end

    def wake_when_ended(self, wake: Callable[[], None]) -> bool:
        """Only ``poll`` tells."""
        del wake
        return False

    def _start(self, request: TransferRequest[LoopbackConnection]) -> LoopbackTransfer:
        self._due = max(self._due, time.monotonic()) + request.copies.total / self._rate
        transfer = PacedTransfer(super()._start(request), self._due)
        return transfer  # type: ignore[return-value] # a status is all that the base needs

    def _fail(self, transfer: LoopbackTransfer, error: TransportError) -> None:
        if isinstance(transfer, PacedTransfer):
            transfer.due = 0.0
            transfer = transfer.inner
        super()._fail(transfer, error)
