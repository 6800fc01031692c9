"""Lease renewal between real endpoints, for requests that wait longer than a lease."""

from __future__ import annotations

import numpy as np

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.messages import Renewal
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
