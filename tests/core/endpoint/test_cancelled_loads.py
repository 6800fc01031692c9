"""Aborted loads, whose reads go on until the test lets them end, while others are read."""

from __future__ import annotations

import pytest

from kvferry.core.errors import EndpointClosedError, PeerLostError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.transport import Quiescence
from tests.core.endpoint.engines import TOKENS, Clock, Engine, eventually, outcomes, pull
from tests.core.endpoint.transports import (
    FAILED_CANCELLED,
    FAILING_CANCELLED,
    LOAD_TIMEOUT,
    PENDING,
    ScriptedTransport,
    pass_time,
    three_engines,
)


@pytest.fixture(params=[False, True], ids=["ignores cancel", "fails when cancelled"])
def driver(request: pytest.FixtureRequest) -> ScriptedTransport:
    made = ScriptedTransport(PENDING, Quiescence.AFTER_DISCONNECT)
    made.when_cancelled = FAILING_CANCELLED if request.param else None
    return made


def read(driver: ScriptedTransport, prefill: Engine, decode: Engine, *numbers: int) -> None:
    pull(prefill, decode, *numbers)
    eventually(lambda: len(driver.pages) == numbers[-1], "all are read")


def abort(driver: ScriptedTransport, decode: Engine, *numbers: int) -> None:
    """Abort these loads and wait until their reads are cancelled."""
    for number in numbers:
        decode.endpoint.abort(RequestId(f"d-{number}"))
    eventually(lambda: len(driver.cancelled) == len(numbers), "the reads are cancelled")


def test_an_aborted_load_does_not_end_others(driver: ScriptedTransport, clock: Clock) -> None:
    with three_engines(driver, clock) as (prefill, other, decode):
        read(driver, prefill, decode, 1, 2)
        abort(driver, decode, 1)
        pass_time(clock, other, decode, LOAD_TIMEOUT / 2)
        assert driver.disconnected == set()
        assert decode.endpoint.pending == 2, "bytes may still land"
        driver.statuses.update({0: driver.when_cancelled and FAILED_CANCELLED, 1: None})
        aborted, other_error = outcomes(decode, 1, 2)
        assert isinstance(aborted, EndpointClosedError)
        assert other_error is None
        assert not decode.wrong_bytes([2], TOKENS)
        eventually(lambda: prefill.endpoint.held == 0, "the producer is told of both")
        assert driver.disconnected == set()


def test_a_connection_whose_loads_were_all_aborted_is_closed(
    driver: ScriptedTransport, clock: Clock
) -> None:
    with three_engines(driver, clock) as (prefill, other, decode):
        read(driver, prefill, decode, 1, 2)
        abort(driver, decode, 1, 2)
        pass_time(clock, other, decode, LOAD_TIMEOUT / 2)
        assert all(outcomes(decode, 1, 2))
        assert len(driver.disconnected) == 1


def test_a_cancelled_read_is_ended_at_the_deadline_of_its_own_load(
    driver: ScriptedTransport, clock: Clock
) -> None:
    """The disconnect also ends a load whose deadline is later."""
    with three_engines(driver, clock) as (prefill, other, decode):
        read(driver, prefill, decode, 1)
        clock.skip(0.3 * LOAD_TIMEOUT)
        read(driver, prefill, decode, 2)
        abort(driver, decode, 1)
        pass_time(clock, other, decode, 0.4 * LOAD_TIMEOUT)
        assert driver.disconnected == set()
        pass_time(clock, other, decode, 0.35 * LOAD_TIMEOUT)
        aborted, other_error = outcomes(decode, 1, 2)
        assert isinstance(aborted, EndpointClosedError)
        assert isinstance(other_error, PeerLostError)
        assert len(driver.disconnected) == 1
