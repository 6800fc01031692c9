"""Lease renewal between real endpoints, for requests that wait longer than a lease."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvferry.core.endpoint import EndpointOptions, endpoint, transfers
from kvferry.core.errors import TransferCancelledError
from kvferry.core.messages import Renewal
from kvferry.core.transport import Capabilities, PeerId, Quiescence, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import Clock, Engine, RecordingTransport, eventually

LEASE = 30.0
OPTIONS = EndpointOptions(liveness_interval=0, lease=LEASE, load_timeout=1000.0)


def wait_for_renewal(driver: RecordingTransport, known: int = 0) -> None:
    """Wait until more than ``known`` renewals have arrived."""
    eventually(lambda: len(driver.notes(Renewal)) > known, "a renewal arrives")


def pass_leases(clock: Clock, drivers: list[RecordingTransport], count: int) -> None:
    """Let ``count`` leases pass, in steps that are short enough for renewals."""
    for _ in range(2 * count):
        before = [len(driver.notes(Renewal)) for driver in drivers]
        clock.skip(LEASE / 2)
        for driver, known in zip(drivers, before, strict=True):
            wait_for_renewal(driver, known)


def test_a_request_that_waits_for_pages_keeps_its_hold_on_every_rank(clock: Clock) -> None:
    drivers = [RecordingTransport(), RecordingTransport()]
    made = iter(drivers)
    with (
        Engine("prefill", CacheShape(tp=2), transport=lambda: next(made), clock=clock) as prefill,
        Engine("decode", options=OPTIONS, clock=clock) as decode,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.prepare(ticket)
        for driver in drivers:
            wait_for_renewal(driver)
        pass_leases(clock, drivers, count=2)
        assert decode.load("d-1", ticket, [3, 4]) is None
        prefill.released("p-1")


def test_a_load_that_waits_for_the_device_keeps_its_hold(
    clock: Clock, driver: RecordingTransport
) -> None:
    with (
        Engine("prefill", transport=lambda: driver, clock=clock) as prefill,
        Engine("decode", options=OPTIONS, clock=clock) as decode,
    ):
        ticket = prefill.serve_later("p-1", [1], 4)
        decode.pull("d-1", ticket, [2])
        eventually(lambda: decode.endpoint.pending == 1, "the load is under way")
        clock.skip(2.0)
        wait_for_renewal(driver)
        pass_leases(clock, [driver], count=2)
        prefill.step()
        assert decode.error("d-1") is None
        prefill.released("p-1")


def test_a_lost_hold_fails_its_request_before_anything_is_read(
    clock: Clock, driver: RecordingTransport
) -> None:
    with (
        Engine("prefill", transport=lambda: driver, clock=clock) as prefill,
        Engine("decode", options=OPTIONS, clock=clock) as decode,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.prepare(ticket)
        wait_for_renewal(driver)
        prefill.reset("p-1")
        driver.received.clear()
        clock.skip(LEASE / 2)
        wait_for_renewal(driver)
        error = decode.load("d-1", ticket, [3, 4])
        assert "when their lease was to be renewed" in str(error)
        assert np.isnan(decode.ranks[0].cache).all()


def test_renewals_are_batched_and_end_with_the_wait(
    clock: Clock, driver: RecordingTransport
) -> None:
    with (
        Engine("prefill", CacheShape(pages=64), transport=lambda: driver, clock=clock) as prefill,
        Engine("decode", CacheShape(pages=64), options=OPTIONS, clock=clock) as decode,
    ):
        tickets = [prefill.serve(f"p-{i}", [i + 1], 4) for i in range(60)]
        for ticket in tickets:
            decode.prepare(ticket)
        eventually(lambda: len(driver.notes(Renewal)) >= 60, "all are renewed")
        driver.received.clear()
        clock.skip(LEASE / 2)
        eventually(lambda: len(driver.notes(Renewal)) >= 60, "all are renewed")
        assert len(driver.received) <= 3
        for i, ticket in enumerate(tickets):
            decode.pull(f"d-{i}", ticket, [], nothing=True)
        eventually(lambda: prefill.endpoint.held == 0, "all are released")
        driver.received.clear()
        clock.skip(LEASE)
        assert decode.load("last", prefill.serve("p-60", [1], 4), [2]) is None
        assert not driver.notes(Renewal)


class UncancellableTransport(RecordingTransport):
    """A transport whose cancelled reads are ``FAILING`` until the test lets them end."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = False
        self.reads: set[TransferId] = set()
        """The reads that are not forgotten."""
        self.cancelled: set[TransferId] = set()
        self.failing = 0
        """How often ``poll`` has returned ``FAILING``."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, quiescence=Quiescence.AFTER_DISCONNECT)

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        self.reads.add(transfer)
        return transfer

    def cancel(self, transfer: TransferId) -> None:
        self.cancelled.add(transfer)

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        found = zip(transfers, super().poll(transfers), strict=True)
        return [self._status(transfer, is_over=status.state.final) for transfer, status in found]

    def _status(self, transfer: TransferId, *, is_over: bool) -> Status:
        if transfer not in self.cancelled:
            return Status(state=State.PENDING)
        error = TransferCancelledError("cancelled")
        if self.may_end and is_over:
            return Status(state=State.FAILED, error=error)
        self.failing += 1
        return Status(state=State.FAILING, error=error)

    def forget(self, transfer: TransferId) -> None:
        super().forget(transfer)
        self.reads.discard(transfer)

    def disconnect(self, peer: PeerId) -> None:
        self.may_end = True
        super().disconnect(peer)


@pytest.mark.parametrize("ends_in_time", [True, False])
def test_a_cancelled_renewal_that_outlasts_its_grace_disconnects_the_producer(
    prefill: Engine, ends_in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "CANCEL_SECONDS", 2 * LEASE)  # longer than this test takes
    monkeypatch.setattr(endpoint, "WIND_DOWN_SECONDS", 0.1)
    clock, driver = Clock(), UncancellableTransport()
    with Engine("decode", options=OPTIONS, transport=lambda: driver, clock=clock) as decode:
        decode.prepare(prefill.serve("p-1", [1, 2], 8))
        eventually(lambda: len(driver.reads) == 1, "the hold is renewed")
        clock.skip(LEASE / 2)
        eventually(lambda: driver.failing > 1, "the renewal was cancelled and has not ended")
        if ends_in_time:
            driver.may_end = True
            eventually(lambda: not driver.reads, "the renewal has ended")
            clock.skip(2 * LEASE)
            eventually(lambda: len(driver.reads) == 1, "the hold is renewed again")
            assert not driver.disconnected
        else:
            clock.skip(2 * LEASE)
            eventually(lambda: bool(driver.disconnected), "the producer is disconnected")
