"""A consumer says that it lives, and a producer whose consumer is gone knows it within seconds."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core import messages as wire
from kvferry.core.endpoint import EndpointOptions, endpoint
from kvferry.core.endpoint.producer import HoldServer, SlotTable
from kvferry.core.errors import StaleError, TransportError
from kvferry.core.lifecycle.holds import Hold, RequestId, random_incarnation
from kvferry.core.lifecycle.reclamation import GONE_SECONDS, HEARTBEAT_SECONDS
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.messages import Heartbeat, Note, Renewal, decode_notes
from kvferry.core.metrics import Metrics
from kvferry.core.transport import PeerId
from tests.core.endpoint.engines import Clock, Engine, Shape, Watched, engine, eventually

PATIENT = EndpointOptions(liveness_interval=0, load_timeout=1000.0)
HOLDS = 300


def notes(driver: Watched) -> list[Note]:
    return [note for heard in driver.heard for note in decode_notes(heard.payload)]


def beats(driver: Watched) -> list[Heartbeat]:
    return [note for note in notes(driver) if isinstance(note, Heartbeat)]


def pass_seconds(clock: Clock, seconds: int, *drivers: Watched) -> None:
    """In steps of a heartbeat, each of which arrives at every producer rank."""
    for _ in range(seconds):
        known = [len(beats(driver)) for driver in drivers]
        clock.skip(HEARTBEAT_SECONDS)
        for driver, count in zip(drivers, known, strict=True):
            eventually(lambda d=driver, c=count: len(beats(d)) > c, "a heartbeat arrives")  # type: ignore[misc]


def claimed(driver: Watched, count: int) -> None:
    eventually(
        lambda: (
            sum(isinstance(n, Renewal) and n.engine == "decode" for n in notes(driver)) >= count
        ),
        "everything is claimed",
    )


def silent(prefill: Engine) -> list[int]:
    return [len(rank.endpoint.silent()) for rank in prefill.ranks]


def test_an_honest_backlog_is_never_silent() -> None:
    """Hundreds of holds, no renewal for long, and one heartbeat a second and rank for all."""
    clock, drivers = Clock(), [Watched(), Watched()]
    made = iter(drivers)
    shape = Shape(tp=2, pages=HOLDS + 1)
    with (
        engine("prefill", shape, transport=lambda: next(made), clock=clock) as prefill,
        engine("decode", Shape(pages=8), options=PATIENT, clock=clock) as decode,
    ):
        tickets = [prefill.serve(f"p-{i}", [i + 1], 4) for i in range(HOLDS)]
        for ticket in tickets:
            decode.prepare(ticket)
        for driver in drivers:
            claimed(driver, HOLDS)
            driver.heard.clear()
        pass_seconds(clock, 9, *drivers)
        assert silent(prefill) == [0, 0]
        for driver in drivers:
            assert 9 <= len(beats(driver)) <= 11
            assert not [note for note in notes(driver) if isinstance(note, Renewal)]


def test_who_is_gone_is_silent_after_three_seconds_and_its_late_read_is_stale() -> None:
    clock, driver = Clock(), Watched()
    with engine("prefill", transport=lambda: driver, clock=clock) as prefill:
        with engine("decode", options=PATIENT, clock=clock) as decode:
            ticket = prefill.serve("p-1", [1, 2], 8)
            decode.prepare(ticket)
            claimed(driver, 1)
        clock.skip(GONE_SECONDS - 1.0)
        prefill_listens(driver, prefill)
        assert silent(prefill) == [0]
        clock.skip(1.5)
        eventually(lambda: silent(prefill) == [1], "it is silent")
        [found] = prefill.ranks[0].endpoint.silent()
        assert found.engines == ("decode",)
        assert prefill.ledger.give_up([found], 1) == [found]
        prefill.step()
        prefill.released("p-1")
        with engine("decode", options=PATIENT, clock=clock) as decode:
            decode.pull("d-1", ticket, [3, 4])
            assert isinstance(decode.outcome("d-1").failed[RequestId("d-1")], StaleError)


def prefill_listens(driver: Watched, prefill: Engine) -> None:
    """Wait until the producer has looked for messages since now."""
    listened = prefill.ranks[0].endpoint._hold_server._listened
    eventually(lambda: prefill.ranks[0].endpoint._hold_server._listened > listened, "it listens")


def test_a_producer_that_could_not_listen_takes_nobody_for_gone() -> None:
    """Its ages stand still while its thread does: heartbeats may have come meanwhile."""
    clock, table, incarnation = Clock(), SlotTable(4), random_incarnation()
    server = HoldServer(table, incarnation, clock, Metrics(driver="loopback", rank="0"))
    request, hold = RequestId("p-1"), Hold(slot=1, generation=7)
    server.apply(HoldOrders(take_ons=((request, hold),)), None)
    server.apply(HoldOrders(ready=((hold, 30.0),)), None)
    clock.skip(100.0)
    assert server.silent() == []
    server.listened(clock())
    assert [each.request for each in server.silent()] == [request]


def test_nothing_is_said_to_a_producer_that_does_not_know_heartbeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An older build would drop the notification, and say so in its log."""
    original = endpoint.Endpoint._make_payload

    def older(self: Any, *args: Any) -> wire.RankPayload:
        payload = original(self, *args)
        fields = {name: getattr(payload, name) for name in payload.__struct_fields__}
        return wire.RankPayload(**fields | {"heartbeats": False})

    clock, driver = Clock(), Watched()
    with engine("decode", options=PATIENT, clock=clock) as decode:
        monkeypatch.setattr(endpoint.Endpoint, "_make_payload", older)
        with engine("prefill", transport=lambda: driver, clock=clock) as prefill:
            ticket = prefill.serve("p-1", [1, 2], 8)
            decode.prepare(ticket)
            claimed(driver, 1)
            clock.skip(15.0)
            claimed(driver, 2)
            assert not beats(driver)


def test_a_heartbeat_that_cannot_be_sent_ends_nothing() -> None:
    class Mute(Watched):
        def notify(self, peer: PeerId, payload: bytes) -> None:
            if isinstance(decode_notes(payload)[0], Heartbeat):
                raise TransportError("the queue is full")
            super().notify(peer, payload)

    clock = Clock()
    with (
        engine("prefill", clock=clock) as prefill,
        engine("decode", options=PATIENT, transport=Mute, clock=clock) as decode,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.prepare(ticket)
        clock.skip(2.0)
        decode.pull("d-1", ticket, [3, 4])
        assert not decode.outcome("d-1").failed
        prefill.released("p-1")
