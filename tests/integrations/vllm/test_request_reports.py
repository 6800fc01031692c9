"""Whether requests have lines in the log, and spans; their texts are tested with both roles."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.integrations.vllm.request_reports import is_followed
from kvferry.integrations.vllm.tracing import is_traced


def test_ranks_report_each_request_where_it_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    for level, follows in ((logging.INFO, False), (logging.DEBUG, True)):
        caplog.set_level(level, "kvferry.requests")
        assert is_followed(log=False) is follows
    assert is_followed(log=True)


@pytest.mark.parametrize(("endpoint", "traced"), [(None, False), ("http://127.0.0.1:4317", True)])
def test_an_engine_is_traced_where_vllm_exports_spans(endpoint: str | None, traced: bool) -> None:
    config: Any = SimpleNamespace(
        observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint)
    )
    assert is_traced(config) is traced
