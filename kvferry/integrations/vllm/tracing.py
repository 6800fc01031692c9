"""OpenTelemetry spans of loads and holds, in the traces of vLLM's requests.

Only an engine whose ``--otlp-traces-endpoint`` is set makes spans. They go where vLLM's own spans
go: vLLM installs the tracer provider, and passes on the ``traceparent`` of a client's request.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from kvferry.core.metrics import LoadRecord, Stage

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "kvferry."
"""The prefix of the names of spans and of their attributes."""

Headers = Mapping[str, str] | None
"""The trace headers of a request, such as ``traceparent``; ``None`` if it has none."""


def is_traced(vllm_config: VllmConfig) -> bool:
    """Return whether an engine exports spans."""
    return vllm_config.observability_config.otlp_traces_endpoint is not None


class RequestSpans:
    """Make spans of requests with headers, by OpenTelemetry; attributes are without ``PREFIX``."""

    def __init__(self) -> None:
        from opentelemetry import trace

        self._trace = trace
        self._tracer = cast("Any", trace.get_tracer("kvferry"))
        # OpenTelemetry draws ids from ``random``, which vLLM seeds alike in every engine: the spans
        # of two engines in one trace would have the same ids.
        self._tracer.id_generator = _SystemIds()

    def loaded(self, headers: Headers, record: LoadRecord, **attributes: str | int) -> None:
        """Make the span ``kvferry.load``, from the wait for pages on; a child per stage."""
        if not headers:
            return
        stages = {Stage.HANDSHAKE: record.handshake_seconds} | record.stages
        at = record.ended - record.seconds - record.wait_seconds
        load = self._begin("load", _parent(headers), at, attributes)
        parent = self._trace.set_span_in_context(load)
        for stage in Stage:
            if seconds := stages.get(stage):
                self._begin(stage.value, parent, at, {}).end(_nanoseconds(at + seconds))
                at += seconds
        load.end(_nanoseconds(max(at, record.ended)))

    def failed(self, headers: Headers, begun: float, **attributes: str | int) -> None:
        """Make the span ``kvferry.load`` of a load that failed; ``begun`` in epoch seconds."""
        if headers:
            load = self._begin("load", _parent(headers), begun, attributes)
            load.set_status(self._trace.StatusCode.ERROR)
            load.end()

    def held(self, headers: Headers, seconds: float, **attributes: str | int) -> None:
        """Make the span ``kvferry.hold`` of a hold that has just ended, after some seconds."""
        if headers:
            now = time.time()
            hold = self._begin("hold", _parent(headers), now - seconds, attributes)
            hold.end(_nanoseconds(now))

    def _begin(
        self,
        name: str,
        parent: Any,  # noqa: ANN401
        start: float,
        attributes: Mapping[str, str | int],
    ) -> Any:  # noqa: ANN401
        """Begin a span in the context of its parent, at a time in seconds since the epoch."""
        return self._tracer.start_span(
            PREFIX + name,
            context=parent,
            start_time=_nanoseconds(start),
            attributes={PREFIX + key: value for key, value in attributes.items()},
        )


def _parent(headers: Mapping[str, str]) -> Any:  # noqa: ANN401 - no OpenTelemetry in mypy
    """Return the context that a request's trace headers describe."""
    from vllm.tracing import extract_trace_context

    return extract_trace_context(headers)


class _SystemIds:
    """Draw the ids of spans and traces from the system, as an ``IdGenerator`` of OpenTelemetry."""

    def generate_span_id(self) -> int:
        """Return the id of a new span."""
        return 1 + secrets.randbelow((1 << 64) - 1)

    def generate_trace_id(self) -> int:
        """Return the id of a new trace."""
        return 1 + secrets.randbelow((1 << 128) - 1)

    def is_trace_id_random(self) -> bool:
        """Return ``True``: all bits of a trace's id are random."""
        return True


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
