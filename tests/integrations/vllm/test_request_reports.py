"""What operators see of each request: log lines, metrics of holds, spans. Needs no vLLM."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.lifecycle.holds import EndedHold, HoldEnd, RequestId
from kvferry.core.lifecycle.silent_holds import Silence
from kvferry.core.metrics import LoadRecord, Metrics
from kvferry.integrations.vllm.consumer import Consumer
from kvferry.integrations.vllm.producer import Producer
from kvferry.integrations.vllm.request_reports import (
    LoadingRequest,
    RequestReports,
    is_followed,
)
from kvferry.integrations.vllm.ticket_params import read_ticket
from kvferry.integrations.vllm.tracing import Headers
from tests.integrations.vllm.halves import (
    PREFILL,
    SERVING,
    blocks,
    consumer,
    producer,
    request,
    ticket,
)

HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
RECORD = LoadRecord(
    first_tokens=(0,),
    request="d",
    engine="prefill",
    reads=True,
    tokens=40,
    copies=3,
    nbytes=4 << 20,
    seconds=0.0204,
    wait_seconds=0.0002,
    handshake_seconds=0.003,
    check_seconds=0.0053,
    post_seconds=0.001,
    transfer_seconds=0.0108,
    fence_seconds=0.0003,
    ended=1000.0,
)


class Spans:
    """Records what ``RequestSpans`` is asked for."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Headers, Mapping[str, Any]]] = []

    def loaded(self, headers: Headers, record: LoadRecord, **attributes: str | int) -> None:
        self.made.append(("load", headers, attributes))

    def failed(self, headers: Headers, begun: float, **attributes: str | int) -> None:
        self.made.append(("failed", headers, attributes))

    def held(self, headers: Headers, seconds: float, **attributes: str | int) -> None:
        self.made.append(("hold", headers, attributes | {"seconds": seconds}))


class Prefill:
    """A producer whose clock stands still unless told otherwise, and what it counts."""

    def __init__(self, *, log: bool = True, spans: Any = None, **settings: Any) -> None:
        self.now = 100.0
        self.metrics = Metrics(driver="loopback")
        self.producer: Producer = producer(
            metrics=self.metrics,
            clock=lambda: self.now,
            reports=RequestReports(log=log, spans=spans),
            **settings,
        )
        self._ids = itertools.count(1)

    def hold(self, name: str, headers: Headers = None) -> None:
        """Finish a request of three blocks; it gets a ticket."""
        each = request(40, PREFILL, name=name)
        each.trace_headers = headers
        self.producer.take_on(each)
        ids = [next(self._ids) for _ in range(3)]
        assert self.producer.request_finished(each, [ids], SERVING)

    def end(self, name: str, *ends: tuple[HoldEnd, str]) -> None:
        """The ranks report how they ended a hold, one by one, and then that it was sent."""
        for end, engine in ends:
            hold = EndedHold(request=RequestId(name), end=end, engine=engine)
            self.producer.holds_ended({name: hold})
        self.producer.sends_finished([name])

    def counted(self) -> dict[str, int]:
        taken = self.metrics.take() or {}
        counts: dict[str, int] = taken.get("holds", {}).get("loopback", {})
        return counts


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "kvferry.requests"]


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


READ, ABANDONED = (HoldEnd.READ, "decode"), (HoldEnd.ABANDONED, "decode")
EXPIRED = (HoldEnd.EXPIRED, "")


@pytest.mark.parametrize(
    ("ends", "outcome", "said"),
    [
        ((READ, READ), "read", "read by decode"),
        ((), "read", "read"),
        ((READ, ABANDONED), "abandoned", "abandoned by decode"),
        ((EXPIRED, READ), "expired", "expired"),
    ],
)
def test_a_hold_that_ended_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
    ends: tuple[tuple[HoldEnd, str], ...],
    outcome: str,
    said: str,
) -> None:
    prefill = Prefill()
    prefill.hold("p")
    assert prefill.counted() == {"made": 1}
    prefill.now += 0.84
    prefill.end("p", *ends)
    prefill.end("p", *ends)
    assert prefill.counted() == {outcome: 1}
    assert lines(caplog) == [f"request p: 40 tokens, 3 blocks, {said} after 0.84 s"]


def test_made_holds_are_those_that_ended_and_those_still_held(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefill = Prefill(max_held_fraction=12 / 64)
    prefill.producer.set_ranks(1)
    for name in ("evicted", "orphaned", "revoked", "read", "held"):
        prefill.hold(name)
    holds = dict(prefill.producer.drain().take_ons)
    hold = holds[RequestId("orphaned")]
    silence = Silence(request=RequestId("orphaned"), hold=hold, age=9.0)
    prefill.producer.silence_reported({0: (silence,)})
    prefill.producer.allocation_attempted(request(40, name="waits"), 0)
    prefill.producer.relieve_block_pressure()
    prefill.producer.revoke(["revoked"])
    for name in ("evicted", "orphaned", "revoked", "read"):
        prefill.end(name)
    counted = prefill.counted()
    assert counted == {"made": 5, "evicted": 1, "orphaned": 1, "revoked": 1, "read": 1}
    said = "40 tokens, 3 blocks,"
    assert lines(caplog) == [
        f"request orphaned: {said} orphaned after 0.00 s",
        f"request revoked: {said} revoked after 0.00 s",
        f"request read: {said} read after 0.00 s",
    ], "an evicted hold has a warning"


def decoding(*, log: bool = True, spans: Any = None) -> Consumer:
    return consumer(reports=RequestReports(log=log, spans=spans))


def begin(half: Consumer, headers: Headers = None) -> None:
    """A request with a ticket gets its blocks."""
    each = request(40, ticket(), name="d")
    each.trace_headers = headers
    half.on_new_request(each)
    half.blocks_allocated(each, blocks(21, 22, 23), 40)


def test_a_load_is_logged_with_what_it_waited(caplog: pytest.LogCaptureFixture) -> None:
    half = decoding()
    begin(half)
    half.loads_reported({"d": RECORD, "another": RECORD})
    half.loads_reported({"d": RECORD})  # of another rank, in a later step
    half.loads_finished(["d"])
    half.loads_finished(["d"])
    assert lines(caplog) == [
        "request r (here d): loaded 40 tokens, 8.0 MiB, from prefill: waited 8.5 ms, read in "
        "12.1 ms"
    ]


def test_an_id_that_both_engines_have_from_the_router_is_there_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    router = "cmpl-" + "a" * 110 + "-0"
    there = read_ticket(ticket())
    for here, shown in (("-0123abcd", ""), ("-1-0123abcd", f" (here {router}-1-0123abcd)")):
        loading = LoadingRequest(
            request_id=router + here,
            ticket=replace(there, request=RequestId(f"{router}-89efcdab")),
            tokens=40,
            begun=0.0,
            record=RECORD,
        )
        RequestReports(log=True).loaded(loading)
        assert lines(caplog)[-1].startswith(f"request {router}-89efcdab{shown}: loaded")
    assert lines(caplog)[0].count(router) == 1


def test_an_early_load_says_how_much_came_early(caplog: pytest.LogCaptureFixture) -> None:
    loading = LoadingRequest(
        request_id="d", ticket=read_ticket(ticket()), tokens=40, begun=0.0, headers=HEADERS
    )
    spans: Any = Spans()
    for is_early in (False, True):
        loading.is_early = is_early
        loading.record = replace(RECORD, early_nbytes=3 << 20)
        RequestReports(log=True, spans=spans).loaded(loading)
    first, second = lines(caplog)
    assert ", 4.0 MiB, from" in first
    assert ", 4.0 MiB (3.0 early), from" in second
    assert ["early_bytes" in attributes for *_, attributes in spans.made] == [False, True]


def test_a_load_that_failed_has_a_span_and_no_line_beside_its_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spans = Spans()
    half = decoding(spans=spans)
    begin(half, HEADERS)
    half.loads_reported({"d": RECORD})
    half.loads_finished(["d"], failed=["d"])
    assert lines(caplog) == []
    [(kind, headers, attributes)] = spans.made
    assert (kind, headers, attributes["prefill_request"]) == ("failed", HEADERS, "r")


def test_a_request_that_loads_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    half = decoding()
    cached, gone = (request(40, ticket(), name=name) for name in ("cached", "gone"))
    half.on_new_request(cached)
    half.blocks_allocated(cached, blocks(21, 22, 23, cached=3), 0)
    half.on_new_request(gone)
    half.request_finished(gone)
    assert lines(caplog) == [
        "request r (here cached): loaded nothing from prefill: it needs none, or too few tokens",
        "request r (here gone): loaded nothing from prefill: it ended before it had blocks",
    ]


def test_a_refused_ticket_is_logged_with_both_ids(caplog: pytest.LogCaptureFixture) -> None:
    half = decoding()
    broken = {**ticket(), "kvferry": {}, "remote_request_id": "p\n1"}
    half.on_new_request(request(40, broken, name="d"))
    [line] = [line for line in caplog.messages if line.startswith("request d: ticket refused")]
    assert line.endswith("of engine prefill, request p 1)")


def test_an_id_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    prefill = Prefill()
    prefill.hold("p\nWARNING")
    prefill.end("p\nWARNING", (HoldEnd.READ, "a\rb"))
    assert lines(caplog)[0].startswith("request p WARNING: 40 tokens, 3 blocks, read by a b")
    assert "\r" not in lines(caplog)[0]


def test_lines_are_at_debug_unless_they_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    for level, count in ((logging.INFO, 0), (logging.DEBUG, 3)):
        caplog.set_level(level)
        prefill, half = Prefill(log=False), decoding(log=False)
        prefill.hold("p")
        prefill.end("p", READ)
        begin(half)
        half.loads_reported({"d": RECORD})
        half.loads_finished(["d"])
        half.on_new_request(gone := request(40, ticket(), name="gone"))
        half.request_finished(gone)
        assert len(lines(caplog)) == count
        assert is_followed(log=False) is (count > 0)
        assert prefill.counted() == {"made": 1, "read": 1}
    assert is_followed(log=True)


def test_spans_have_the_trace_of_their_request() -> None:
    spans = Spans()
    prefill, half = Prefill(log=False, spans=spans), decoding(log=False, spans=spans)
    prefill.hold("p", HEADERS)
    prefill.now += 0.5
    prefill.end("p", READ)
    begin(half, HEADERS)
    half.loads_reported({"d": RECORD})
    half.loads_finished(["d"])
    assert spans.made == [
        (
            "hold",
            HEADERS,
            {"request": "p", "tokens": 40, "blocks": 3, "outcome": "read", "seconds": 0.5},
        ),
        (
            "load",
            HEADERS,
            {
                "request": "d",
                "prefill_request": "r",
                "prefill_engine": "prefill",
                "tokens": 40,
                "bytes": 4 << 20,
            },
        ),
    ]


@pytest.mark.parametrize(("endpoint", "traced"), [(None, False), ("http://127.0.0.1:4317", True)])
def test_an_engine_is_traced_where_vllm_exports_spans(endpoint: str | None, traced: bool) -> None:
    from kvferry.integrations.vllm.tracing import is_traced

    config: Any = SimpleNamespace(
        observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint)
    )
    assert is_traced(config) is traced
