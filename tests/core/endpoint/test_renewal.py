"""Requests that wait longer than a lease, between real endpoints, on a clock of the test's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvferry.core.endpoint import EndpointOptions, transfers
from kvferry.core.errors import StaleError, TransferCancelledError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.messages import Renewal, decode_notes
from kvferry.core.transport import Capabilities, PeerId, Quiescence, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from tests.core.endpoint.engines import Clock, Shape, Watched, engine, eventually

LEASE = 30.0
PATIENT = EndpointOptions(liveness_interval=0, lease=LEASE, load_timeout=1000.0)


def renewals(driver: Watched) -> list[Renewal]:
    """What a producer rank was told so far."""
    notes = [note for heard in driver.heard for note in decode_notes(heard.payload)]
    return [note for note in notes if isinstance(note, Renewal)]


def renewed(driver: Watched, known: int = 0) -> None:
    """Wait until more renewals have arrived than are known."""
    eventually(lambda: len(renewals(driver)) > known, "a renewal arrives")


def pass_leases(clock: Clock, drivers: list[Watched], count: int) -> None:
    """Some leases pass, in steps short enough for renewals to keep up with them."""
    for _ in range(2 * count):
        before = [len(renewals(driver)) for driver in drivers]
        clock.skip(LEASE / 2)
        for driver, known in zip(drivers, before, strict=True):
            renewed(driver, known)


def test_a_request_that_waits_for_pages_keeps_its_hold_on_every_rank() -> None:
    clock, drivers = Clock(), [Watched(), Watched()]
    made = iter(drivers)
    with (
        engine("prefill", Shape(tp=2), transport=lambda: next(made), clock=clock) as prefill,
        engine("decode", options=PATIENT, clock=clock) as decode,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.prepare(ticket)
        for driver in drivers:
            renewed(driver)
        pass_leases(clock, drivers, count=3)
        decode.pull("d-1", ticket, [3, 4])
        assert not decode.outcome("d-1").failed
        prefill.released("p-1")


def test_a_load_that_waits_for_the_device_keeps_its_hold() -> None:
    clock, driver = Clock(), Watched()
    with (
        engine("prefill", transport=lambda: driver, clock=clock) as prefill,
        engine("decode", options=PATIENT, clock=clock) as decode,
    ):
        prefill.compute("p-1", [1], 4)
        ticket = prefill.finish("p-1", [1], 4, computed=False, order=False)
        decode.pull("d-1", ticket, [2])
        eventually(lambda: decode.ranks[0].endpoint.pending == 1, "the load is under way")
        clock.skip(2.0)
        renewed(driver)
        pass_leases(clock, [driver], count=2)
        prefill.step()
        assert not decode.outcome("d-1").failed
        prefill.released("p-1")


def test_without_renewal_the_lease_ends() -> None:
    clock = Clock()
    with (
        engine("prefill", clock=clock) as prefill,
        engine("decode", options=PATIENT, clock=clock) as decode,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        clock.skip(LEASE)
        prefill.released("p-1")
        decode.pull("d-1", ticket, [3, 4])
        assert isinstance(decode.outcome("d-1").failed[RequestId("d-1")], StaleError)


def test_a_hold_that_is_gone_fails_its_request_before_anything_is_read() -> None:
    clock, driver = Clock(), Watched()
    with (
        engine("prefill", transport=lambda: driver, clock=clock) as prefill,
        engine("decode", options=PATIENT, clock=clock) as decode,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.prepare(ticket)
        renewed(driver)
        prefill.ledger.reset()
        prefill.step()
        prefill.released("p-1")
        driver.heard.clear()
        clock.skip(LEASE / 2)
        renewed(driver)
        decode.pull("d-1", ticket, [3, 4])
        error = decode.outcome("d-1").failed[RequestId("d-1")]
        assert "when their lease was to be renewed" in str(error)
        assert np.isnan(decode.ranks[0].cache).all()


def test_requests_are_renewed_in_bulk_and_no_longer_than_they_wait() -> None:
    clock, driver = Clock(), Watched()
    with (
        engine("prefill", Shape(pages=64), transport=lambda: driver, clock=clock) as prefill,
        engine("decode", Shape(pages=64), options=PATIENT, clock=clock) as decode,
    ):
        tickets = [prefill.serve(f"p-{i}", [i + 1], 4) for i in range(60)]
        for ticket in tickets:
            decode.prepare(ticket)
        eventually(lambda: len(renewals(driver)) >= 60, "all are renewed")
        driver.heard.clear()
        clock.skip(LEASE / 2)
        eventually(lambda: len(renewals(driver)) >= 60, "all are renewed")
        assert len(driver.heard) <= 3
        for i, ticket in enumerate(tickets):
            decode.pull(f"d-{i}", ticket, [], nothing=True)
        eventually(lambda: prefill.ranks[0].endpoint.held == 0, "all are released")
        driver.heard.clear()
        clock.skip(LEASE)
        decode.pull("last", prefill.serve("p-60", [1], 4), [2])
        assert not decode.outcome("last").failed
        assert not renewals(driver)


@pytest.mark.parametrize("raises", [False, True])
def test_a_device_that_never_passes_holds_pages_for_one_lease(
    raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0

    def passed() -> bool:
        nonlocal asked
        asked += 1
        if raises:
            raise RuntimeError("the device is lost")
        return False

    clock = Clock()
    with caplog.at_level(logging.ERROR), engine("prefill", clock=clock) as prefill:
        prefill.compute("p-1", [1], 4)
        prefill.finish("p-1", [1], 4, order=False)
        prefill.step(passed=passed)
        eventually(lambda: asked > 3, "the device is asked again and again")
        clock.skip(LEASE)
        prefill.released("p-1")
    assert len([r for r in caplog.records if "cannot tell" in r.message]) == raises


class Unanswered(Watched):
    """A driver of which reads go on when they are cancelled, until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = False
        self.reads: set[TransferId] = set()
        """Those that are not over."""
        self.cancelled: set[TransferId] = set()
        self.failing = 0
        """How often it has said of one that it will fail."""

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
        if self.let_go and is_over:
            return Status(state=State.FAILED, error=error)
        self.failing += 1
        return Status(state=State.FAILING, error=error)

    def forget(self, transfer: TransferId) -> None:
        super().forget(transfer)
        self.reads.discard(transfer)

    def disconnect(self, peer: PeerId) -> None:
        self.let_go = True
        super().disconnect(peer)


@pytest.mark.parametrize("ends", [True, False])
def test_a_renewal_that_is_cancelled_has_a_while_to_end_by_itself(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "CANCEL_SECONDS", 2 * LEASE)  # longer than this test takes
    clock, driver = Clock(), Unanswered()
    with (
        engine("prefill") as prefill,
        engine("decode", options=PATIENT, transport=lambda: driver, clock=clock) as decode,
    ):
        decode.prepare(prefill.serve("p-1", [1, 2], 8))
        eventually(lambda: len(driver.reads) == 1, "it is renewed")
        clock.skip(LEASE / 2)
        eventually(lambda: driver.failing > 1, "it was cancelled, and goes on")
        if ends:
            driver.let_go = True
            eventually(lambda: not driver.reads, "it has ended")
            clock.skip(2 * LEASE)
            eventually(lambda: len(driver.reads) == 1, "it is renewed again")
            assert not driver.disconnected
        else:
            clock.skip(2 * LEASE)
            eventually(lambda: bool(driver.disconnected), "it is ended")
