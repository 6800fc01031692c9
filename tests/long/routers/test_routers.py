"""Routers between real servers, also while a server dies.

They are vllm-router, the proxies that vLLM's source has for disaggregated prefill, and
``examples/serving/early_proxy.py``, which sends both legs of a request at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.engines import ROOT
from tests.engines.http_server import Program
from tests.free_port import free_port
from tests.long.routers.checks import Clients
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
