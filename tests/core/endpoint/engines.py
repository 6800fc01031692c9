"""The engine without a model as tests use it, with a clock and a transport that they watch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import pytest

from kvferry.core.endpoint import Endpoint, Results
from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.holds import Incarnation, RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.messages import Note, decode_notes
from kvferry.core.metrics import FIGURES, Data, Metric, flat, merge
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport import Notification, PeerId
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing.engines import SMALL, ModelFreeEngine
from tests.waiting import eventually as eventually

LAYERS, HEADS, DIM, PAGES = SMALL.layers, SMALL.model_heads, SMALL.dim, SMALL.pages
TOKENS = 4
"""Tokens of the requests of ``pull`` and ``load``."""
N = TypeVar("N", bound=Note)


class Engine(ModelFreeEngine):
    """An engine without a model, with a few words for what tests do often."""

    @property
    def endpoint(self) -> Endpoint:
        """That of the first rank."""
        return self.ranks[0].endpoint

    def side_channel(self, name: str = "", **how: Any) -> HandshakeServer:
        """Serve what the ranks publish once more, maybe as another engine, see ``in_name_of``."""
        who: dict[str, Any] = {"engine": self.name, "incarnation": self.incarnation}
        if name:
            who = {"engine": name, "incarnation": self.incarnation ^ 1}
        payloads = [msgspec.structs.replace(rank.endpoint.payload, **who) for rank in self.ranks]
        return HandshakeServer([*map(encode, payloads)], **who, **how)

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
        self.pull(request, ticket, pages, **how)
        return self.error(request)

    def error(self, request: str) -> KVFerryError | None:
        return self.outcome(request).failed.get(RequestId(request))


def in_name_of(name: str, ticket: Ticket, server: HandshakeServer) -> Ticket:
    """Return a ticket of an engine as if another, whose ``side_channel`` this is, had made it."""
    incarnation = Incarnation(ticket.incarnation ^ 1)
    return replace(ticket, engine=name, incarnation=incarnation, port=server.port)


# Loads by number: request ``d-N`` reads page N of request ``p-N`` into its own page N.


def pull(producer: Engine, decode: Engine, *numbers: int) -> None:
    for number in numbers:
        decode.pull(f"d-{number}", producer.serve(f"p-{number}", [number], TOKENS), [number])


def outcomes(decode: Engine, *numbers: int) -> list[KVFerryError | None]:
    """Wait until these loads are reported; return the error of each, if any."""
    return [decode.error(f"d-{number}") for number in numbers]


def load(producer: Engine, decode: Engine, number: int) -> KVFerryError | None:
    pull(producer, decode, number)
    return decode.error(f"d-{number}")


class MetricTotals:
    """Sums of the metrics of all ranks of an engine, from when they were begun."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._data: Data = {}

    def all(self) -> Data:
        for rank in self._engine.ranks:
            by_name = {metric.name: metric for metric in FIGURES}
            merge(by_name, self._data, rank.endpoint.take_figures() or {})
        return self._data

    def of(self, metric: Metric) -> dict[tuple[str, ...], Any]:
        """Return the values of a metric by its labels, without the driver's name."""
        found = dict(flat(metric, self.all()))
        assert all(labels[0] == "loopback" for labels in found)
        return {labels[1:]: value for labels, value in found.items()}

    def total(self, metric: Metric) -> float:
        return float(sum(self.of(metric).values()))


class Clock:
    """The real clock, which tests can move forward."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead

    def skip(self, seconds: float) -> None:
        self._ahead += seconds


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
        arrived = (note for each in self.received for note in decode_notes(each.payload))
        return [note for note in arrived if isinstance(note, kind)]

    @property
    def open_connections(self) -> int:
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


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str) -> None:
    """Let the next call of a method raise, also of one that was looked up meanwhile."""
    real: Callable[..., None] = getattr(owner, method)
    has_failed = False

    def fails(*args: object) -> None:
        nonlocal has_failed
        if has_failed:
            return real(*args)
        has_failed = True
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(owner, method, fails)
