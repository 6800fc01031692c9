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
from tests.engines.http_server import post
from tests.long.routers.checks import (
    a_third_go_away,
    all_right,
    is_killed_and_returns,
    nothing_left,
    stands_still,
)
from tests.long.routers.deployment import (
    HEALTH,
    MULTI_TURN,
    TOY,
    Router,
    Servers,
    free_port,
    proxy,
    vllm_router,
)
from tests.long.routers.questions import Question

pytestmark = pytest.mark.timeout(400)

Start = Callable[[Router], Router]

EARLY = ROOT / "examples" / "serving" / "early_proxy.py"
VLLM = Path("vllm-router")
ROUTERS = (VLLM, TOY, MULTI_TURN, EARLY)


def early_proxy(servers: Servers, folder: Path) -> Router:
    port = free_port()
    command: list[str | Path] = [sys.executable, EARLY, "--port", str(port)]
    command += ["--prefill", servers["prefill"].address, "--decode", servers["decode"].address]
    return Router("early-proxy", command, port, "/health", folder)


@pytest.fixture(params=ROUTERS, ids=lambda path: path.stem)
def router(
    request: pytest.FixtureRequest, servers: Servers, started: Start, tmp_path: Path
) -> Router:
    path: Path = request.param
    if path == VLLM:
        program = request.getfixturevalue("router_program")
        return started(vllm_router(program, servers, tmp_path))
    if path == EARLY:
        return started(early_proxy(servers, tmp_path))
    script = request.getfixturevalue("vllm_source") / path
    return started(proxy(script, HEALTH[path], servers, tmp_path))


def only(*routers: Path) -> pytest.MarkDecorator:
    """Run a test with some routers only."""
    return pytest.mark.parametrize("router", routers, indirect=True, ids=lambda path: path.stem)


def every_text_is_right(
    servers: Servers, router: Router, questions: list[Question], texts: list[str]
) -> None:
    answers = all_right(router, servers, questions, texts)
    streamed = [answer for q, answer in zip(questions, answers, strict=True) if q.stream]
    assert min(answer.chunks for answer in streamed) > 1
    nothing_left(servers)


def test_every_text_is_right(
    request: pytest.FixtureRequest,
    servers: Servers,
    router: Router,
    questions: list[Question],
    texts: list[str],
) -> None:
    every_text_is_right(servers, router, questions, texts)
    if EARLY.stem in request.node.name:
        assert servers["decode"].counter("vllm:kvferry_early_loads", "") > 0


@pytest.mark.parametrize("script", [TOY, MULTI_TURN], ids=lambda path: path.stem)
def test_servers_by_another_name(
    servers: Servers,
    started: Start,
    vllm_source: Path,
    tmp_path: Path,
    questions: list[Question],
    texts: list[str],
    script: Path,
) -> None:
    """With another host than the engines', the multi-turn proxy changes ``remote_host``."""
    renamed = proxy(vllm_source / script, HEALTH[script], servers, tmp_path, host="localhost")
    every_text_is_right(servers, started(renamed), questions, texts)


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_a_killed_server_returns(
    servers: Servers, router: Router, questions: list[Question], texts: list[str], side: str
) -> None:
    is_killed_and_returns(side, servers, router, questions, texts)


@only(VLLM, TOY, MULTI_TURN)
@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_a_server_stands_still(
    servers: Servers, router: Router, questions: list[Question], texts: list[str], side: str
) -> None:
    stands_still(side, servers, router, questions, texts)


def test_a_third_of_the_clients_go_away(
    servers: Servers, router: Router, questions: list[Question], texts: list[str]
) -> None:
    a_third_go_away(servers, router, questions, texts)


@only(MULTI_TURN)
def test_conversations(
    servers: Servers, router: Router, questions: list[Question], texts: list[str]
) -> None:
    """Without ``bidirectional_kv_xfer``, each turn is prefilled as the first one is."""
    for _ in range(2):
        turn = [replace(q, more={"conversation_id": f"{n}"}) for n, q in enumerate(questions)]
        all_right(router, servers, turn, texts)
    assert "cache HIT" not in router.log()
    assert "cache MISS" in router.log()
    nothing_left(servers)


@only(VLLM)
def test_a_list_of_prompts_and_several_samples_hold_nothing_in_vain(
    servers: Servers, router: Router
) -> None:
    """vLLM answers either with one ticket: of the first prompt, and of the last sample to end."""
    prefill, decode = servers["prefill"], servers["decode"]

    def counted() -> dict[str, float]:
        return {
            "made": prefill.counter("vllm:kvferry_holds", 'outcome="made"'),
            "ended": prefill.counter("vllm:kvferry_holds", 'outcome="read"'),
            "not made": prefill.counter("vllm:kvferry_tickets_not_made", 'reason="list"'),
            "refused": decode.counter("vllm:kvferry_refused_tickets", 'reason="list"'),
            "loads": decode.counter("vllm:kvferry_loads", ""),
        }

    def ask_for(**body: Any) -> tuple[int, dict[str, float]]:
        nothing_left(servers)
        before = counted()
        body |= {"model": servers.model, "max_tokens": 8, "ignore_eos": True}
        status, _ = post(router.address + "/v1/completions", body)
        nothing_left(servers)
        return status, {name: value - before[name] for name, value in counted().items()}

    each_once = {"made": 1, "ended": 1, "not made": 1, "refused": 1, "loads": 1}
    assert ask_for(prompt=[prompt(100, seed=61), prompt(90, seed=62)]) == (500, each_once)
    status, samples = ask_for(prompt=prompt(80, seed=63), n=3, temperature=1.0)
    expected = {"made": 1, "ended": 1, "not made": 0, "refused": 0, "loads": 3}
    assert (status, samples) == (200, expected)
