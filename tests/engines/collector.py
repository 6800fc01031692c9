"""A collector of OpenTelemetry spans, as an operator has one: OTLP over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.waiting import eventually

ENVIRONMENT = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "100",
}
"""What engines need to send their spans to a `Collector`, and to send them soon."""


class Collector:
    """The spans that were received so far: OpenTelemetry's messages."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.address = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        self.spans: list[Any] = []

    def named(self, name: str) -> list[Any]:
        return [span for span in list(self.spans) if span.name == name]

    def wait(self, name: str) -> Any:
        """Wait for the only span of a name."""
        eventually(lambda: bool(self.named(name)))
        [found] = self.named(name)
        return found


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


def _spans(body: bytes) -> list[Any]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    resources = ExportTraceServiceRequest.FromString(body).resource_spans
    return [span for each in resources for scope in each.scope_spans for span in scope.spans]


def attributes(span: Any) -> dict[str, Any]:
    """Return the attributes of a span by name."""
    values = {each.key: each.value for each in span.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}
