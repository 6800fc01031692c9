"""Servers that answer clients all the time while a trainer gives them one version after another."""

from __future__ import annotations

import itertools
import random
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conversations import words
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.lora import OPTIONS, lora, write_adapter
from tests.engines.training import MODES, Trained, checkpoints, pair, put
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(900)

UPDATES = 8
CLIENTS = 4
QUIET = 12
"""How many answers are to come after an update, before the next."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "staged": {"staging": True, "bidirectional_kv_xfer": False},
    "early": {},
    "lora": {},
}
UNCACHED = OPTIONS | {"enable_prefix_caching": False}
AHEAD: dict[str, Any] = {"async_scheduling": True, "max_num_batched_tokens": 64}

Pair = tuple[Trained, Trained]
Adapter = dict[str, Any]
"""The arguments of a ``LoRARequest``; empty if a case has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What ``server`` has decoded, from ``begun`` to ``ended``."""

    server: Trained
    prompt: list[int]
    tokens: list[int]
    begun: float
    ended: float
    reason: str


class Traffic:
    """A router, and clients that lead conversations of two turns; both servers play both parts.

    With ``early``, prefill and decode get a request at once. If there is an adapter, half of the
    conversations are with it.
    """

    def __init__(self, servers: Pair, adapter: Adapter, *, early: bool = False) -> None:
        self.answers: list[Answer] = []
        self._servers, self._early, self._adapter = servers, early, adapter
        self._sides = {server: _side_channel(server) for server in servers} if early else {}
        self._rooms = itertools.count()
        self._stopped = threading.Event()

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """Clients ask until the context ends."""
        self._stopped.clear()
        with ThreadPoolExecutor(2 * CLIENTS) as self._pool:
            clients = [self._pool.submit(self._client, number) for number in range(CLIENTS)]
            try:
                yield
            finally:
                self._stopped.set()
            for client in clients:
                client.result()

    def wait(self, since: float) -> None:
        """Return when some requests have been answered that were begun since."""
        eventually(lambda: sum(each.begun > since for each in self.answers) >= QUIET)

    def _client(self, number: int) -> None:
        chance = random.Random(number)
        prefill, decode = self._servers[:: 1 - 2 * (number % 2)]
        while not self._stopped.is_set():
            asked = words(chance.randrange(20, 250))
            answer = self._hand_over(prefill, decode, asked, {})
            turn = [*answer["tokens"], *words(chance.randrange(1, 80))]
            self._hand_over(prefill, decode, turn, answer["ticket"] or {})
            if not chance.randrange(4):  # a ticket that nobody uses
                self._ask(prefill, words(60), {"do_remote_decode": True}, max_tokens=1)

    def _hand_over(
        self, prefill: Trained, decode: Trained, asked: list[int], ticket: Mapping[str, Any]
    ) -> dict[str, Any]:
        params = {**ticket, "do_remote_decode": True}
        if not self._early:
            prefilled = self._ask(prefill, asked, params, max_tokens=1)
            return self._decode(decode, asked, prefilled["ticket"])
        room = f"training-{next(self._rooms)}"
        leg: Future[dict[str, Any]] = self._pool.submit(
            self._ask, prefill, asked, params | {"transfer_id": room}, max_tokens=1
        )
        here = {"do_remote_prefill": True, "transfer_id": room, **self._sides[prefill]}
        answer = self._decode(decode, asked, here)
        leg.result()
        return answer

    def _decode(self, decode: Trained, asked: list[int], ticket: Any) -> dict[str, Any]:
        begun = time.monotonic()
        answer = self._ask(decode, asked, ticket)
        record = Answer(
            server=decode,
            prompt=asked,
            tokens=answer["tokens"][len(asked) :],
            begun=begun,
            ended=time.monotonic(),
            reason=answer["reason"],
        )
        self.answers.append(record)
        return answer

    def _ask(
        self, server: Trained, asked: list[int], ticket: Any, **options: Any
    ) -> dict[str, Any]:
        model = self._adapter["lora_name"] if self._adapter and with_adapter(asked) else ""
        return server.answer(asked, ticket, model=model, **options)


def _side_channel(server: Trained) -> dict[str, str]:
    ticket = server.prefill(words(5))
    return {
        "remote_engine_id": ticket["remote_engine_id"],
        "remote_bootstrap_addr": f"http://{ticket['remote_host']}:{ticket['remote_port']}",
        "remote_bootstrap_key": ticket["kvferry"].get("key", ""),
    }


@pytest.fixture(scope="module")
def weights(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return checkpoints(tmp_path_factory.mktemp("weights"), UPDATES + 1)


@pytest.fixture
def adapter(case: str, tmp_path: Path) -> Adapter:
    return lora(write_adapter(tmp_path / "adapter", seed=1)) if case == "lora" else {}


def with_adapter(prompt: list[int]) -> bool:
    """Whether a conversation is with the adapter, if there is one."""
    return prompt[0] % 2 == 0


def served(adapter: Adapter) -> dict[str, Any]:
    """Options of the servers."""
    if not adapter:
        return AHEAD
    return AHEAD | OPTIONS | {"lora_modules": f"{adapter['lora_name']}={adapter['lora_path']}"}


def check(ordinary: Engine, weights: Path, answers: Sequence[Answer], adapter: Adapter) -> None:
    """See that an ordinary engine answers so with these weights."""
    put(weights, ordinary.model)
    ordinary.run(reload)
    for kind in (True, False):
        asked = [each for each in answers if with_adapter(each.prompt) == kind]
        prompts, used = [each.prompt for each in asked], adapter if kind else {}
        expected = ordinary.generate(*prompts, max_tokens=12, lora=used)
        for want, got in zip(expected, asked, strict=True):
            assert (got.tokens, got.reason) == (want.tokens, "length"), got


def check_loads(prefill: Trained, decode: Trained, model: str) -> None:
    """See that decode loads a prompt whole."""
    asked, before = words(100), decode.pulled()
    decode.answer(asked, prefill.prefill(asked, model), model=model)
    assert decode.pulled() - before == len(asked)


def reload(engine: Any) -> None:
    engine.collective_rpc("reload_weights")


@pytest.mark.parametrize("case", CASES)
def test_updates(
    weights: list[Path], start_engine: StartEngine, tmp_path: Path, case: str, adapter: Adapter
) -> None:
    """What an engine answers between two updates, it has computed with the weights of then.

    So is what it has loaded. Before the second engine has the weights of the first one, they load
    nothing of each other.
    """
    spans: list[tuple[Trained, int, float, float]] = []  # who had which weights, from when to when
    with pair(weights[0], tmp_path, CASES[case], **served(adapter)) as servers:
        traffic = Traffic(servers, adapter, early=case == "early")
        since = dict.fromkeys(servers, time.monotonic())
        with traffic.flowing():
            traffic.wait(time.monotonic())
            for number in range(1, UPDATES + 1):
                version = f"v{number}" if number % 4 > 1 else None
                for server in servers[:: 1 if number % 2 else -1]:
                    spans.append((server, number - 1, since[server], time.monotonic()))
                    server.update(weights[number], version, MODES[number % 3])
                    since[server] = time.monotonic()
                    traffic.wait(since[server])
                pulled = [server.pulled() for server in servers]
                for server, before in zip(servers, pulled, strict=True):
                    eventually(lambda s=server, b=before: s.pulled() > b)  # type: ignore[misc]
        loads = sum(server.counter("vllm:kvferry_early_loads") for server in servers)
        assert (loads > 0) == (case == "early")
        spans += [(server, UPDATES, since[server], time.monotonic()) for server in servers]
        if adapter:
            check_loads(*servers, adapter["lora_name"])
    model = shutil.copytree(weights[0], tmp_path / "ordinary")
    ordinary = start_engine(case, model=model, **(UNCACHED if adapter else {}))
    for server, number, begin, end in spans:
        inside = [
            each
            for each in traffic.answers
            if each.server is server and begin < each.begun and each.ended < end
        ]
        assert inside
        check(ordinary, weights[number], inside, adapter)
    ordinary.close()
