"""Handshakes of a ``Directory``: they run concurrently, and are delayed after failures."""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import pytest

from kvferry.core.directory import Directory, EncodedReply, directory
from kvferry.core.errors import HandshakeError, KVFerryError
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.options import EndpointOptions
from kvferry.core.side_channel import tasks
from tests.core.endpoint.engines import eventually
from tests.core.messages import ticket
from tests.core.resource_limits import no_threads

LONG = 20.0
BAD = HandshakeError("nobody there")


class Handshakes:
    """A ``Directory`` whose handshakes end when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: float) -> None:
        self.now = 0.0
        self.begun = queue.SimpleQueue[str]()
        self._futures: dict[str, asyncio.Future[EncodedReply]] = {}
        given = EndpointOptions(liveness_interval=0.0, **options)  # type: ignore[arg-type]
        self.directory = Directory(given, lambda: self.now)
        monkeypatch.setattr(directory, "fetched", self._fetched)

    def ask(self, *names: str, incarnation: int = 1) -> None:
        for name in names:
            self.directory.ask(ticket(engine=name, incarnation=incarnation))

    def begins(self) -> str:
        """Wait until a further handshake begins; return with whom."""
        return self.begun.get(timeout=LONG)

    def end(self, name: str, outcome: Exception | None = None, incarnation: int = 1) -> None:
        """End a handshake that has begun, and wait until it is over."""
        future = self._futures[name]
        key = PeerKey.of(ticket(engine=name))
        reply = EncodedReply(address=key, incarnation=Incarnation(incarnation), ranks=(b"a",))
        end: Any = future.set_result if outcome is None else future.set_exception
        future.get_loop().call_soon_threadsafe(end, outcome or reply)
        self.over()

    def over(self) -> EncodedReply | KVFerryError:
        """Wait until a handshake is over; return its outcome."""
        outcomes: list[EncodedReply | KVFerryError] = []

        def is_over() -> bool:
            outcomes.extend(outcome for _, outcome in self.directory.take().outcomes)
            return bool(outcomes)

        eventually(is_over, "a handshake is over")
        return outcomes[0]

    async def _fetched(self, key: PeerKey, *_: object) -> EncodedReply:
        future: asyncio.Future[EncodedReply] = asyncio.get_running_loop().create_future()
        self._futures[key.engine] = future
        self.begun.put(key.engine)
        return await future


@pytest.fixture
def handshakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handshakes]:
    monkeypatch.setattr(directory, "MAX_HANDSHAKES", 2)
    made = Handshakes(monkeypatch)
    with closing(made.directory):
        yield made


def test_handshakes_run_concurrently_up_to_a_limit_in_the_order_asked(
    handshakes: Handshakes,
) -> None:
    handshakes.ask(*"abcd", *"abcd")
    assert [handshakes.begins() for _ in range(2)] == ["a", "b"]
    for ended, begun in ("b", "c"), ("a", "d"):
        assert handshakes.begun.empty()
        handshakes.end(ended)
        assert handshakes.begins() == begun
    handshakes.directory.close()
    handshakes.ask("e")
    assert handshakes.begins() == "e", "those that were under way have ended"


@pytest.mark.parametrize("failures", [1, 2, 5, 20])
def test_the_wait_after_failures_grows(
    handshakes: Handshakes, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    for _ in range(failures):
        handshakes.ask("a")
        handshakes.end(handshakes.begins(), BAD)
        handshakes.now += 100.0
    handshakes.now -= 100.0
    handshakes.ask("a", "another")
    for _ in range(2):
        handshakes.begins()
    assert pauses[-2] == pytest.approx(min(0.1 * 2 ** (failures - 1), 5.0))
    assert pauses[-1] <= 0.0
    handshakes.end("a")
    handshakes.ask("a", incarnation=2)
    handshakes.begins()
    assert pauses[-1] <= 0.0


def test_a_handshake_that_cannot_start_or_begin_in_time_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directory, "MAX_HANDSHAKES", 0)
    monkeypatch.setattr(directory, "LONGEST_BACKOFF_SECONDS", 0.0)
    handshakes = Handshakes(monkeypatch, handshake_timeout=0.01)
    handshakes.ask("a")
    assert "was not asked within 0.01 s" in str(handshakes.over())
    monkeypatch.setattr(tasks, "_loops", {})
    with no_threads("kvferry-side-channels"):
        handshakes.ask("a")
    assert "can't start new thread" in str(handshakes.over())


@pytest.mark.parametrize(("incarnation", "is_used"), [(16, False), (17, True), (32, True)])
def test_one_handshake_is_for_the_newest_incarnations_that_tickets_name(
    handshakes: Handshakes, incarnation: int, is_used: bool
) -> None:
    for each in (*range(1, 33), 32):
        handshakes.ask("a", incarnation=each)
    handshakes.end(handshakes.begins(), incarnation=incarnation)
    assert handshakes.begun.empty()
    handshakes.ask("a", incarnation=incarnation)
    assert handshakes.directory.pending is not is_used


def test_any_error_is_reported_without_a_reference_to_decoded_data(
    handshakes: Handshakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    references: list[weakref.ref[Mock]] = []

    async def fail(key: PeerKey, *_: object) -> EncodedReply:
        decoded = Mock()
        references.append(weakref.ref(decoded))
        try:
            raise KeyError(key.engine)
        except KeyError as exc:
            raise ZeroDivisionError from exc

    monkeypatch.setattr(directory, "fetched", fail)
    handshakes.ask("a")
    error = handshakes.over()
    assert isinstance(error, HandshakeError)
    assert "ZeroDivisionError" in str(error)
    assert references[0]() is None
