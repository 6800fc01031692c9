"""The metrics, the health and the spans of a real pair."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from examples.tiny_llama import prompt
from kvferry.core.metrics import Stage
from kvferry.core.side_channel.connection import health
from tests.engines import probes
from tests.engines.collector import ENVIRONMENT, attributes, collecting
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import check_hand_over, check_refused
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)


def new(engine: Engine, before: dict[str, float], name: str) -> float:
    """How much samples have grown whose names begin so, over all producers."""
    after: dict[str, float] = engine.run(probes.exposed)
    return sum(after[each] - before.get(each, 0) for each in after if each.startswith(name))


def test_a_hand_over_is_counted(reference: Engine, prefill: Engine, decode: Engine) -> None:
    there, here = prefill.run(probes.exposed), decode.run(probes.exposed)
    check_hand_over(reference, prefill, decode, prompt(100, seed=30), prompt(33, seed=30))
    for name in ("loads_total", "pulls_total"):
        assert new(decode, here, name) == 2
    assert new(decode, here, "tokens_total") == 133
    assert new(decode, here, "bytes_total") > 0
    assert new(decode, here, "copies_total") > 0
    for stage in set(Stage) - {Stage.HANDSHAKE, Stage.COPY}:
        name = f'stage_seconds_count{{driver="loopback",stage="{stage}"}}'
        assert new(decode, here, name) == 2
    after = decode.run(probes.exposed)
    assert 'path="process_vm"' in next(name for name in after if name.startswith("bytes_total"))
    assert after['stage_seconds_sum{driver="loopback",stage="wait"}'] > 0
    assert after['peers_up{driver="loopback",rank="0"}'] >= 1
    for name in ("failed_loads_total", "load_failures_total", "refused_"):
        assert new(decode, here, name) == 0
    for outcome in ("made", "read"):
        name = f'holds_total{{driver="loopback",outcome="{outcome}"}}'
        eventually(lambda name=name: new(prefill, there, name) == 2)  # type: ignore[misc]


def ail(engine: Any, problem: str) -> None:
    """From now on every endpoint here finds this wrong, or nothing if it is empty."""
    from kvferry.core.endpoint import Endpoint

    found = (problem,) if problem else ()
    Endpoint.problems = property(lambda self: found)  # type: ignore[assignment]


def test_what_a_rank_finds_wrong_reaches_a_probe(prefill: Engine) -> None:
    """In the next step after it is found, and as soon as it is over: who is told of it keeps
    requests away, so the engine steps on without any."""
    [ticket] = prefill.prefill(prompt(20, seed=33))

    def told(*problems: str) -> bool:
        condition = health(ticket["remote_host"], ticket["remote_port"], timeout=20.0)
        return condition.problems == list(problems)

    assert not prefill.run(probes.has_to_step)
    prefill.run(ail, "it burns")
    prefill.prefill(prompt(21, seed=33))
    eventually(lambda: told("rank 0: it burns"))
    assert prefill.run(probes.has_to_step)
    prefill.run(ail, "")
    eventually(told)
    assert not prefill.run(probes.has_to_step)


def test_spans_are_in_the_trace_of_the_client(reference: Engine, start_engine: StartEngine) -> None:
    """Those of both engines, and beside vLLM's own; the stages of a load are in its span."""
    pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    with collecting() as collector:
        options = {"otlp_traces_endpoint": collector.address, "environment": ENVIRONMENT}
        prefill = start_engine("traced-prefill", "kv_producer", **options)
        decode = start_engine("traced-decode", "kv_consumer", **options)
        trace, client = secrets.token_bytes(16), secrets.token_bytes(8)
        parent = f"00-{trace.hex()}-{client.hex()}-01"
        traced: dict[str, Any] = {"trace_headers": {"traceparent": parent}}
        check_hand_over(reference, prefill, decode, prompt(100, seed=72), **traced)
        check_hand_over(reference, prefill, decode, prompt(100, seed=73))
        load, hold = (collector.wait(f"kvferry.{name}") for name in ("load", "hold"))
        eventually(lambda: len(collector.named("llm_request")) >= 4)
        ours = [span for span in collector.spans if span.name.startswith("kvferry.")]
        theirs = [span for span in collector.spans if span not in ours]
        assert {span.trace_id for span in ours} == {trace}
        assert load.parent_span_id == hold.parent_span_id == client
        assert [s.parent_span_id for s in theirs if s.trace_id == trace] == [client, client]
        assert not {span.span_id for span in ours} & {span.span_id for span in theirs}
        stages = [span for span in ours if span not in (load, hold)]
        assert {span.parent_span_id for span in stages} == {load.span_id}
        assert {"kvferry.transfer", "kvferry.fence"} <= {span.name for span in stages}
        assert hold.start_time_unix_nano <= load.start_time_unix_nano
        there, here = attributes(hold), attributes(load)
        assert there["kvferry.request"] == here["kvferry.prefill_request"]
        assert there["kvferry.tokens"] == here["kvferry.tokens"] == 100
        assert there["kvferry.outcome"] == "read"
        assert here["kvferry.bytes"] > 0
        collector.spans.clear()
        [ticket] = prefill.prefill(prompt(100, seed=74))
        broken = ticket | {"remote_block_ids": [[500, 501, 502, 503]]}
        check_refused(decode, prompt(100, seed=74), broken, **traced)
        failed = collector.wait("kvferry.load")
        assert failed.parent_span_id == client
        assert failed.status.code == failed.status.STATUS_CODE_ERROR
