"""Routers between real servers, also while a server dies or stops and clients go away.

They are vllm-router, the proxies that vLLM's source has for disaggregated prefill, and
``examples/serving/early_proxy.py``, which sends both legs of a request at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines.engines import ROOT
from tests.engines.http_server import Program, post
from tests.free_port import free_port
from tests.long.routers.checks import Clients, nothing_left
from tests.long.routers.deployment import (
    HEALTH,
    MULTI_TURN,
    TOY,
    Servers,
    proxy,
    vllm_router,
)
from tests.long.routers.questions import Question

pytestmark = pytest.mark.timeout(400)

Start = Callable[[Program], Program]

EARLY = ROOT / "examples" / "serving" / "early_proxy.py"
VLLM = Path("vllm-router")
ROUTERS = {
    "vllm-router": VLLM,
    "toy": TOY,
    "multi-turn": MULTI_TURN,
    "early": EARLY,
    # With another host than the engines', the multi-turn proxy changes ``remote_host``.
    "toy by another name": TOY,
    "multi-turn by another name": MULTI_TURN,
}
USUAL = list(ROUTERS)[:4]


def early_proxy(servers: Servers, folder: Path) -> Program:
    port = free_port()
    command: list[str | Path] = [sys.executable, EARLY, "--port", str(port)]
    command += ["--prefill", servers["prefill"].address, "--decode", servers["decode"].address]
    return Program("early-proxy", command, port, "/health", folder)


@pytest.fixture(params=USUAL)
def clients(
    request: pytest.FixtureRequest,
    servers: Servers,
    started: Start,
    tmp_path: Path,
    questions: list[Question],
    texts: list[str],
) -> Clients:
    path, host = ROUTERS[request.param], "localhost" if "name" in request.param else "127.0.0.1"
    if path == VLLM:
        router = vllm_router(request.getfixturevalue("router_program"), servers, tmp_path)
    elif path == EARLY:
        router = early_proxy(servers, tmp_path)
    else:
        script = request.getfixturevalue("vllm_source") / path
        router = proxy(script, HEALTH[path], servers, tmp_path, host=host)
    return Clients(servers=servers, router=started(router), questions=questions, texts=texts)


def only(*routers: str) -> pytest.MarkDecorator:
    """Run a test with some routers only."""
    return pytest.mark.parametrize("clients", routers, indirect=True)


sides = pytest.mark.parametrize("side", ["decode", "prefill"])


@only(*ROUTERS)
def test_every_text_is_right(request: pytest.FixtureRequest, clients: Clients) -> None:
    answers = clients.check()
    streamed = [answer for q, answer in zip(clients.questions, answers, strict=True) if q.stream]
    assert min(answer.chunks for answer in streamed) > 1
    if "early" in request.node.name:
        assert clients.servers["decode"].counter("vllm:kvferry_early_loads") > 0


@sides
def test_a_killed_server_returns(clients: Clients, side: str) -> None:
    clients.check_killed(side)


@only(*USUAL[:3])
@sides
def test_a_server_stands_still(clients: Clients, side: str) -> None:
    clients.check_stopped(side)


def test_a_third_of_the_clients_go_away(clients: Clients) -> None:
    clients.check_left()


@only("multi-turn")
def test_conversations(clients: Clients) -> None:
    """Without ``bidirectional_kv_xfer``, each turn is prefilled as the first one is."""
    turn = [replace(q, more={"conversation_id": f"{n}"}) for n, q in enumerate(clients.questions)]
    for _ in range(2):
        replace(clients, questions=turn).check()
    assert "cache HIT" not in clients.router.log()
    assert "cache MISS" in clients.router.log()


@only("vllm-router")
def test_a_list_of_prompts_and_several_samples_hold_nothing_in_vain(clients: Clients) -> None:
    """vLLM answers either with one ticket: of the first prompt, and of the last sample to end."""
    servers = clients.servers
    prefill, decode = servers["prefill"], servers["decode"]

    def counted() -> dict[str, float]:
        return {
            "made": prefill.counter("vllm:kvferry_holds", 'outcome="made"'),
            "ended": prefill.counter("vllm:kvferry_holds", 'outcome="read"'),
            "not made": prefill.counter("vllm:kvferry_tickets_not_made", 'reason="list"'),
            "refused": decode.counter("vllm:kvferry_refused_tickets", 'reason="list"'),
            "loads": decode.counter("vllm:kvferry_loads"),
        }

    def ask_for(**body: Any) -> tuple[int, dict[str, float]]:
        nothing_left(servers)
        before = counted()
        body |= {"model": servers.model, "max_tokens": 8, "ignore_eos": True}
        status, _ = post(clients.router.address + "/v1/completions", body)
        nothing_left(servers)
        return status, {name: value - before[name] for name, value in counted().items()}

    each_once = {"made": 1, "ended": 1, "not made": 1, "refused": 1, "loads": 1}
    assert ask_for(prompt=[prompt(100, seed=61), prompt(90, seed=62)]) == (500, each_once)
    samples = {"made": 1, "ended": 1, "not made": 0, "refused": 0, "loads": 3}
    assert ask_for(prompt=prompt(80, seed=63), n=3, temperature=1.0) == (200, samples)
