"""A deployment of the oldest version is replaced by this version, engine by engine, under load."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from tests.integrations.vllm.engines import Engine
from tests.integrations.vllm.fleet import Fleet, fleet
from tests.integrations.vllm.steps import hand_over, pulled, texts
from tests.integrations.vllm.versions.environments import HERE, OTHERS, interpreter

pytestmark = [pytest.mark.versions, pytest.mark.timeout(600)]

LENGTHS = (5, 65, 200)
ROLES = ("kv_producer", "kv_consumer")
MIXED = {(source, target) for source in (OTHERS[0], HERE) for target in (OTHERS[0], HERE)}


class Deployment:
    """Two engines that prefill and two that decode, and requests that go through all of them."""

    def __init__(self, engines: Fleet, version: str) -> None:
        self._engines = engines
        self._ordinary = engines.launch("ordinary")
        self._turns = itertools.count()
        self._places = {
            (role, number): (version, self.launch(role, version))
            for role in ROLES
            for number in (0, 1)
        }
        engines.wait_started()
        self._busy = threading.Lock()
        self._stopped = threading.Event()
        self.served: list[tuple[str, str]] = []
        self.wrong: list[str] = []

    def launch(self, role: str, version: str) -> Engine:
        return self._engines.launch(f"v{version}", role, python=interpreter(version))

    def serve(self) -> None:
        """Hand prompts over from each engine to each, until stopped."""
        while not self._stopped.is_set():
            turn = next(self._turns)
            prompts = [prompt(length, 700 + turn) for length in LENGTHS]
            with self._busy:
                source, prefill = self._places["kv_producer", turn % 2]
                target, decode = self._places["kv_consumer", turn // 2 % 2]
                got, counters = hand_over(prefill, decode, *prompts, max_tokens=8)
            if got != texts(self._ordinary, *prompts, max_tokens=8):
                self.wrong.append(f"{source} to {target}: {got}")
            if pulled(counters) != sum(LENGTHS):
                self.wrong.append(f"{source} to {target}: only {pulled(counters)} tokens pulled")
            self.served.append((source, target))

    def replace(self, place: tuple[str, int], version: str) -> None:
        """Start an engine, give it the place of another, and end the other."""
        engine = self.launch(place[0], version).wait_started()
        with self._busy:
            _, old = self._places[place]
            self._places[place] = version, engine
        old.close()

    def wait_for_turns(self, count: int) -> None:
        """Wait until a number of further turns are served; a whole round has four."""
        before = len(self.served)
        while len(self.served) < before + count and not self._stopped.wait(0.05):
            pass

    def stop(self) -> None:
        self._stopped.set()


@pytest.fixture
def deployment(checkpoint: Path, tmp_path: Path) -> Iterator[Deployment]:
    with fleet(checkpoint, tmp_path) as engines:
        yield Deployment(engines, OTHERS[0])


def test_no_request_is_wrong_or_lost(deployment: Deployment) -> None:
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
        for place in itertools.product(ROLES, (0, 1)):
            deployment.wait_for_turns(4)
            deployment.replace(place, HERE)
        deployment.wait_for_turns(4)
    finally:
        deployment.stop()
        load.join()
    assert failed == []
    assert deployment.wrong == []
    assert set(deployment.served) == MIXED - {(OTHERS[0], HERE)}
    assert deployment.served[-4:] == [(HERE, HERE)] * 4
