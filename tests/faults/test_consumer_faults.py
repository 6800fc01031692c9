"""Held pages are released once when their consumer or the link to it fails at any stage.

A consumer that reads too late never accepts the bytes of another request.
"""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager

import pytest

from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.transport.registry import create
from tests.core.endpoint.engines import Engine, until
from tests.faults.cable import DIRECTIONS, OVER, STAGES, Direction, staged_transport
from tests.faults.engine_pair import LOCAL, engine_pair
from tests.faults.engine_processes import (
    HELD_PAGES,
    LEASE,
    LONG_LEASE,
    LONG_TIMEOUTS,
    OPTIONS,
    SHAPE,
    TOKENS,
    EngineProcess,
    engine_process,
    run_consumer,
    serve_request,
)
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(180)

WITH_WAITING = ["waiting", *STAGES]
DRIVERS_AND_STAGES = [(OVER, stage) for stage in (WITH_WAITING if OVER == "loopback" else STAGES)]
CUT_DIRECTIONS = {
    "before the handshake": DIRECTIONS,
    "during the handshake": frozenset[Direction]({"replies"}),
}
"""The directions of a side channel that are cut so that a load stops at a stage."""


def local_producer(driver: str) -> AbstractContextManager[Engine]:
    return Engine("prefill", SHAPE, options=OPTIONS, transport=lambda: create(driver))


def load_until_stage(decode: EngineProcess, prefill: Engine, lease: float = LEASE) -> Ticket:
    """Let a consumer load a request until it stops at its stage, and return the ticket."""
    assert decode.answer() == "ready"
    ticket = serve_request(prefill, "p-1", lease)
    decode.pipe.send((ticket, LOCAL))
    assert decode.answer() == "here"
    return ticket


def overwrite_pages(prefill: Engine) -> None:
    for rank in prefill.ranks:
        rank.cache[:, HELD_PAGES] += 1.0


def expect_next_load(prefill: Engine, request: str, driver: str = "loopback") -> None:
    """Check that another consumer is served, no page is held, and nothing was reported twice."""
    with Engine("other", SHAPE, options=OPTIONS, transport=lambda: create(driver)) as other:
        other.pull("o-1", serve_request(prefill, request), LOCAL)
        assert not other.outcome("o-1").failed
        assert not other.wrong_bytes(LOCAL, TOKENS)
    (rank,) = prefill.ranks
    sent = until(rank.endpoint, lambda results: RequestId(request) in results.sent).sent
    assert sent == {RequestId(request)}
    assert rank.endpoint.held == 0
    assert rank.endpoint.results().sent == frozenset()


@pytest.mark.parametrize(("driver", "stage"), DRIVERS_AND_STAGES)
def test_pages_of_killed_consumer_are_released(driver: str, stage: str) -> None:
    with local_producer(driver) as prefill, engine_process(run_consumer, stage, driver) as decode:
        load_until_stage(decode, prefill, LONG_LEASE if stage == "finishing" else LEASE)
        decode.kill()
        prefill.released("p-1")
        expect_next_load(prefill, "p-2", driver)


@pytest.mark.parametrize(("driver", "stage"), DRIVERS_AND_STAGES[1:])
def test_restarted_consumer_loads_or_is_refused(driver: str, stage: str) -> None:
    """The restarted consumer gets the same request with the same ticket."""
    with local_producer(driver) as prefill, engine_process(run_consumer, stage, driver) as first:
        ticket = load_until_stage(first, prefill, LONG_LEASE)
        first.kill()
        with engine_process(run_consumer, "never", driver) as second:
            assert second.answer() == "ready"
            second.pipe.send((ticket, LOCAL))
            outcome, is_right = second.answer()
            prefill.released("p-1")
        assert outcome == ("StaleError" if stage == "finishing" else "loaded")
        assert is_right or outcome == "StaleError"
        expect_next_load(prefill, "p-2", driver)


@pytest.mark.parametrize(
    ("fault", "driver", "stage"),
    [
        *[("stopped", *each) for each in DRIVERS_AND_STAGES],
        *[("slow", "loopback", stage) for stage in WITH_WAITING],
    ],
)
def test_consumer_that_is_late_renews_or_accepts_no_stale_pages(
    fault: str, driver: str, stage: str
) -> None:
    """A consumer that waits for pages renews the lease; stopped, or stuck in a read, it cannot."""
    with local_producer(driver) as prefill, engine_process(run_consumer, stage, driver) as decode:
        load_until_stage(decode, prefill)
        if fault == "stopped":
            decode.signal(signal.SIGSTOP)
        renews = fault == "slow" and stage == "waiting"
        if renews:
            assert not prefill.ranks[0].endpoint.wait(1.5 * LEASE)
        else:
            prefill.released("p-1")
            overwrite_pages(prefill)
        if fault == "stopped":
            decode.signal(signal.SIGCONT)
        decode.pipe.send("go on")
        outcome, is_right = decode.answer()
        assert outcome == ("loaded" if renews or stage == "finishing" else "StaleError")
        assert is_right or outcome == "StaleError"
        if renews:
            prefill.released("p-1")
        expect_next_load(prefill, "p-2", driver)


@pytest.mark.parametrize(("driver", "stage"), DRIVERS_AND_STAGES)
def test_pages_of_aborted_load_are_released(driver: str, stage: str) -> None:
    near = staged_transport(driver)
    with (
        local_producer(driver) as prefill,
        Engine("decode", SHAPE, options=OPTIONS, transport=lambda: near) as decode,
    ):
        endpoint = decode.ranks[0].endpoint

        def abort() -> None:
            endpoint.abort(RequestId("d-1"))

        near.at = {stage: abort}
        ticket = serve_request(prefill, "p-1", LONG_LEASE)
        if stage == "waiting":
            decode.prepare(ticket)
        decode.pull("d-1", ticket, LOCAL, nothing=stage == "waiting")
        if stage == "before the handshake":
            abort()
        if stage != "waiting":
            until(endpoint, lambda results: RequestId("d-1") in results.received)
        prefill.released("p-1")
        assert endpoint.results().received == frozenset()
        assert endpoint.pending == 0
        expect_next_load(prefill, "p-2", driver)


@pytest.mark.parametrize("stage", STAGES)
def test_consumer_cut_off_beyond_its_lease_accepts_no_stale_pages(stage: str) -> None:
    """When the link is mended and the load goes on, the pages belong to another request."""
    with engine_pair(LONG_TIMEOUTS) as pair:
        pair.begin_load_until(stage, pair.cut)
        eventually(lambda: pair.is_cut, "the link is cut")
        eventually(lambda: pair.producer.process.ask("held") == 0, "the pages are released")
        pair.producer.process.ask("overwrite_pages")
        pair.mend()
        assert pair.outcome("d-1") == ("loaded" if stage == "finishing" else "StaleError")
        pair.expect_recovery()


@pytest.mark.parametrize("stage", STAGES)
def test_pages_are_released_despite_garbage_from_consumer(stage: str) -> None:
    """The consumer's requests to the side channel and its notifications are random bytes."""

    def send_noise() -> None:
        pair.cable.is_noisy = True
        pair.producer.channel.noisy = frozenset({"requests"})

    with engine_pair() as pair:
        pair.producer.lease = LONG_LEASE if stage == "finishing" else LEASE
        pair.begin_load_until(stage, send_noise)
        assert pair.outcome("d-1") == ("HandshakeError" if "handshake" in stage else "loaded")
        pair.producer.expect_released()
        pair.expect_recovery()


@pytest.mark.parametrize("stage", STAGES)
def test_consumer_without_free_pages_renews_until_it_loads(stage: str) -> None:
    """Another load has the pages, and is stuck at a stage for longer than this load's lease."""
    with engine_pair(LONG_TIMEOUTS) as pair:
        first = pair.start_producer("prefill-2") if "handshake" in stage else pair.producer
        first.channel.cut(CUT_DIRECTIONS.get(stage, frozenset()))
        pair.cable.held = frozenset({stage})
        pair.begin_load("d-0", first.serve("p-0"))
        waiting = pair.producer.serve("p-1")
        pair.decode.prepare(waiting)
        assert not pair.endpoint.wait(1.2 * LEASE)
        pair.mend()
        first.channel.mend()
        assert pair.outcome("d-0") in ("loaded", "StaleError")
        assert pair.load("d-1", waiting) == "loaded"
        first.expect_released()
        pair.expect_recovery()
