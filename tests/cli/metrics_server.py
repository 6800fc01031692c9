"""An HTTP server that answers one request after the other with pages of metrics."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

RECORDED = Path(__file__).parent / "top_pages"


def recorded(engine: str, number: int) -> bytes:
    """Return a page that a real engine, ``prefill`` or ``decode``, once had.

    Page 1 (of decode) follows 12 hand-overs. Before page 2 (of prefill), three requests were
    prefilled, and one of their tickets was used for another prompt. Before page 3, the leases of
    all three ended, one was read too late, and 3 more were handed over.
    """
    return (RECORDED / f"{engine}-{number}.txt").read_bytes()


class MetricsServer:
    """Answers on a free port with pages or HTTP statuses, and repeats the last one.

    After ``None`` it keeps the connection open, without an answer. Closing it twice is fine.
    """

    def __init__(self, *answers: bytes | int | None, port: int = 0) -> None:
        self.answers: Sequence[bytes | int | None] = answers
        self.requests = 0
        self._closed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.port = self._server.server_port
        self.address = f"127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def next_answer(self) -> bytes | int | None:
        """Return what the next request is answered with."""
        self.requests += 1
        return self.answers[min(self.requests, len(self.answers)) - 1]

    def close(self) -> None:
        """Stop answering: later connections are refused."""
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = server.next_answer()
                if answer is None:
                    server._closed.wait()
                    return
                status, page = (answer, b"") if isinstance(answer, int) else (200, answer)
                self.send_response(status)
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        return Handler
