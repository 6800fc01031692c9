"""``HandshakeQueue``: handshakes run concurrently, and are delayed after failures."""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from kvferry.core.directory import EncodedReply
from kvferry.core.directory import handshake_queue as module
from kvferry.core.directory.handshake_queue import MAX_TICKETS, Asking, HandshakeQueue
from kvferry.core.errors import HandshakeError, KVFerryError
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.ticket import PeerKey
from tests.core.resource_limits import no_threads

GOOD = EncodedReply(address=PeerKey("a", "host", 1), incarnation=Incarnation(1), ranks=(b"a",))
BAD = HandshakeError("nobody there")
LONG = 20.0


class Handshakes:
    """A ``HandshakeQueue`` whose handshakes end when the test says so."""

    def __init__(self, patience: float = LONG) -> None:
        self.now = 0.0
        self.begun = queue.SimpleQueue[str]()
        self.asked_for: list[int] = []
        self.futures: dict[str, asyncio.Future[EncodedReply]] = {}
        self._over: list[EncodedReply | KVFerryError] = []
        self._posted = queue.SimpleQueue[Callable[[], None]]()
        self.queue = HandshakeQueue(
            self._shake, self._on_over, self._posted.put, lambda: self.now, patience
        )

    def ask(self, *names: str) -> None:
        for name in names:
            self.queue.ask(PeerKey(name, "host", 1))

    def begins(self) -> str:
        """Wait until a further handshake begins; return with whom."""
        return self.begun.get(timeout=LONG)

    def end(self, name: str, outcome: EncodedReply | Exception = GOOD) -> None:
        """End a handshake that has begun, and wait until it is over."""
        future = self.futures[name]
        how: Any = future.set_exception if isinstance(outcome, Exception) else future.set_result
        future.get_loop().call_soon_threadsafe(how, outcome)
        self.over()

    def over(self) -> EncodedReply | KVFerryError:
        """Wait until a handshake is over; return its outcome."""
        self._posted.get(timeout=LONG)()
        return self._over.pop()

    async def _shake(self, key: PeerKey) -> EncodedReply:
        future: asyncio.Future[EncodedReply] = asyncio.get_running_loop().create_future()
        self.futures[key.engine] = future
        self.begun.put(key.engine)
        return await future

    def _on_over(self, asking: Asking, result: EncodedReply | KVFerryError) -> None:
        self._over.append(result)
        self.asked_for = list(asking.incarnations)


@pytest.fixture
def handshakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handshakes]:
    monkeypatch.setattr(module, "MAX_HANDSHAKES", 2)
    made = Handshakes()
    with closing(made.queue):
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
    handshakes.queue.close()
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
    handshakes.queue.succeeded(PeerKey("a", "host", 1))
    handshakes.ask("a")
    handshakes.begins()
    assert pauses[-1] <= 0.0


def test_a_handshake_that_cannot_start_or_begin_in_time_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_HANDSHAKES", 0)
    monkeypatch.setattr("kvferry.core.side_channel.tasks._loops", {})
    handshakes = Handshakes(patience=0.01)
    handshakes.ask("a")
    assert "was not asked within 0.01 s" in str(handshakes.over())
    monkeypatch.setattr("kvferry.core.side_channel.tasks._loops", {})
    with no_threads("kvferry-side-channels"):
        handshakes.ask("a")
    assert "can't start new thread" in str(handshakes.over())


def test_one_handshake_is_for_the_newest_incarnations_that_tickets_name(
    handshakes: Handshakes,
) -> None:
    for incarnation in (None, *range(2 * MAX_TICKETS), 2 * MAX_TICKETS - 1):
        handshakes.queue.ask(PeerKey("a", "host", 1), incarnation)
    handshakes.end(handshakes.begins())
    assert handshakes.begun.empty()
    assert handshakes.asked_for == list(range(MAX_TICKETS, 2 * MAX_TICKETS))


def test_any_error_is_reported_without_a_reference_to_decoded_data(
    handshakes: Handshakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Decoded:
        pass

    references: list[weakref.ref[Decoded]] = []

    async def perform(key: PeerKey) -> EncodedReply:
        decoded = Decoded()
        references.append(weakref.ref(decoded))
        try:
            raise KeyError(key.engine)
        except KeyError as exc:
            raise ZeroDivisionError from exc

    monkeypatch.setattr(handshakes.queue, "_shake", perform)
    handshakes.ask("a")
    error = handshakes.over()
    assert isinstance(error, HandshakeError)
    assert "ZeroDivisionError" in str(error)
    assert references[0]() is None
