"""Aborted and failed loads, while others are read from the same producer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import (
    EndpointClosedError,
    PeerLostError,
    TransferCancelledError,
)
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.transport import Capabilities, PeerId, Quiescence, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from tests.core.endpoint.engines import Clock, Engine, RecordingTransport, eventually
from tests.core.endpoint.loads import TOKENS, outcomes, pull

LONG = 60.0
LOAD_TIMEOUT = 100.0
CANCELLED = TransferCancelledError("cancelled")


class StalledReadsTransport(RecordingTransport):
    """A transport whose page reads go on until the test lets them end, even cancelled ones.

    Args:
        fails_when_cancelled: whether a cancelled read is ``FAILING`` from then on.
    """

    def __init__(self, *, fails_when_cancelled: bool) -> None:
        super().__init__()
        self.fails_when_cancelled = fails_when_cancelled
        self.may_end = False
        self.reads: dict[TransferId, bool] = {}
        """Each page read that was posted, and whether it is ``FAILING``."""
        self.cancelled: set[TransferId] = set()
        self.seen_cancelled: set[TransferId] = set()
        """The reads that had been cancelled before the last poll."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(
            super().capabilities,
            cancel=self.fails_when_cancelled,
            quiescence=Quiescence.AFTER_DISCONNECT,
        )

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if notify is None:  # not a slot read: no load here checks its slot before the read
            self.reads[transfer] = False
        return transfer

    def cancel(self, transfer: TransferId) -> None:
        if transfer in self.reads:
            self.reads[transfer] = self.fails_when_cancelled
            self.cancelled.add(transfer)

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        self.seen_cancelled |= self.cancelled
        found = zip(transfers, super().poll(transfers), strict=True)
        return [self._status(transfer) or status for transfer, status in found]

    def _status(self, transfer: TransferId) -> Status | None:
        """Return the status to report for a page read, if not the real one."""
        if transfer not in self.reads or (self.may_end and not self.reads[transfer]):
            return None
        if not self.reads[transfer]:
            return Status(state=State.PENDING)
        return Status(state=State.FAILED if self.may_end else State.FAILING, error=CANCELLED)

    def disconnect(self, peer: PeerId) -> None:
        self.may_end = True
        super().disconnect(peer)


@contextlib.contextmanager
def three_engines(
    driver: RecordingTransport, clock: Clock
) -> Iterator[tuple[Engine, Engine, Engine]]:
    """Run two producers, and a consumer that reads from both."""
    options = EndpointOptions(liveness_interval=0.0, load_timeout=LOAD_TIMEOUT)
    with (
        Engine("prefill") as prefill,
        Engine("other") as other,
        Engine("decode", options=options, transport=lambda: driver, clock=clock) as decode,
    ):
        yield prefill, other, decode


def start_two_reads(driver: StalledReadsTransport, prefill: Engine, decode: Engine) -> None:
    pull(prefill, decode, 1, 2)
    eventually(lambda: len(driver.reads) == 2, "both are read")


def abort(driver: StalledReadsTransport, decode: Engine, *numbers: int) -> None:
    """Abort these loads and wait until their reads, the first to be cancelled, are cancelled."""
    for number in numbers:
        decode.endpoint.abort(RequestId(f"d-{number}"))
    eventually(lambda: len(driver.seen_cancelled) == len(numbers), "the reads are cancelled")


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


@pytest.mark.parametrize("fails_when_cancelled", [False, True])
def test_an_aborted_load_does_not_end_others(clock: Clock, fails_when_cancelled: bool) -> None:
    driver = StalledReadsTransport(fails_when_cancelled=fails_when_cancelled)
    with three_engines(driver, clock) as (prefill, other, decode):
        start_two_reads(driver, prefill, decode)
        abort(driver, decode, 1)
        pass_time(clock, other, decode, LOAD_TIMEOUT / 2)
        assert driver.disconnected == set()
        assert decode.endpoint.pending == 2, "bytes may still land"
        driver.may_end = True
        aborted, other_error = outcomes(decode, 1, 2)
        assert isinstance(aborted, EndpointClosedError)
        assert other_error is None
        assert not decode.wrong_bytes([2], TOKENS)
        eventually(lambda: prefill.endpoint.held == 0, "the producer is told of both")
        assert driver.disconnected == set()


@pytest.mark.parametrize("fails_when_cancelled", [False, True])
def test_a_connection_whose_loads_were_all_aborted_is_closed(
    clock: Clock, fails_when_cancelled: bool
) -> None:
    driver = StalledReadsTransport(fails_when_cancelled=fails_when_cancelled)
    with three_engines(driver, clock) as (prefill, other, decode):
        start_two_reads(driver, prefill, decode)
        abort(driver, decode, 1, 2)
        pass_time(clock, other, decode, LOAD_TIMEOUT / 2)
        assert all(outcomes(decode, 1, 2))
        assert len(driver.disconnected) == 1


@pytest.mark.parametrize("fails_when_cancelled", [False, True])
def test_a_cancelled_read_is_ended_at_the_deadline_of_its_own_load(
    clock: Clock, fails_when_cancelled: bool
) -> None:
    """The disconnect also ends a load whose deadline is later."""
    driver = StalledReadsTransport(fails_when_cancelled=fails_when_cancelled)
    with three_engines(driver, clock) as (prefill, other, decode):
        pull(prefill, decode, 1)
        eventually(lambda: len(driver.reads) == 1, "the first is read")
        clock.skip(0.3 * LOAD_TIMEOUT)
        pull(prefill, decode, 2)
        eventually(lambda: len(driver.reads) == 2, "both are read")
        abort(driver, decode, 1)
        pass_time(clock, other, decode, 0.4 * LOAD_TIMEOUT)
        assert driver.disconnected == set()
        pass_time(clock, other, decode, 0.35 * LOAD_TIMEOUT)
        aborted, other_error = outcomes(decode, 1, 2)
        assert isinstance(aborted, EndpointClosedError)
        assert isinstance(other_error, PeerLostError)
        assert len(driver.disconnected) == 1


class LostReadsTransport(RecordingTransport):
    """A transport whose reads are all lost at once, and whose ``disconnect`` waits for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.reads_are_lost = False
        self.is_disconnecting = False
        self.may_end = threading.Event()
        self.reads: set[TransferId] = set()

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        self.reads.add(transfer)
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        super().poll(transfers)
        lost = Status(state=State.FAILED, error=PeerLostError("its process has ended"))
        return [lost if self.reads_are_lost else Status(state=State.PENDING) for _ in transfers]

    def forget(self, transfer: TransferId) -> None:
        assert not self.is_disconnecting, "forgotten while its peer is being disconnected"
        super().forget(transfer)

    def disconnect(self, peer: PeerId) -> None:
        self.is_disconnecting = True
        assert self.may_end.wait(LONG)
        super().disconnect(peer)
        self.is_disconnecting = False


def test_no_transfer_is_named_while_its_connection_is_closed(clock: Clock) -> None:
    """That includes transfers that failed in the same poll as the first."""
    driver = LostReadsTransport()
    with three_engines(driver, clock) as (prefill, _, decode):
        pull(prefill, decode, 1, 2, 3)
        eventually(lambda: len(driver.reads) == 3, "all are read")
        driver.reads_are_lost = True
        eventually(lambda: driver.is_disconnecting, "the producer is being disconnected")
        driver.may_end.set()
        assert all(isinstance(error, PeerLostError) for error in outcomes(decode, 1, 2, 3))
