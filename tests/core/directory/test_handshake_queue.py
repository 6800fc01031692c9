"""``HandshakeQueue``: handshakes run concurrently, and are delayed after failures."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from kvferry.core.directory import EncodedReply
from kvferry.core.directory import handshake_queue as module
from kvferry.core.directory.handshake_queue import MAX_HANDSHAKES, HandshakeQueue
from kvferry.core.errors import HandshakeError, KVFerryError
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.side_channel.poller import Steps, Wait

GOOD = EncodedReply(place=PeerKey("a", "host", 1), incarnation=Incarnation(1), ranks=(b"a",))


class HandshakeHarness:
    """``HandshakeQueue`` whose results the test decides, and whose callbacks it runs."""

    def __init__(self, *, fails: bool = False) -> None:
        self.now = 0.0
        self.fails = fails
        self.calls: list[PeerKey] = []
        self.reported: list[EncodedReply | KVFerryError] = []
        self._posted: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self.may_return = threading.Event()
        self.may_return.set()
        self.handshakes = HandshakeQueue(
            self._perform, lambda _, result: self.reported.append(result), self._post, self.clock
        )

    def clock(self) -> float:
        return self.now

    def ask(self, name: str = "a") -> None:
        self.handshakes.ask(PeerKey(name, "host", 1))

    def run(self, count: int = 1) -> None:
        """Wait for ``count`` handshakes to end, and run the callbacks that they posted."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._posted) >= count, 20)
            posted, self._posted = self._posted, []
        for call in posted:
            call()

    def _post(self, call: Callable[[], None]) -> None:
        with self._changed:
            self._posted.append(call)
            self._changed.notify_all()

    def _perform(self, key: PeerKey) -> Steps[EncodedReply]:
        with self._changed:
            self.calls.append(key)
            self._changed.notify_all()
        while not self.may_return.is_set():
            yield Wait(time.monotonic() + 0.001)
        if self.fails:
            raise HandshakeError("nobody there")
        return GOOD

    def wait_for_calls(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.calls) >= count, 20)


def test_handshakes_run_concurrently_up_to_a_limit() -> None:
    harness = HandshakeHarness()
    harness.may_return.clear()
    for number in range(MAX_HANDSHAKES + 2):
        harness.ask(f"engine-{number}")
    assert harness.wait_for_calls(MAX_HANDSHAKES)
    assert len(harness.calls) == MAX_HANDSHAKES
    harness.may_return.set()
    harness.run(MAX_HANDSHAKES)
    harness.run(2)
    assert len(harness.reported) == MAX_HANDSHAKES + 2


def fail(harness: HandshakeHarness, *names: str) -> None:
    """Let a handshake with each name fail, and let the wait after the failure pass."""
    harness.fails = True
    for name in names:
        harness.ask(name)
        harness.now += 100.0
        harness.handshakes.progress(harness.now)
        harness.run()
    harness.now += 100.0
    harness.fails = False


SILENT = [f"silent-{number}" for number in range(5)]


@pytest.mark.parametrize("earlier_failures", [0, 1])
def test_every_second_handshake_goes_to_the_engine_with_the_fewest_failures(
    earlier_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_HANDSHAKES", 1)
    harness = HandshakeHarness()
    fail(harness, *SILENT, *SILENT, "restarting", *["other"] * earlier_failures)
    harness.may_return.clear()
    harness.ask("running")
    assert harness.wait_for_calls(len(harness.reported) + 1)
    before = len(harness.calls)
    order = [*SILENT, "restarting", "one"]
    for name in order:
        harness.ask(name)
    harness.may_return.set()
    for _ in ["running", *order]:
        harness.run()
    called = [key.engine for key in harness.calls[before:]]
    assert sorted(called) == sorted(order)
    assert called.index("one") < 2
    assert called.index("restarting") < 4


def test_no_engine_waits_forever_while_new_names_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HANDSHAKES", 1)
    harness = HandshakeHarness()
    fail(harness, "restarting")
    harness.may_return.clear()
    for name in ("running", *(f"early-{number}" for number in range(5)), "restarting"):
        harness.ask(name)
    before = harness.calls.count(PeerKey("restarting", "host", 1))
    harness.may_return.set()
    for number in range(20):
        # Every second handshake is with one of the seven names that were asked for first.
        harness.ask(f"new-{number}")
        harness.ask(f"newer-{number}")
        harness.run()
    assert harness.calls.count(PeerKey("restarting", "host", 1)) > before


@pytest.mark.parametrize("failures", [1, 2, 5, 20])
def test_the_wait_after_failures_grows(failures: int) -> None:
    harness = HandshakeHarness(fails=True)
    for _ in range(failures):
        harness.ask()
        harness.now += 100.0
        harness.handshakes.progress(harness.now)
        harness.run()
    assert all(isinstance(result, HandshakeError) for result in harness.reported)
    harness.fails, calls = False, len(harness.calls)
    harness.ask()
    wait = min(0.1 * 2 ** (failures - 1), 5.0)
    harness.now += wait * 0.99
    harness.handshakes.progress(harness.now)
    assert len(harness.calls) == calls
    harness.now += wait * 0.02
    harness.handshakes.progress(harness.now)
    harness.run()
    assert harness.reported[-1] is GOOD


def test_a_failure_delays_no_other_engine_and_a_success_resets_the_wait() -> None:
    harness = HandshakeHarness(fails=True)
    harness.ask("a")
    harness.run()
    harness.fails = False
    harness.ask("b")
    harness.run()
    assert harness.reported[-1] is GOOD
    harness.handshakes.succeeded(PeerKey("a", "host", 1))
    harness.ask("a")
    harness.run()
    assert harness.reported[-1] is GOOD


def test_any_exception_of_a_handshake_is_reported() -> None:
    reported: list[EncodedReply | KVFerryError] = []
    done = threading.Event()
    posted: list[Callable[[], None]] = []

    def perform(key: PeerKey) -> Steps[EncodedReply]:
        yield from ()
        raise ZeroDivisionError(key.engine)

    def post(call: Callable[[], None]) -> None:
        posted.append(call)
        done.set()

    asked = HandshakeQueue(perform, lambda _, result: reported.append(result), post, lambda: 0.0)
    asked.ask(PeerKey("a", "host", 1))
    assert done.wait(20)
    posted[0]()
    [error] = reported
    assert isinstance(error, HandshakeError)
    assert "ZeroDivisionError" in str(error)


def test_an_error_keeps_no_reference_to_decoded_data() -> None:
    class Decoded:
        pass

    references: list[weakref.ref[Decoded]] = []
    posted = queue.SimpleQueue[Callable[[], None]]()

    def perform(key: PeerKey) -> Steps[EncodedReply]:
        yield from ()
        decoded = Decoded()
        references.append(weakref.ref(decoded))
        try:
            raise ZeroDivisionError
        except ZeroDivisionError as exc:
            raise HandshakeError(key.engine) from exc

    reported: list[EncodedReply | KVFerryError] = []
    over = lambda _, result: reported.append(result)  # noqa: E731
    HandshakeQueue(perform, over, posted.put, lambda: 0.0).ask(PeerKey("a", "host", 1))
    posted.get(timeout=20)()
    assert isinstance(reported[0], HandshakeError)
    assert references[0]() is None


def test_no_handshake_starts_after_close() -> None:
    harness = HandshakeHarness(fails=True)
    harness.ask()
    harness.run()
    harness.ask()
    harness.handshakes.close()
    harness.now += 100.0
    harness.handshakes.progress(harness.now)
    assert len(harness.calls) == 1


def test_handshakes_under_way_end_with_close() -> None:
    begun, ended = threading.Event(), threading.Event()

    def perform(_: PeerKey) -> Steps[EncodedReply]:
        begun.set()
        try:
            yield Wait()
        finally:
            ended.set()
        return GOOD

    handshakes = HandshakeQueue(
        perform, lambda *_: None, lambda _: pytest.fail("it is cancelled"), lambda: 0.0
    )
    handshakes.ask(PeerKey("a", "host", 1))
    assert begun.wait(20)
    handshakes.close()
    assert ended.wait(20)
