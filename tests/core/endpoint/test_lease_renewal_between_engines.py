"""Leases, heartbeats and shared holds between real endpoints."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from collections.abc import Callable, Iterator

import numpy as np

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import EndpointClosedError, StaleError, TransportError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.silent_holds import GONE_SECONDS, HEARTBEAT_SECONDS
from kvferry.core.messages import Heartbeat, Note, Release, Renewal, decode_notes
from kvferry.core.transport import PeerId, Transport
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import (
    Clock,
    Engine,
    RecordingTransport,
    eventually,
    side_channel_with,
    until,
)

LEASE = 30.0
OPTIONS = EndpointOptions(liveness_interval=0, lease=LEASE, load_timeout=1000.0)
LONG_LEASES = EndpointOptions(lease=3000.0)
"""Holds are renewed after a third of this, which does not pass in any test, however slow."""


@contextlib.contextmanager
def pair(
    clock: Clock,
    ranks: int = 1,
    options: EndpointOptions = OPTIONS,
    consumer: Callable[[], Transport] = LoopbackTransport,
) -> Iterator[tuple[Engine, Engine, list[RecordingTransport]]]:
    """Run two engines; yield them and the transports of the producer's ranks."""
    drivers = [RecordingTransport() for _ in range(ranks)]
    made, shape = iter(drivers), CacheShape(tp=ranks, pages=32)
    with (
        Engine(
            "prefill", shape, transport=lambda: next(made), options=options, clock=clock
        ) as prefill,
        Engine("decode", options=OPTIONS, transport=consumer, clock=clock) as decode,
    ):
        yield prefill, decode, drivers


def wait_for_more(drivers: list[RecordingTransport], kind: type[Note], known: list[int]) -> None:
    """Wait until each driver has got more notes of a kind than were known."""
    for driver, count in zip(drivers, known, strict=True):
        eventually(lambda d=driver, c=count: len(d.notes(kind)) > c, f"{kind} arrives")  # type: ignore[misc]


def pass_time(
    clock: Clock, drivers: list[RecordingTransport], steps: int, seconds: float, kind: type[Note]
) -> None:
    """Let time pass, in steps in each of which a note of a kind arrives at every rank."""
    for _ in range(steps):
        known = [len(driver.notes(kind)) for driver in drivers]
        clock.skip(seconds)
        wait_for_more(drivers, kind, known)


def test_a_request_that_waits_for_pages_keeps_its_hold_on_every_rank(clock: Clock) -> None:
    with pair(clock, ranks=2) as (prefill, decode, drivers):
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.prepare(ticket)
        wait_for_more(drivers, Renewal, [0, 0])
        pass_time(clock, drivers, 4, LEASE / 2, Renewal)
        assert decode.load("d-1", ticket, [3, 4]) is None
        prefill.released("p-1")


def test_a_load_that_waits_for_the_device_keeps_its_hold(clock: Clock) -> None:
    with pair(clock) as (prefill, decode, drivers):
        decode.pull("d-1", prefill.serve_later("p-1", [1], 4), [2])
        eventually(lambda: decode.endpoint.pending == 1, "the load is under way")
        clock.skip(2.0)
        wait_for_more(drivers, Renewal, [0])
        pass_time(clock, drivers, 4, LEASE / 2, Renewal)
        prefill.step()
        assert decode.error("d-1") is None
        prefill.released("p-1")


def test_a_lost_hold_fails_its_request_before_anything_is_read(clock: Clock) -> None:
    with pair(clock) as (prefill, decode, drivers):
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.prepare(ticket)
        wait_for_more(drivers, Renewal, [0])
        prefill.reset("p-1")
        pass_time(clock, drivers, 1, LEASE / 2, Renewal)
        error = decode.load("d-1", ticket, [3, 4])
        assert "when their lease was to be renewed" in str(error)
        assert np.isnan(decode.ranks[0].cache).all()


def test_a_producer_of_a_newer_version_is_read_and_renewed(clock: Clock) -> None:
    more = {"newest": 9, "of_a_newer_version": {"any": ["thing", 1, None]}}
    with pair(clock) as (prefill, decode, drivers), side_channel_with(prefill, more) as port:
        ticket = dataclasses.replace(prefill.serve("p-1", [1, 2], 8), port=port)
        decode.prepare(ticket)
        wait_for_more(drivers, Renewal, [0])
        assert decode.load("d-1", ticket, [3, 4]) is None
        prefill.released("p-1")


# Heartbeats: a producer knows within seconds that a consumer is dead.


def silent(prefill: Engine) -> list[int]:
    return [len(rank.endpoint.silent()) for rank in prefill.ranks]


def test_holds_of_a_live_consumer_are_never_silent(clock: Clock) -> None:
    """One heartbeat per second and rank serves all holds, without a renewal for each."""
    with pair(clock, 2, LONG_LEASES) as (prefill, decode, drivers):
        for number in range(30):
            decode.prepare(prefill.serve(f"p-{number}", [number + 1], 4))
        wait_for_more(drivers, Renewal, [29, 29])
        for driver in drivers:
            driver.received.clear()
        before = clock()
        pass_time(clock, drivers, 9, HEARTBEAT_SECONDS, Heartbeat)
        assert silent(prefill) == [0, 0]
        for driver in drivers:
            assert 9 <= len(driver.notes(Heartbeat)) <= clock() - before + 2
            assert not driver.notes(Renewal)


def test_holds_of_a_dead_consumer_are_silent_after_three_seconds_and_can_be_ended(
    clock: Clock,
) -> None:
    with pair(clock) as (prefill, decode, drivers):
        server = prefill.endpoint._hold_server
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.prepare(ticket)
        wait_for_more(drivers, Renewal, [0])
        decode.close()
        clock.skip(GONE_SECONDS - 1.0)
        listened = server._listened
        eventually(lambda: server._listened > listened, "it looks for notifications once more")
        assert silent(prefill) == [0]
        clock.skip(1.5)
        eventually(lambda: silent(prefill) == [1], "the hold is silent")
        [silent_hold] = prefill.endpoint.silent()
        assert silent_hold.engines == ("decode",)
        assert prefill.scheduler_holds.give_up([silent_hold], 1) == [silent_hold]
        prefill.step()
        prefill.released("p-1")
        with Engine("decode", options=OPTIONS, clock=clock) as successor:
            assert isinstance(successor.load("d-1", ticket, [3, 4]), StaleError)


class NoHeartbeatsTransport(LoopbackTransport):
    """A transport that cannot send heartbeats."""

    tried = False

    def notify(self, peer: PeerId, payload: bytes) -> None:
        if isinstance(decode_notes(payload)[0], Heartbeat):
            self.tried = True
            raise TransportError("the queue is full")
        super().notify(peer, payload)


def test_a_heartbeat_that_cannot_be_sent_fails_no_load(clock: Clock) -> None:
    driver = NoHeartbeatsTransport()
    with pair(clock, 1, LONG_LEASES, lambda: driver) as (prefill, decode, _):
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.prepare(ticket)
        clock.skip_until(lambda: driver.tried or decode.endpoint.wait(0.01), 2.0)
        assert driver.tried
        assert decode.load("d-1", ticket, [3, 4]) is None
        prefill.released("p-1")


# Requests of one engine that share a hold.


@contextlib.contextmanager
def two_ranks(clock: Clock) -> Iterator[tuple[Engine, Engine]]:
    """Run two engines of two ranks; in the end, each rank has got one "done", and no "abandon"."""
    with (
        pair(clock, ranks=2) as (prefill, _, drivers),
        Engine("two", CacheShape(tp=2), options=OPTIONS) as decode,
    ):
        yield prefill, decode
        prefill.released("p-1")
        for driver in drivers:
            assert [release.abandoned for release in driver.notes(Release)] == [False]


def test_several_requests_load_and_one_done_ends_the_hold(clock: Clock) -> None:
    """The ranks start the loads in different orders."""
    with two_ranks(clock) as (prefill, decode):
        ticket = prefill.serve("p-1", [1, 2], 8)
        loads = {"d-1": [3, 4], "d-2": [5, 6], "d-3": [7, 8]}
        for index, rank in enumerate(decode.ranks):
            alone = copy.copy(decode)
            alone.endpoints = (rank.endpoint,)
            for name in list(loads)[:: 1 if index else -1]:
                alone.pull(name, ticket, loads[name], shared=True)
        assert not any(map(decode.error, loads))
        assert not any(decode.wrong_bytes(pages, 8) for pages in loads.values())
        decode.pull("done", ticket, [], nothing=True)


def test_an_aborted_request_does_not_end_the_shared_hold(clock: Clock) -> None:
    with two_ranks(clock) as (prefill, decode):
        ticket = prefill.serve("p-1", [1], 4)
        never = threading.Event()
        decode.pull("d-1", ticket, [2], shared=True, passed=never.is_set)
        for rank in decode.ranks:
            rank.endpoint.abort(RequestId("d-1"))
        assert isinstance(decode.error("d-1"), EndpointClosedError)
        assert decode.load("d-2", ticket, [3]) is None


def test_a_shared_request_that_needs_nothing_connects_to_no_producer(clock: Clock) -> None:
    with pair(clock) as (prefill, decode, _):
        ticket = prefill.serve("p-1", [1], 4)
        decode.pull("d-1", ticket, [], nothing=True, shared=True)
        decode.pull("d-2", ticket, [2])
        results = until(decode.endpoint, lambda results: bool(results.loads))
        assert [record.request for record in results.loads] == ["d-2"]
