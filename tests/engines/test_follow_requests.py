"""A request is followed over two real engines: by its log lines, its metrics and its spans."""

from __future__ import annotations

import itertools
import re
import secrets
import time
from collections.abc import Iterator

import pytest

from examples.tiny_llama import prompt
from kvferry.core.metrics import Stage
from tests.engines import probes, ranks
from tests.engines.collector import ENVIRONMENT, Collector, Span, collecting
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import eventually

pytestmark = pytest.mark.timeout(300)


def lines(engine: Engine, text: str) -> list[str]:
    """The lines about requests that an engine has logged, if they have a text."""
    return [line for line in engine.log().splitlines() if "request " in line and text in line]


def outcomes(engine: Engine) -> dict[str, float]:
    """How many holds of an engine came to which outcome."""
    samples: dict[str, float] = engine.run(probes.exposed)
    found = re.compile(r'holds_total\{driver="loopback",outcome="(\w+)"\}')
    return {match[1]: value for name, value in samples.items() if (match := found.match(name))}


def standing(counted: dict[str, float]) -> float:
    """How many holds stand, by what was made and what ended."""
    ends = counted.keys() - {"made", "refused"}
    return counted["made"] - sum(counted[end] for end in ends)


def test_both_engines_log_one_line_with_the_id_on_prefill(prefill: Engine, decode: Engine) -> None:
    before = outcomes(prefill)
    [ticket] = prefill.prefill(prompt(100, seed=70))
    [completion] = decode.generate(prompt(100, seed=70), params=ticket)
    name = ticket["remote_request_id"]
    eventually(lambda: bool(lines(prefill, f"request {name}: 100 tokens")))
    [line] = lines(prefill, f"request {name}: ")
    assert re.search(r", [0-9]+ blocks, read by \S+ after [0-9.]+ s$", line), line
    [line] = lines(decode, f"request {name} ")
    engine = re.escape(ticket["remote_engine_id"])
    assert re.search(
        rf"request {name} \(here {completion.id}\S*\): loaded 100 tokens, [0-9.]+ MiB, from "
        rf"{engine}: waited [0-9.]+ ms, read in [0-9.]+ ms$",
        line,
    ), line
    eventually(lambda: outcomes(prefill)["read"] > before["read"])
    after = outcomes(prefill)
    assert (after["made"], after["read"]) == (before["made"] + 1, before["read"] + 1)
    eventually(lambda: standing(outcomes(prefill)) == prefill.run(ranks.holds)[0])


def test_a_load_that_failed_is_a_warning_with_both_ids(prefill: Engine, decode: Engine) -> None:
    """And nothing else, on decode; prefill's line has the same id."""
    [ticket] = prefill.prefill(prompt(100, seed=71))
    [completion] = decode.generate(
        prompt(100, seed=71), params=ticket | {"remote_block_ids": [[500, 501, 502, 503]]}
    )
    assert completion.finish_reason == "error"
    [line] = lines(decode, ticket["remote_request_id"])
    assert "WARNING" in line
    assert completion.id in line


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    with collecting() as collector:
        yield collector


def test_spans_are_in_the_trace_of_the_client(
    collector: Collector, start_engine: StartEngine
) -> None:
    """Those of both engines, and beside vLLM's own."""
    options = {"otlp_traces_endpoint": collector.address, "environment": ENVIRONMENT}
    prefill = start_engine("traced-prefill", "kv_producer", **options)
    decode = start_engine("traced-decode", "kv_consumer", **options)
    trace, client = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace}-{client}-01"}
    began = time.time()
    [ticket] = prefill.prefill(prompt(100, seed=72), trace_headers=headers)
    decode.generate(prompt(100, seed=72), params=ticket, trace_headers=headers)
    [untraced] = prefill.prefill(prompt(100, seed=73))
    decode.generate(prompt(100, seed=73), params=untraced)
    eventually(lambda: len(collector.named("llm_request")) >= 4)
    eventually(lambda: bool(collector.named("kvferry.load") and collector.named("kvferry.hold")))
    ended = time.time()
    [load], [hold] = collector.named("kvferry.load"), collector.named("kvferry.hold")
    ours = [span for span in collector.spans if span.name.startswith("kvferry.")]
    assert {span.trace for span in ours} == {trace}
    others = [span.id for span in collector.spans if span not in ours]
    assert len({span.id for span in ours} - {*others}) == len(ours), "vLLM seeds every engine alike"
    assert load.parent == hold.parent == client
    theirs = [span for span in collector.named("llm_request") if span.trace == trace]
    assert [span.parent for span in theirs] == [client, client]
    assert all(began <= span.start <= span.end <= ended for span in ours)
    _check_stages(load, [span for span in ours if span not in (load, hold)])
    name = ticket["remote_request_id"]
    assert load.attributes["kvferry.prefill_request"] == hold.attributes["kvferry.request"] == name
    assert load.attributes["kvferry.tokens"] == hold.attributes["kvferry.tokens"] == 100
    assert load.attributes["kvferry.bytes"] > 0
    assert hold.attributes["kvferry.outcome"] == "read"
    assert hold.start <= load.start, "prefill holds what decode loads"
    assert not lines(decode, "loaded 100 tokens"), "not asked for"
    collector.spans.clear()
    [ticket] = prefill.prefill(prompt(100, seed=74))
    broken = ticket | {"remote_block_ids": [[500, 501, 502, 503]]}
    decode.generate(prompt(100, seed=74), params=broken, trace_headers=headers)
    eventually(lambda: bool(collector.named("kvferry.load")))
    [failed] = collector.named("kvferry.load")
    assert (failed.parent, failed.has_failed) == (client, True)


def _check_stages(load: Span, stages: list[Span]) -> None:
    """The stages of a load follow one another, and fill the load."""
    assert {span.parent for span in stages} == {load.id}
    assert {span.name for span in stages} <= {f"kvferry.{stage}" for stage in Stage}
    in_order = sorted(stages, key=lambda span: span.start)
    assert [span.name for span in in_order] == [
        f"kvferry.{stage}" for stage in Stage if f"kvferry.{stage}" in {s.name for s in stages}
    ]
    for before, after in itertools.pairwise(in_order):
        assert after.start == pytest.approx(before.end, abs=1e-5)
    total = sum(span.seconds for span in stages)
    assert total == pytest.approx(load.seconds, abs=0.05)
    assert {"kvferry.transfer", "kvferry.fence"} <= {span.name for span in stages}
