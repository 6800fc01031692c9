"""Metrics and log lines of endpoints, for loads that succeed and loads that fail."""

from __future__ import annotations

import dataclasses

import pytest

from kvferry.core.errors import TransportError
from kvferry.core.lifecycle.holds import HoldEnd
from kvferry.core.metrics import (
    BYTES,
    COPIES,
    FAILURES,
    IGNORED,
    LATE,
    LOAD_SECONDS,
    LOST_PEERS,
    PEERS_DOWN,
    PEERS_UP,
    PULLS,
    QUARANTINED,
    REFUSED,
    STAGE_SECONDS,
    STALE,
    UNTOLD,
    Stage,
)
from kvferry.core.transport import Quiescence
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import (
    Clock,
    Engine,
    MetricTotals,
    eventually,
    until,
)
from tests.core.endpoint.transports import ScriptedTransport, failing

PAGE_BYTES = 4 * 4 * 8 * 4  # tokens, heads, elements, bytes of each


def test_a_load_is_counted_by_the_rank_that_read_it(prefill: Engine, decode: Engine) -> None:
    assert decode.load("d-1", prefill.serve("p-1", [1, 2], 8), [3, 4]) is None
    prefill.released("p-1")
    totals = MetricTotals(decode)
    assert totals.of(BYTES) == {("prefill", "process_vm"): 2 * 2 * PAGE_BYTES}
    assert totals.of(COPIES) == {("prefill", "process_vm"): 2}
    assert totals.of(PULLS) == {("prefill", "process_vm"): 1}
    assert totals.of(PEERS_UP) == {("0",): 1}
    [seconds] = totals.of(LOAD_SECONDS)[()]
    stages = {stage: value for (stage,), [value] in totals.of(STAGE_SECONDS).items()}
    assert set(stages) == set(Stage) - {Stage.COPY}  # no cache is staged
    inside = [stages[each] for each in stages if each not in (Stage.WAIT, Stage.HANDSHAKE)]
    assert 0 < sum(inside) <= seconds
    assert stages[Stage.HANDSHAKE] > 0
    assert stages[Stage.FENCE] > 0
    assert stages[Stage.WAIT] == 0.0
    failure_metrics = (FAILURES, STALE, REFUSED, LOST_PEERS, UNTOLD, PEERS_DOWN)
    assert not any(totals.of(metric) for metric in failure_metrics)
    assert MetricTotals(prefill).all() == {}


def test_the_wait_of_a_request_for_pages_is_measured(prefill: Engine, decode: Engine) -> None:
    ticket = prefill.serve("p-1", [1], 4)
    decode.prepare(ticket)
    assert decode.load("d-1", ticket, [2]) is None
    [waited] = MetricTotals(decode).of(STAGE_SECONDS)[(Stage.WAIT,)]
    assert waited > 0


def test_an_expired_lease_and_the_late_read_are_counted(decode: Engine, clock: Clock) -> None:
    with Engine("prefill", CacheShape(tp=2), clock=clock) as prefill:
        producer, consumer = MetricTotals(prefill), MetricTotals(decode)
        ticket = prefill.serve("p-1", [1], 4)
        clock.skip(31.0)
        assert prefill.released("p-1").end is HoldEnd.EXPIRED
        decode.pull("d-1", ticket, [2])
        assert decode.outcome("d-1").failed
        assert consumer.of(FAILURES) == {("prefill", "fence", "stale"): 1}
        assert consumer.of(STALE) == {("prefill",): 1}
        assert not consumer.of(BYTES)
        eventually(lambda: producer.total(IGNORED) == 2, "both ranks are told that the load failed")
        # The second rank is not read if the first has been found stale by then.
        assert producer.total(LATE) in (1, 2)


def test_a_ticket_that_the_handshake_denies_is_counted_once_and_logged_in_one_line(
    prefill: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """The line names request, peer, stage, cause and remedy."""
    with Engine("decode", CacheShape(tp=2)) as decode:
        ticket = dataclasses.replace(prefill.serve("p-1", [1, 2], 8), pages=((1, 99),))
        decode.pull("d-1", ticket, [3, 4])
        assert decode.outcome("d-1").failed
        totals = MetricTotals(decode)
        assert totals.of(REFUSED) == {("mismatch",): 1}
        assert totals.total(FAILURES) == 2
        assert {labels[1:] for labels in totals.of(FAILURES)} == {("handshake", "ticket")}
    lines = {r.getMessage() for r in caplog.records if "d-1" in r.getMessage()}
    assert lines == {
        "request d-1: not loaded from request p-1 of engine prefill at 127.0.0.1 port "
        f"{prefill.server.port} (stage handshake, cause ticket): group 0 names block 99; the "
        "producer has 16 (prefill again, and let the router pass kv_transfer_params on as they are)"
    }


def test_pages_that_may_still_be_written_are_quarantined(
    prefill: Engine,
    driver: ScriptedTransport,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver.quiescence = Quiescence.AFTER_DISCONNECT
    driver.default = failing(TransportError("the cable is out"))
    driver.raises["disconnect"] = TransportError("still copying")
    with Engine("decode", transport=lambda: driver, clock=clock) as decode:
        totals = MetricTotals(decode)
        decode.pull("d-1", prefill.serve("p-1", [1, 2, 3], 12), [4, 5, 6])
        eventually(lambda: totals.of(QUARANTINED) == {("0",): 3}, "the pages are quarantined")
        assert "1 connections did not fall silent" in decode.endpoint.problems[0]
        assert decode.endpoint.pending == 1, "and not given back"
        driver.raises.clear()
        clock.skip(60.0)
        assert decode.outcome("d-1").failed
        assert totals.of(FAILURES) == {("prefill", "transfer", "transport"): 1}
        eventually(lambda: totals.of(QUARANTINED) == {("0",): 0}, "they have quiesced")
        assert decode.endpoint.healthy
    [line] = [r.getMessage() for r in caplog.records if "did not fall silent" in r.getMessage()]
    assert "prefill" in line
    assert "(stage disconnect, cause transport): still copying; the pages" in line
    assert "restart the engine if that lasts" in line
    assert not any(record.exc_info for record in caplog.records)


def test_a_release_that_could_not_be_sent_is_counted_and_logged(
    prefill: Engine, driver: ScriptedTransport, caplog: pytest.LogCaptureFixture
) -> None:
    driver.raises["notify"] = TransportError("the queue is full")
    with Engine("decode", transport=lambda: driver) as decode:
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [], nothing=True)
        until(decode.endpoint, lambda results: bool(results.loads))
        assert MetricTotals(decode).of(UNTOLD) == {("prefill",): 1}
    [line] = [r.getMessage() for r in caplog.records if "not told" in r.getMessage()]
    assert "(stage release, cause transport): the queue is full; their leases end them" in line
