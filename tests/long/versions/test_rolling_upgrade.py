"""A deployment of the oldest version is replaced by this version, engine by engine, under load."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from tests.engines.engines import Engine, EngineError
from tests.engines.fleet import Fleet, fleet
from tests.engines.messages import Completion
from tests.engines.steps import hand_over, pulled, texts
from tests.long.versions.environments import HERE, OTHERS, interpreter

pytestmark = pytest.mark.timeout(600)

LENGTHS = (5, 65, 200)
ROLES = ("kv_producer", "kv_consumer")
PLACES = tuple(itertools.product(ROLES, (0, 1)))
MIXED = {(source, target) for source in (OTHERS[0], HERE) for target in (OTHERS[0], HERE)}

_seeds = itertools.count(700)


def prompts() -> list[list[int]]:
    """Prompts that no engine has seen yet."""
    seed = next(_seeds)
    return [prompt(length, seed) for length in LENGTHS]


class Deployment:
    """Two engines that prefill and two that decode, and requests that go through all of them."""

    def __init__(self, engines: Fleet, version: str) -> None:
        self._engines = engines
        self._ordinary = engines.launch("ordinary")
        self._places = {
            (role, number): (version, self._launch(role, version)) for role, number in PLACES
        }
        engines.wait_started()
        self._busy = threading.Lock()
        self._stopped = threading.Event()
        self.served: list[tuple[str, str]] = []
        self.wrong: list[str] = []

    def serve(self) -> None:
        """Hand prompts over from each engine to each, until stopped."""
        for turn in itertools.count():
            with self._busy:
                self._serve_turn(turn)
            if self._stopped.wait(0.01):  # lets another thread have the engines
                return

    def replace(self, place: tuple[str, int], version: str) -> None:
        """Start an engine, give it the place of another, and end the other."""
        self.fill(place, version).close()

    def fill(self, place: tuple[str, int], version: str) -> Engine:
        """Start an engine and give it a place."""
        engine = self._launch(place[0], version).wait_started()
        with self._busy:
            _, old = self._places[place]
            self._places[place] = version, engine
        return old

    def crash(self, place: tuple[str, int]) -> None:
        """Kill an engine while it and the other engine of its role have requests.

        Only the requests of the killed engine may be lost. From then on the other engine gets the
        requests of both.
        """
        role, number = place
        with self._busy:
            killed, other = (self._places[role, each][1] for each in (number, 1 - number))
            crash = self._crash_producer if role == "kv_producer" else self._crash_consumer
            crash(killed, other)
            self._places[place] = self._places[role, 1 - number]

    def wait_for_turns(self, count: int) -> None:
        """Wait until a number of further turns are served; a whole round has four."""
        before = len(self.served)
        while len(self.served) < before + count and not self._stopped.wait(0.05):
            pass

    def stop(self) -> None:
        self._stopped.set()

    def _launch(self, role: str, version: str) -> Engine:
        return self._engines.launch(
            f"v{version}",
            role,
            transfer={"kv_load_failure_policy": "fail"},
            python=interpreter(version),
        )

    def _serve_turn(self, turn: int) -> None:
        asked = prompts()
        source, prefill = self._places["kv_producer", turn % 2]
        target, decode = self._places["kv_consumer", turn // 2 % 2]
        got, counters = hand_over(prefill, decode, *asked, max_tokens=8)
        self._compare(got, asked, f"{source} to {target}")
        if pulled(counters) != sum(LENGTHS):
            self.wrong.append(f"{source} to {target}: only {pulled(counters)} tokens pulled")
        self.served.append((source, target))

    def _crash_producer(self, killed: Engine, other: Engine) -> None:
        lost, kept = prompts(), prompts()
        tickets = [*killed.prefill(*lost), *other.prefill(*kept)]
        killed.kill()
        _, decode = self._places["kv_consumer", 0]
        completions = decode.generate(*lost, *kept, params=tickets, max_tokens=8)
        ends = [each.finish_reason for each in completions]
        assert ends == ["error"] * len(lost) + ["length"] * len(kept)
        self._check_kept(completions[len(lost) :], kept)

    def _crash_consumer(self, killed: Engine, other: Engine) -> None:
        lost, kept = prompts(), prompts()
        _, prefill = self._places["kv_producer", 0]
        in_flight = killed.submit(*lost, params=prefill.prefill(*lost), max_tokens=500)
        loading = other.submit(*kept, params=prefill.prefill(*kept), max_tokens=8)
        killed.kill()
        with pytest.raises(EngineError):
            killed.results(in_flight)
        self._check_kept(other.results(loading), kept)

    def _check_kept(self, completions: Sequence[Completion], asked: list[list[int]]) -> None:
        assert [each.finish_reason for each in completions] == ["length"] * len(asked)
        self._compare([each.text for each in completions], asked, "beside a killed engine")

    def _compare(self, got: list[str], asked: list[list[int]], where: str) -> None:
        """Note texts that an ordinary engine does not give."""
        if got != texts(self._ordinary, *asked, max_tokens=8):
            self.wrong.append(f"{where}: {got}")


@pytest.fixture
def deployment(checkpoint: Path, tmp_path: Path) -> Iterator[Deployment]:
    with fleet(checkpoint, tmp_path) as engines:
        yield Deployment(engines, OTHERS[0])


def test_no_request_is_wrong_and_none_lost_but_by_killed_engines(deployment: Deployment) -> None:
    """Of each role, the second engine is killed with requests in flight, and then replaced."""
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            deployment.serve()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            failed.append(error)
            deployment.stop()

    load = threading.Thread(target=serve)
    load.start()
    try:
        for place in PLACES:
            deployment.wait_for_turns(4)
            if place[1] == 0:
                deployment.replace(place, HERE)
            else:
                deployment.crash(place)
                deployment.wait_for_turns(4)
                deployment.fill(place, HERE)
        deployment.wait_for_turns(4)
    finally:
        deployment.stop()
        load.join()
    assert failed == []
    assert deployment.wrong == []
    assert set(deployment.served) == MIXED - {(OTHERS[0], HERE)}
    assert deployment.served[-4:] == [(HERE, HERE)] * 4
