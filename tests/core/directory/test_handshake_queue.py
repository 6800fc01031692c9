"""``HandshakeQueue``: handshakes run concurrently, and are delayed after failures."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from kvferry.core.directory import EncodedReply
from kvferry.core.directory import handshake_queue as module
from kvferry.core.directory.handshake_queue import (
    MAX_HANDSHAKES,
    MAX_TICKETS,
    Asking,
    HandshakeQueue,
)
from kvferry.core.errors import HandshakeError, KVFerryError
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.ticket import PeerKey

GOOD = EncodedReply(address=PeerKey("a", "host", 1), incarnation=Incarnation(1), ranks=(b"a",))
BAD = HandshakeError("nobody there")
SILENT = [f"silent-{number}" for number in range(5)]


class Handshakes:
    """A ``HandshakeQueue`` whose handshakes end when the test says so, in the order they began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.begun: list[str] = []
        self.reported: list[tuple[Asking, EncodedReply | KVFerryError]] = []
        self.cancel = Mock()
        self._ends: list[Callable[[EncodedReply | Exception], None]] = []
        monkeypatch.setattr(module, "start", self._start)
        self.queue = HandshakeQueue(
            lambda key: key.engine,  # type: ignore[arg-type, return-value]
            lambda *over: self.reported.append(over),
            lambda call: call(),
            lambda: self.now,
        )

    def ask(self, *names: str) -> None:
        for name in names:
            self.queue.ask(PeerKey(name, "host", 1))

    def end(self, outcome: EncodedReply | Exception = GOOD) -> None:
        """End the handshake that began first of those under way."""
        self._ends.pop(0)(outcome)

    def skip(self, seconds: float) -> None:
        self.now += seconds
        self.queue.progress(self.now)

    def fail(self, *names: str) -> None:
        """Let a handshake with each fail, one after the other, and the pauses pass."""
        for name in names:
            self.ask(name)
            self.skip(100.0)
            self.end(BAD)
        self.now += 100.0

    def _start(
        self, shake: Callable[[], str], over: Callable[[EncodedReply | Exception], None]
    ) -> Handshakes:
        self.begun.append(shake())
        self._ends.append(over)
        return self


@pytest.fixture
def handshakes(monkeypatch: pytest.MonkeyPatch) -> Handshakes:
    return Handshakes(monkeypatch)


def test_handshakes_run_concurrently_up_to_a_limit(handshakes: Handshakes) -> None:
    names = [f"engine-{number}" for number in range(MAX_HANDSHAKES + 2)]
    handshakes.ask(*names, *names)
    assert handshakes.begun == names[:MAX_HANDSHAKES]
    for _ in names:
        handshakes.end()
    assert [outcome for _, outcome in handshakes.reported] == [GOOD] * len(names)


def test_neither_failed_engines_nor_ever_new_names_delay_others_for_ever(
    handshakes: Handshakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_HANDSHAKES", 1)
    handshakes.fail(*SILENT, *SILENT, "restarting")
    handshakes.ask("running", *SILENT, "restarting", "first")
    for number in range(20):
        handshakes.ask(f"new-{number}", f"newer-{number}")
        handshakes.end()
    assert handshakes.begun.index("first") < handshakes.begun.index("running") + 3
    assert handshakes.begun.count("restarting") == 2
    assert {handshakes.begun.count(name) for name in SILENT} == {3}


@pytest.mark.parametrize("failures", [1, 2, 5, 20])
def test_the_wait_after_failures_grows(handshakes: Handshakes, failures: int) -> None:
    handshakes.fail(*["a"] * failures)
    handshakes.now -= 100.0
    handshakes.ask("a", "another")
    wait = min(0.1 * 2 ** (failures - 1), 5.0)
    handshakes.skip(wait * 0.99)
    assert handshakes.begun == ["a"] * failures + ["another"]
    handshakes.skip(wait * 0.02)
    assert handshakes.begun[-1] == "a"


def test_a_handshake_that_cannot_start_has_failed(
    handshakes: Handshakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise BAD

    monkeypatch.setattr(module, "start", refuse)
    handshakes.ask("a")
    assert [outcome for _, outcome in handshakes.reported] == [BAD]


def test_a_success_resets_the_wait(handshakes: Handshakes) -> None:
    handshakes.ask("a")
    handshakes.end(BAD)
    handshakes.queue.succeeded(PeerKey("a", "host", 1))
    handshakes.ask("a")
    assert handshakes.begun == ["a", "a"]


def test_one_handshake_is_for_the_newest_incarnations_that_tickets_name(
    handshakes: Handshakes,
) -> None:
    for incarnation in (None, *range(2 * MAX_TICKETS), 2 * MAX_TICKETS - 1):
        handshakes.queue.ask(PeerKey("a", "host", 1), incarnation)
    handshakes.end()
    assert handshakes.begun == ["a"]
    [(asking, _)] = handshakes.reported
    assert list(asking.incarnations) == list(range(MAX_TICKETS, 2 * MAX_TICKETS))


def test_no_handshake_starts_after_close_and_those_under_way_end(handshakes: Handshakes) -> None:
    handshakes.fail("a")
    handshakes.now -= 100.0
    handshakes.ask("a", "under way")
    handshakes.queue.close()
    handshakes.skip(100.0)
    assert handshakes.begun == ["a", "under way"]
    assert handshakes.cancel.call_count == 1


def test_any_error_is_reported_without_a_reference_to_decoded_data() -> None:
    class Decoded:
        pass

    references: list[weakref.ref[Decoded]] = []
    posted = queue.SimpleQueue[Callable[[], None]]()
    reported: list[Any] = []

    async def perform(key: PeerKey) -> EncodedReply:
        decoded = Decoded()
        references.append(weakref.ref(decoded))
        try:
            raise KeyError(key.engine)
        except KeyError as exc:
            raise ZeroDivisionError from exc

    over = lambda _, result: reported.append(result)  # noqa: E731
    HandshakeQueue(perform, over, posted.put, lambda: 0.0).ask(PeerKey("a", "host", 1))
    posted.get(timeout=20)()
    [error] = reported
    assert isinstance(error, HandshakeError)
    assert "ZeroDivisionError" in str(error)
    assert references[0]() is None
