"""The engine without a model as tests use it, with a clock and a transport that they watch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kvferry.core.endpoint import Endpoint, EndpointOptions, HandshakeRelay, Results
from kvferry.core.errors import EndpointClosedError, KVFerryError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.messages import Note, decode_notes
from kvferry.core.transport import Notification, PeerId
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing.engines import (
    PATIENCE_SECONDS,
    SMALL,
    CacheShape,
    EngineRank,
    ModelFreeEngine,
)

LAYERS, HEADS, DIM, PAGES = SMALL.layers, SMALL.model_heads, SMALL.dim, SMALL.pages
N = TypeVar("N", bound=Note)


class Steps:
    """Relays handshakes to all ranks of an engine, as its scheduler half does in its steps."""

    def __init__(
        self, ranks: list[EngineRank], options: EndpointOptions, clock: Callable[[], float]
    ) -> None:
        self._ranks = ranks
        self._relay = HandshakeRelay(options, clock)
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self.may_step = threading.Event()
        self.may_step.set()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def begin(self, request: str, ticket: Ticket) -> None:
        """A request came with a ticket; its load is started when this method has returned."""
        with self._lock:
            self._relay.begin(request, ticket)
            self._step()

    def end(self, request: str) -> None:
        """A request's load is over."""
        with self._lock:
            self._relay.end(request)

    def close(self) -> None:
        """Make no more steps."""
        self._is_over.set()
        self.may_step.set()
        self._thread.join()
        self._relay.close()

    def _run(self) -> None:
        while not self._is_over.wait(0.002):
            self.may_step.wait()
            with self._lock:
                self._step()

    def _step(self) -> None:
        news = self._relay.take()
        for rank in self._ranks:
            with contextlib.suppress(EndpointClosedError):
                rank.endpoint.relay(news)


class Engine(ModelFreeEngine):
    """An engine without a model whose ranks may leave the handshakes to its scheduler half.

    With ``relays``, they do (``HandshakeRelay``); ``how`` is that of ``ModelFreeEngine``.
    """

    def __init__(
        self, name: str, shape: CacheShape = SMALL, *, relays: bool = False, **how: Any
    ) -> None:
        super().__init__(name, shape, **how)
        self.steps: Steps | None = None
        if relays:
            self.steps = Steps(self.ranks, self.options, how.get("clock", time.monotonic))

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint of the first rank."""
        return self.ranks[0].endpoint

    def close(self) -> None:
        if self.steps is not None:
            self.steps.close()
        super().close()

    def serve_later(self, request: str, pages: list[int], tokens: int = 4) -> Ticket:
        """Serve a request whose pages can be read after the next ``step``."""
        self.compute(request, pages, tokens)
        return self.finish(request, pages, tokens, computed=False, order=False)

    def reset(self, request: str) -> None:
        """End all holds, and wait until the pages of a request are free."""
        self.scheduler_holds.reset()
        self.step()
        self.released(request)

    def load(
        self, request: str, ticket: Ticket, pages: list[int], **how: Any
    ) -> KVFerryError | None:
        """Load a request; return its error, if any."""
        self.pull(request, ticket, pages, **how)
        return self.error(request)

    def error(self, request: str) -> KVFerryError | None:
        """Wait until a load is over; return its error, if any."""
        return self.outcome(request).failed.get(RequestId(request))

    def pull(self, request: str, ticket: Ticket, pages: list[int], **how: Any) -> None:
        if self.steps is not None:
            self.steps.begin(request, ticket)
        super().pull(request, ticket, pages, **how)

    def prepare(self, ticket: Ticket) -> None:
        if self.steps is not None:
            self.steps.begin(ticket.request, ticket)
        super().prepare(ticket)

    def outcome(self, request: str, seconds: float = PATIENCE_SECONDS) -> Results:
        results = super().outcome(request, seconds)
        if self.steps is not None:
            self.steps.end(request)
        return results


class Clock:
    """The real clock, which tests can move forward."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead

    def skip(self, seconds: float) -> None:
        """Move the clock forward."""
        self._ahead += seconds


def eventually(holds: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Wait until ``holds()`` is true; fail with ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.002)


class RecordingTransport(LoopbackTransport):
    """A transport that records notifications, connections and disconnections."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[Notification] = []
        self.connected: set[PeerId] = set()
        self.disconnected: set[PeerId] = set()

    def notifications(self) -> list[Notification]:
        arrived = super().notifications()
        self.received += arrived
        return arrived

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        self.connected.add(peer)
        return peer

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        self.disconnected.add(peer)

    def notes(self, kind: type[N]) -> list[N]:
        """Return all notes of a kind that have arrived, in their order."""
        arrived = (note for each in self.received for note in decode_notes(each.payload))
        return [note for note in arrived if isinstance(note, kind)]

    @property
    def open_connections(self) -> int:
        """Return how many connections are open."""
        return len(self.connected - self.disconnected)


def until(endpoint: Endpoint, holds: Callable[[Results], bool], seconds: float = 20.0) -> Results:
    """Return the first results for which ``holds`` is true; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        endpoint.wait(0.05)
        results = endpoint.results()
        if holds(results):
            return results
    raise AssertionError("the endpoint never reported what was waited for")
