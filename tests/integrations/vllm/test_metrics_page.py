"""`docs/metrics.md` says of every metric what the code does, and of nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvferry.core.errors import Cause, TicketReason
from kvferry.core.metrics import (
    MAX_OBSERVED,
    MAX_PEERS,
    OTHER,
    UNREACHED,
    MetricKind,
    Metrics,
    Stage,
)
from kvferry.integrations.vllm.scheduler_metrics import HOLD_OUTCOMES, NoTicket
from kvferry.integrations.vllm.scheduler_metrics import METRICS as DEFINED
from kvferry.integrations.vllm.tracing import PREFIX

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


def tables() -> list[list[list[str]]]:
    """The cells of every table, without its head."""
    found = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
        for table in found
    ]


METRICS, OUTCOMES, STAGES, CAUSES, REASONS, NOT_MADE, SPANS, *_ = tables()


def test_every_metric_is_there_as_the_code_has_it() -> None:
    wanted = [
        [
            f"`vllm:kvferry_{figure.name}{'_total' if figure.kind is MetricKind.COUNTER else ''}`",
            figure.kind.value,
            ", ".join(figure.labels),
            figure.text,
        ]
        for figure in DEFINED
    ]
    assert [row[:4] for row in METRICS] == wanted
    assert all(row[4] for row in METRICS)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (OUTCOMES, HOLD_OUTCOMES),
        (STAGES, Stage),
        (CAUSES, Cause),
        (REASONS, TicketReason),
        (NOT_MADE, NoTicket),
    ],
)
def test_every_word_is_explained(table: list[list[str]], words: Iterable[str]) -> None:
    assert [row[0] for row in table] == [str(word) for word in words]
    assert all(all(row) for row in table)


def test_every_span_is_named() -> None:
    stages = ", ".join(f"`{PREFIX}{stage}`" for stage in Stage)
    assert [row[0] for row in SPANS] == [f"`{PREFIX}load`", stages, f"`{PREFIX}hold`"]
    assert all(all(row) for row in SPANS)


def test_numbers_and_names_are_those_of_the_code() -> None:
    assert f"told apart: {MAX_PEERS}; the others are `{OTHER}`" in PAGE
    assert f"never connected is `{UNREACHED}`" in PAGE
    assert f"stops growing at {MAX_OBSERVED}" in PAGE


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    counting = Metrics(driver="loopback", rank="0")
    counting.count_stage(Stage.HANDSHAKE, 0.5, "prefill")
    counting.take_figures = counting.take  # type: ignore[attr-defined]
    exec(example, {"endpoints": [counting]})
    assert "stage_seconds {'driver': 'loopback', 'stage': 'handshake'} [0.5]" in (
        capsys.readouterr().out.splitlines()
    )
