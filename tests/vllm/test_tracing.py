"""Spans of loads and holds, as OpenTelemetry has them: in the trace of the client."""

from __future__ import annotations

import random
import secrets
import time
from typing import Any

import pytest

from kvferry.core.metrics import LoadRecord
from kvferry.integrations.vllm.tracing import RequestSpans

sdk = pytest.importorskip("opentelemetry.sdk.trace")


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the spans that have ended."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter = sdk.TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter.get_finished_spans


def test_spans_are_below_that_of_the_client(exported: Any) -> None:
    """The stages of a load are in its span; no two engines that vLLM seeds alike draw one id."""
    trace, client = secrets.token_bytes(16), secrets.token_bytes(8)
    headers = {"traceparent": f"00-{trace.hex()}-{client.hex()}-01"}
    now = time.time()
    record = LoadRecord(
        request="a",
        engine="prefill",
        reads=True,
        tokens=100,
        copies=1,
        nbytes=1,
        wait_seconds=0.5,
        seconds=0.25,
        transfer_seconds=0.25,
        ended=now,
    )
    for _ in range(2):
        spans = RequestSpans()
        random.seed(0)
        spans.loaded(headers, record, tokens=100)
        spans.held(headers, 2.0, outcome="read")
        spans.failed(headers, now, cause="stale")
        spans.loaded(None, record)
        spans.held({}, 2.0)
        spans.failed(None, now)
    found = exported()
    assert len({span.context.span_id for span in found}) == len(found) == 10
    assert {span.context.trace_id for span in found} == {int.from_bytes(trace)}
    wait, transfer, load, hold, failed = found[:5]
    names = [span.name for span in (wait, transfer, load, hold, failed)]
    assert names == [f"kvferry.{name}" for name in ("wait", "transfer", "load", "hold", "load")]
    assert {span.parent.span_id for span in (load, hold, failed)} == {int.from_bytes(client)}
    assert {span.parent.span_id for span in (wait, transfer)} == {load.context.span_id}
    assert load.start_time == wait.start_time <= wait.end_time == transfer.start_time
    assert load.end_time == pytest.approx(now * 1e9)
    assert (load.attributes, hold.attributes) == (
        {"kvferry.tokens": 100},
        {"kvferry.outcome": "read"},
    )
    assert hold.end_time - hold.start_time == pytest.approx(2e9, rel=1e-3)
    assert not failed.status.is_ok
