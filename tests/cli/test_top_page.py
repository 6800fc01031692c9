"""Pages of metrics: those of Prometheus's own client are read exactly, others are refused."""

from __future__ import annotations

import contextlib

import prometheus_client as client
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.top.page import (
    MAX_BYTES,
    MAX_SAMPLES,
    MAX_VALUE,
    MetricsPageError,
    parse,
    printable,
)
from tests.cli.metrics_server import recorded

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SERIES = st.dictionaries(st.tuples(TEXT, TEXT), st.floats(), min_size=1, max_size=8)
RUNNING = 'vllm:num_requests_running{engine="0"} 1.0\n'


@given(SERIES)
def test_page_of_prometheus_client_is_read_exactly(series: dict[tuple[str, str], float]) -> None:
    registry = client.CollectorRegistry()
    gauge = client.Gauge(
        "vllm:kvferry_held_pages", "Held\npages \\", ["peer", "engine"], registry=registry
    )
    ignored = client.Counter("other", 'Has "quotes"', ["peer"], registry=registry)
    for (peer, engine), value in series.items():
        gauge.labels(peer=peer, engine=engine).set(value)
        ignored.labels(peer=peer).inc()
    running = client.Gauge("vllm:num_requests_running", "Running", registry=registry)
    running.set(3)
    expected = {
        (("engine", engine), ("peer", peer)): value
        for (peer, engine), value in series.items()
        if abs(value) <= MAX_VALUE
    }
    found = parse(client.generate_latest(registry))
    assert found.pop("vllm:num_requests_running") == {(): 3.0}
    assert found == ({"vllm:kvferry_held_pages": expected} if expected else {})


@given(st.binary(max_size=200), st.integers(0, 2000))
def test_damaged_page_is_read_or_refused(damage: bytes, position: int) -> None:
    page = recorded("decode", 3)
    with contextlib.suppress(MetricsPageError):
        parse(page[:position] + damage + page[position:])


@pytest.mark.parametrize(
    "line",
    [
        "vllm:kvferry_loads_total",
        "vllm:kvferry_loads_total one",
        "vllm:kvferry_loads_total 1_000",
        'vllm:kvferry_loads_total{engine="0" 1',
        "vllm:kvferry_loads_total{engine=0} 1",
        'vllm:kvferry_loads_total{engine="0",engine="1"} 1',
        'vllm:kvferry_loads_total{engine="0"peer="1"} 1',
        'vllm:kvferry_loads_total{engine="0"} 1 now',
        "vllm:kvferry_loads_total{} 1 \x1b[2J",
    ],
)
def test_malformed_line_is_named(line: str) -> None:
    with pytest.raises(
        MetricsPageError, match="line 2 is malformed: vllm:kvferry_loads"
    ) as refused:
        parse(f"{RUNNING}{line}\n".encode())
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (b"", "no metric of vLLM"),
        (b"<html>vllm:</html>", "no metric of vLLM"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b"#" * (MAX_BYTES + 1), "more than 8,388,608 bytes"),
    ],
)
def test_other_pages_are_refused(page: bytes, reason: str) -> None:
    with pytest.raises(MetricsPageError, match=reason):
        parse(page)


def test_number_of_values_is_bounded() -> None:
    page = "".join(f'vllm:kvferry_loads_total{{p="{n}"}} 1\n' for n in range(MAX_SAMPLES + 1))
    with pytest.raises(MetricsPageError, match="more than 50,000 values"):
        parse(page.encode())


def test_spaces_do_not_take_time() -> None:
    """A match that tries every way to share them between two parts would take hours."""
    with pytest.raises(MetricsPageError, match="line 1 is malformed"):
        parse(b"vllm:kvferry_a" + b" " * 1_000_000 + b"x")


def test_lines_of_other_metrics_are_skipped_unread() -> None:
    page = f'{RUNNING}vllm:kvferry_load_seconds_bucket{{le="?\nother{{ not a metric\n\n# what\n'
    assert list(parse(page.encode())) == ["vllm:num_requests_running"]


def test_printable_text_is_cut_and_has_no_control_characters() -> None:
    assert printable("a\x1b[31m\n\u202eb") == "a?[31m??b"
    assert printable("abcdef", 4) == "abc…"
