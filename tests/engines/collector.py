"""A collector of OpenTelemetry spans, as an operator has one: OTLP over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENVIRONMENT = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "100",
}
"""What engines need to send their spans to a `Collector`, and to send them soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span as it was received; ids in hexadecimal, times in seconds."""

    name: str
    trace: str
    id: str
    parent: str
    start: float
    end: float
    attributes: dict[str, Any]
    has_failed: bool = False


class Collector:
    """What was received so far."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.address = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        self.spans: list[Span] = []

    def named(self, name: str) -> list[Span]:
        return [span for span in list(self.spans) if span.name == name]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Receive spans on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.spans.extend(_spans(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            """Stay silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(server)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _spans(body: bytes) -> Iterator[Span]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    start=span.start_time_unix_nano / 1e9,
                    end=span.end_time_unix_nano / 1e9,
                    has_failed=span.status.code == span.status.STATUS_CODE_ERROR,
                    attributes={each.key: _value(each.value) for each in span.attributes},
                )


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))
