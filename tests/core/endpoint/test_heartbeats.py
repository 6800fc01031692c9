"""Heartbeats: a producer knows within seconds that a consumer is dead."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core import messages
from kvferry.core.endpoint import EndpointOptions, endpoint
from kvferry.core.endpoint.hold_server import HoldServer, SlotTable
from kvferry.core.errors import StaleError, TransportError
from kvferry.core.lifecycle.holds import Hold, RequestId, random_incarnation
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.lifecycle.silent_holds import GONE_SECONDS, HEARTBEAT_SECONDS
from kvferry.core.messages import Heartbeat, Renewal, decode_notes
from kvferry.core.metrics import Metrics
from kvferry.core.transport import PeerId
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import Clock, Engine, RecordingTransport, eventually

NO_LIVENESS_CHECKS = EndpointOptions(liveness_interval=0, load_timeout=1000.0)
HOLDS = 30
LONG_LEASES = EndpointOptions(lease=3000.0)
"""Holds are renewed after a third of this, which does not pass in any test, however slow."""


def pass_seconds(clock: Clock, seconds: int, *drivers: RecordingTransport) -> None:
    """Let time pass in steps of a heartbeat; wait until each arrives at every producer rank."""
    for _ in range(seconds):
        known = [len(driver.notes(Heartbeat)) for driver in drivers]
        clock.skip(HEARTBEAT_SECONDS)
        for driver, count in zip(drivers, known, strict=True):
            eventually(lambda d=driver, c=count: len(d.notes(Heartbeat)) > c, "a heartbeat arrives")  # type: ignore[misc]


def wait_for_renewals(driver: RecordingTransport, count: int) -> None:
    eventually(
        lambda: sum(note.engine == "decode" for note in driver.notes(Renewal)) >= count,
        "all holds are renewed",
    )


def count_silent_holds(prefill: Engine) -> list[int]:
    return [len(rank.endpoint.silent()) for rank in prefill.ranks]


def test_holds_of_a_live_consumer_are_never_silent(clock: Clock) -> None:
    """One heartbeat per second and rank serves all holds, without a renewal for each."""
    drivers = [RecordingTransport(), RecordingTransport()]
    made = iter(drivers)
    shape = CacheShape(tp=2, pages=HOLDS + 1)
    with (
        Engine(
            "prefill", shape, transport=lambda: next(made), options=LONG_LEASES, clock=clock
        ) as prefill,
        Engine("decode", CacheShape(pages=8), options=NO_LIVENESS_CHECKS, clock=clock) as decode,
    ):
        for i in range(HOLDS):
            decode.prepare(prefill.serve(f"p-{i}", [i + 1], 4))
        for driver in drivers:
            wait_for_renewals(driver, HOLDS)
            driver.received.clear()
        before = clock()
        pass_seconds(clock, 9, *drivers)
        assert count_silent_holds(prefill) == [0, 0]
        for driver in drivers:
            assert 9 <= len(driver.notes(Heartbeat)) <= clock() - before + 2
            assert not driver.notes(Renewal)


def test_holds_of_a_dead_consumer_are_silent_after_three_seconds_and_can_be_ended(
    clock: Clock, driver: RecordingTransport
) -> None:
    with Engine("prefill", transport=lambda: driver, clock=clock) as prefill:
        with Engine("decode", options=NO_LIVENESS_CHECKS, clock=clock) as decode:
            ticket = prefill.serve("p-1", [1, 2], 8)
            decode.prepare(ticket)
            wait_for_renewals(driver, 1)
        clock.skip(GONE_SECONDS - 1.0)
        wait_until_listening(driver, prefill)
        assert count_silent_holds(prefill) == [0]
        clock.skip(1.5)
        eventually(lambda: count_silent_holds(prefill) == [1], "the hold is silent")
        [silent_hold] = prefill.endpoint.silent()
        assert silent_hold.engines == ("decode",)
        assert prefill.scheduler_holds.give_up([silent_hold], 1) == [silent_hold]
        prefill.step()
        prefill.released("p-1")
        with Engine("decode", options=NO_LIVENESS_CHECKS, clock=clock) as decode:
            assert isinstance(decode.load("d-1", ticket, [3, 4]), StaleError)


def wait_until_listening(driver: RecordingTransport, prefill: Engine) -> None:
    """Wait until the producer has looked for notifications once more."""
    listened = prefill.endpoint._hold_server._listened
    eventually(lambda: prefill.endpoint._hold_server._listened > listened, "it listens")


def test_a_producer_that_could_not_listen_counts_no_consumer_as_dead(clock: Clock) -> None:
    """Silence is measured only while its thread runs: heartbeats may have arrived meanwhile."""
    table, incarnation = SlotTable(4), random_incarnation()
    server = HoldServer(table, incarnation, clock, Metrics(driver="loopback", rank="0"))
    request, hold = RequestId("p-1"), Hold(slot=1, generation=7)
    server.apply(HoldOrders(take_ons=((request, hold),)), None)
    server.apply(HoldOrders(ready=((hold, 30.0),)), None)
    clock.skip(100.0)
    assert server.silent() == []
    server.listened(clock())
    assert [each.request for each in server.silent()] == [request]


def test_a_producer_that_does_not_know_heartbeats_gets_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An older build would drop and log each heartbeat."""
    original = endpoint.Endpoint._publish

    def older_payload(self: Any, *args: Any) -> messages.RankPayload:
        payload = original(self, *args)
        fields = {name: getattr(payload, name) for name in payload.__struct_fields__}
        return messages.RankPayload(**fields | {"heartbeats": False})

    clock, driver = Clock(), RecordingTransport()
    with Engine("decode", options=NO_LIVENESS_CHECKS, clock=clock) as decode:
        monkeypatch.setattr(endpoint.Endpoint, "_publish", older_payload)
        with Engine("prefill", transport=lambda: driver, clock=clock) as prefill:
            ticket = prefill.serve("p-1", [1, 2], 8)
            decode.prepare(ticket)
            wait_for_renewals(driver, 1)
            clock.skip(15.0)
            wait_for_renewals(driver, 2)
            assert not driver.notes(Heartbeat)


def test_a_heartbeat_that_cannot_be_sent_fails_no_load() -> None:
    tried: list[PeerId] = []

    class NoHeartbeatsTransport(RecordingTransport):
        def notify(self, peer: PeerId, payload: bytes) -> None:
            if isinstance(decode_notes(payload)[0], Heartbeat):
                tried.append(peer)
                raise TransportError("the queue is full")
            super().notify(peer, payload)

    clock = Clock()
    with (
        Engine("prefill", options=LONG_LEASES, clock=clock) as prefill,
        Engine(
            "decode", options=NO_LIVENESS_CHECKS, transport=NoHeartbeatsTransport, clock=clock
        ) as decode,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.prepare(ticket)
        clock.skip_until(lambda: bool(tried) or decode.endpoint.wait(0.01), 2.0)
        assert tried
        assert decode.load("d-1", ticket, [3, 4]) is None
        prefill.released("p-1")
