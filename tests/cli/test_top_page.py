"""Pages of metrics are read, or refused with the reason."""

from __future__ import annotations

import contextlib

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

RUNNING = 'vllm:num_requests_running{engine="0"} 1.0\n'


def test_values_that_are_no_number_are_left_out() -> None:
    values = {"a": "12", "b": "NaN", "c": "+Inf", "d": str(2 * MAX_VALUE), "e\\n": "-1e3"}
    lines = (f'vllm:kvferry_held_pages{{peer="{peer}"}} {n}\n' for peer, n in values.items())
    found = parse("".join(lines).encode())["vllm:kvferry_held_pages"]
    assert found == {(("peer", "a"),): 12.0, (("peer", "e\n"),): -1000.0}


@given(st.binary(max_size=200), st.integers(0, 2000))
def test_damaged_page_is_read_or_refused(damage: bytes, position: int) -> None:
    page = recorded("decode", 3)
    with contextlib.suppress(MetricsPageError):
        parse(page[:position] + damage + page[position:])


@pytest.mark.parametrize(
    "line",
    [
        "vllm:kvferry_loads_total",
        'vllm:kvferry_loads_total{engine="0" 1',
        'vllm:kvferry_loads_total{engine="0",engine="1"} 1',
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


@pytest.mark.parametrize("part", [" ", 'a="b",'])
def test_long_lines_do_not_take_time(part: str) -> None:
    """A parser that tries every way to read them would take minutes."""
    with pytest.raises(MetricsPageError, match="line 1 is malformed"):
        parse(f"vllm:kvferry_a{{{part * 200_000}}} x".encode())


def test_lines_of_other_metrics_are_skipped_unread() -> None:
    page = f'{RUNNING}vllm:kvferry_load_seconds_bucket{{le="?\nother{{ not a metric\n\n# what\n'
    assert list(parse(page.encode())) == ["vllm:num_requests_running"]


def test_printable_text_is_cut_and_has_no_control_characters() -> None:
    assert printable("a\x1b[31m\n\u202eb") == "a?[31m??b"
    assert printable("abcdef", 4) == "abc…"
