"""A transport whose methods raise, and whose reads of pages end, as a test says."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import PeerLostError, TransferCancelledError, TransportError
from kvferry.core.messages import WORD_BYTES
from kvferry.core.transport import (
    Capabilities,
    PeerId,
    Quiescence,
    State,
    Status,
    TransferId,
)
from kvferry.core.transport.copies import Copies
from tests.core.endpoint.engines import TOKENS, Clock, Engine, RecordingTransport

PENDING, DONE = Status(state=State.PENDING), Status(state=State.DONE)
WORD = 0
LOAD_TIMEOUT = 100.0
OPTIONS = EndpointOptions(liveness_interval=0.0, load_timeout=LOAD_TIMEOUT)


def failed(error: Exception) -> Status:
    assert isinstance(error, TransportError)
    return Status(state=State.FAILED, error=error)


def failing(error: Exception) -> Status:
    assert isinstance(error, TransportError)
    return Status(state=State.FAILING, error=error)


FAILED_CANCELLED = failed(TransferCancelledError("cancelled"))
FAILING_CANCELLED = failing(TransferCancelledError("cancelled"))


def scripted(method: str) -> Any:
    """Return a method that raises what the test says, or else does what the driver does."""

    def call(self: ScriptedTransport, *args: Any) -> Any:
        if (error := self.raises.get(method)) is not None:
            raise error
        return getattr(super(ScriptedTransport, self), method)(*args)

    return call


class ScriptedTransport(RecordingTransport):
    """``disconnect`` ends the reads from that peer.

    Attributes:
        when_cancelled: the status of cancelled reads; without, ``cancel`` is ignored.
        raises: what the methods with these names raise.
        posted: number of copies of each read, in order; ``WORD`` for a slot word.
        addresses: the remote addresses of each read, in order.
        pages, peers: the reads of pages, in order, and their peers.
        statuses: of these reads, by their index in ``pages``; ``None`` for that of the driver.
        may_end: the first so many of the others have the status that the driver gives them.
        default: the status of the rest; ``None`` for that of the driver.
        cancelled: the reads that were cancelled, in order.
    """

    def __init__(
        self, default: Status | None = None, quiescence: Quiescence = Quiescence.ALWAYS
    ) -> None:
        super().__init__()
        self.default, self.quiescence = default, quiescence
        self.when_cancelled: Status | None = None
        self.may_end = 0
        self.raises: dict[str, Exception] = {}
        self.posted: list[int] = []
        self.addresses: list[list[int]] = []
        self.pages: list[TransferId] = []
        self.peers: dict[TransferId, PeerId] = {}
        self.statuses: dict[int, Status | None] = {}
        self.cancelled: list[TransferId] = []

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, quiescence=self.quiescence)

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer: TransferId = self._read(peer, copies, notify)
        is_word = notify is not None or copies.total == WORD_BYTES
        self.posted.append(WORD if is_word else len(copies))
        self.addresses.append(copies.remote.tolist())
        if not is_word:
            self.pages.append(transfer)
            self.peers[transfer] = peer
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        found = zip(transfers, self._poll(transfers), strict=True)
        return [self._status(transfer) or status for transfer, status in found]

    def _status(self, transfer: TransferId) -> Status | None:
        if transfer not in self.pages:
            return None
        if self.peers[transfer] in self.disconnected:
            return failed(PeerLostError("disconnected"))
        index = self.pages.index(transfer)
        return self.statuses.get(index, None if index < self.may_end else self.default)

    def cancel(self, transfer: TransferId) -> None:
        self.cancelled.append(transfer)
        if self.when_cancelled is not None and transfer in self.pages:
            self.statuses[self.pages.index(transfer)] = self.when_cancelled
        if (error := self.raises.get("cancel")) is not None:
            raise error

    _read, _poll, forget = scripted("read"), scripted("poll"), scripted("forget")
    connect, disconnect = scripted("connect"), scripted("disconnect")
    notify, notifications, path = scripted("notify"), scripted("notifications"), scripted("path")


@contextlib.contextmanager
def three_engines(
    driver: RecordingTransport, clock: Clock, other: RecordingTransport | None = None
) -> Iterator[tuple[Engine, Engine, Engine]]:
    """Run two producers, the second over ``other``, and a consumer that reads from both."""
    with (
        Engine("prefill") as first,
        Engine("other", transport=lambda: other or RecordingTransport()) as second,
        Engine("decode", options=OPTIONS, transport=lambda: driver, clock=clock) as decode,
    ):
        yield first, second, decode


def pass_time(clock: Clock, other: Engine, decode: Engine, seconds: float) -> None:
    """Move the clock, and wait until the endpoint has done all that is due by then.

    For that, two requests with the other producer come and go: the endpoint may have handled the
    first in the step in which time passed.
    """
    clock.skip(seconds)
    for number in range(2):
        request = f"o-{clock():.3f}-{number}"
        decode.pull(request, other.serve(request, [5], TOKENS), [], nothing=True)
        other.released(request)
