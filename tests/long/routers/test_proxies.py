"""The proxies that vLLM's source has for disaggregated prefill, between real servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

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
    proxy,
)
from tests.long.routers.questions import Question

pytestmark = pytest.mark.timeout(400)

Start = Callable[[Router], Router]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("script", [TOY, MULTI_TURN], ids=lambda path: path.stem)
def test_every_text_is_right(
    servers: Servers,
    started: Start,
    vllm_source: Path,
    tmp_path: Path,
    questions: list[Question],
    texts: list[str],
    script: Path,
    host: str,
) -> None:
    """With another ``host`` than the engines', the multi-turn proxy changes ``remote_host``."""
    script, health = vllm_source / script, HEALTH[script]
    router = started(proxy(script, health, servers, tmp_path, host=host))
    answers = all_right(router, servers, questions, texts)
    streamed = [answer for q, answer in zip(questions, answers, strict=True) if q.stream]
    assert min(answer.chunks for answer in streamed) > 1
    nothing_left(servers)


@pytest.fixture(params=[TOY, MULTI_TURN], ids=lambda path: path.stem)
def router(
    request: pytest.FixtureRequest,
    servers: Servers,
    started: Start,
    vllm_source: Path,
    tmp_path: Path,
) -> Router:
    """Each of the two proxies."""
    return started(proxy(vllm_source / request.param, HEALTH[request.param], servers, tmp_path))


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_a_killed_server_returns(
    servers: Servers, router: Router, questions: list[Question], texts: list[str], side: str
) -> None:
    is_killed_and_returns(side, servers, router, questions, texts)


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_a_server_stands_still(
    servers: Servers, router: Router, questions: list[Question], texts: list[str], side: str
) -> None:
    stands_still(side, servers, router, questions, texts)


def test_a_third_of_the_clients_go_away(
    servers: Servers, router: Router, questions: list[Question], texts: list[str]
) -> None:
    a_third_go_away(servers, router, questions, texts)


def test_conversations(
    servers: Servers,
    started: Start,
    vllm_source: Path,
    tmp_path: Path,
    questions: list[Question],
    texts: list[str],
) -> None:
    """Without ``bidirectional_kv_xfer``, each turn is prefilled as the first one is."""
    router = started(proxy(vllm_source / MULTI_TURN, HEALTH[MULTI_TURN], servers, tmp_path))
    for _ in range(2):
        turn = [replace(q, more={"conversation_id": f"{n}"}) for n, q in enumerate(questions)]
        all_right(router, servers, turn, texts)
    assert "cache HIT" not in router.log()
    assert "cache MISS" in router.log()
    nothing_left(servers)
