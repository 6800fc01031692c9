"""Handshakes: once for all who ask, side by side, and not too often after a failure."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import pytest

from kvferry.core.endpoint import handshakes as shaking
from kvferry.core.endpoint.handshakes import MAX_HANDSHAKES, HandshakeResult, Handshakes, PeerKey
from kvferry.core.errors import HandshakeError, KVFerryError
from kvferry.core.planner.plan import Plan

GOOD = HandshakeResult(
    payloads=(), plan=Plan(rank=0, sources=(), readers=(), notified_ranks=(), local_groups=())
)


class Bench:
    """Handshakes whose outcomes the test decides; what they post runs when it says so."""

    def __init__(self, *, fails: bool = False) -> None:
        self.now = 0.0
        self.fails = fails
        self.calls: list[PeerKey] = []
        self.heard: list[HandshakeResult | KVFerryError] = []
        self._posted: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self.gate = threading.Event()
        self.gate.set()
        self.shakes = Handshakes(self._shake, self._post, lambda: self.now)

    def ask(self, name: str = "a") -> None:
        self.shakes.ask(PeerKey(name, "host", 1), self.heard.append)

    def run(self, count: int = 1) -> None:
        """Wait for so many handshakes to end, and hear of them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._posted) >= count, 20)
            posted, self._posted = self._posted, []
        for call in posted:
            call()

    def _post(self, call: Callable[[], None]) -> None:
        with self._changed:
            self._posted.append(call)
            self._changed.notify_all()

    def _shake(self, key: PeerKey) -> HandshakeResult:
        with self._changed:
            self.calls.append(key)
            self._changed.notify_all()
        self.gate.wait()
        if self.fails:
            raise HandshakeError("nobody there")
        return GOOD

    def under_way(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.calls) >= count, 20)


def test_one_handshake_for_all_who_ask_meanwhile() -> None:
    bench = Bench()
    bench.gate.clear()
    for _ in range(3):
        bench.ask()
    bench.gate.set()
    bench.run()
    assert (len(bench.calls), bench.heard) == (1, [GOOD] * 3)
    assert len(bench.shakes) == 0


def test_engines_are_reached_side_by_side_up_to_a_limit() -> None:
    bench = Bench()
    bench.gate.clear()
    for number in range(MAX_HANDSHAKES + 2):
        bench.ask(f"engine-{number}")
    assert bench.under_way(MAX_HANDSHAKES)
    assert len(bench.calls) == MAX_HANDSHAKES
    bench.gate.set()
    bench.run(MAX_HANDSHAKES)
    bench.run(2)
    assert len(bench.heard) == MAX_HANDSHAKES + 2


def have_failed(bench: Bench, *names: str) -> None:
    """Each of these has failed, as often as it is named, and may be asked for again."""
    bench.fails = True
    for name in names:
        bench.ask(name)
        bench.now += 100.0
        bench.shakes.progress(bench.now)
        bench.run()
    bench.now += 100.0
    bench.fails = False


MUTE = [f"mute-{number}" for number in range(5)]


@pytest.mark.parametrize("begun", [0, 1])
def test_who_has_failed_least_is_next_at_every_second_turn(
    begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shaking, "MAX_HANDSHAKES", 1)
    bench = Bench()
    have_failed(bench, *MUTE, *MUTE, "restarting", *["other"] * begun)
    bench.gate.clear()
    bench.ask("running")
    assert bench.under_way(len(bench.heard) + 1)
    before = len(bench.calls)
    order = [*MUTE, "restarting", "one"]
    for name in order:
        bench.ask(name)
    bench.gate.set()
    for _ in ["running", *order]:
        bench.run()
    called = [key.engine for key in bench.calls[before:]]
    assert sorted(called) == sorted(order)
    assert called.index("one") < 2
    assert called.index("restarting") < 4


def test_nobody_waits_for_ever_while_new_names_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaking, "MAX_HANDSHAKES", 1)
    bench = Bench()
    have_failed(bench, "restarting")
    bench.gate.clear()
    for name in ("running", *(f"early-{number}" for number in range(5)), "restarting"):
        bench.ask(name)
    before = bench.calls.count(PeerKey("restarting", "host", 1))
    bench.gate.set()
    for number in range(20):  # at every second turn one of seven is called that came before them
        bench.ask(f"new-{number}")
        bench.ask(f"newer-{number}")
        bench.run()
    assert bench.calls.count(PeerKey("restarting", "host", 1)) > before


@pytest.mark.parametrize("failures", [1, 2, 5, 20])
def test_the_next_handshake_after_failures_waits_longer(failures: int) -> None:
    bench = Bench(fails=True)
    for _ in range(failures):
        bench.ask()
        bench.now += 100.0
        bench.shakes.progress(bench.now)
        bench.run()
    assert all(isinstance(result, HandshakeError) for result in bench.heard)
    bench.fails, calls = False, len(bench.calls)
    bench.ask()
    wait = min(0.1 * 2 ** (failures - 1), 5.0)
    bench.now += wait * 0.99
    bench.shakes.progress(bench.now)
    assert len(bench.calls) == calls
    bench.now += wait * 0.02
    bench.shakes.progress(bench.now)
    bench.run()
    assert bench.heard[-1] is GOOD


def test_a_failure_delays_nobody_else_and_a_success_is_the_end_of_it() -> None:
    bench = Bench(fails=True)
    bench.ask("a")
    bench.run()
    bench.fails = False
    bench.ask("b")
    bench.run()
    assert bench.heard[-1] is GOOD
    bench.shakes.succeeded(PeerKey("a", "host", 1))
    bench.ask("a")
    bench.run()
    assert bench.heard[-1] is GOOD


def test_whatever_a_handshake_raises_is_heard_of() -> None:
    heard: list[HandshakeResult | KVFerryError] = []
    done = threading.Event()
    posted: list[Callable[[], None]] = []

    def shake(key: PeerKey) -> HandshakeResult:
        raise ZeroDivisionError(key.engine)

    def post(call: Callable[[], None]) -> None:
        posted.append(call)
        done.set()

    Handshakes(shake, post, lambda: 0.0).ask(PeerKey("a", "host", 1), heard.append)
    assert done.wait(20)
    posted[0]()
    [error] = heard
    assert isinstance(error, HandshakeError)
    assert "ZeroDivisionError" in str(error)


def test_an_error_keeps_nothing_of_what_was_decoded() -> None:
    class Decoded:
        pass

    gone: list[weakref.ref[Decoded]] = []
    posted = queue.SimpleQueue[Callable[[], None]]()

    def shake(key: PeerKey) -> HandshakeResult:
        decoded = Decoded()
        gone.append(weakref.ref(decoded))
        try:
            raise ZeroDivisionError
        except ZeroDivisionError as exc:
            raise HandshakeError(key.engine) from exc

    heard: list[HandshakeResult | KVFerryError] = []
    Handshakes(shake, posted.put, lambda: 0.0).ask(PeerKey("a", "host", 1), heard.append)
    posted.get(timeout=20)()
    assert isinstance(heard[0], HandshakeError)
    assert gone[0]() is None


def test_what_was_read_is_said_to_be_used() -> None:
    bench, used = Bench(), list[HandshakeResult]()
    bench.shakes = Handshakes(bench._shake, bench._post, lambda: bench.now, used.append)
    bench.ask()
    bench.run()
    bench.fails = True
    bench.ask("b")
    bench.run()
    assert (bench.heard[0], used) == (GOOD, [GOOD])


def test_after_the_close_nothing_starts() -> None:
    bench = Bench(fails=True)
    bench.ask()
    bench.run()
    bench.ask()
    bench.shakes.close()
    bench.now += 100.0
    bench.shakes.progress(bench.now)
    assert len(bench.calls) == 1
