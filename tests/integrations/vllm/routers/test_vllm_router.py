"""vllm-router between real servers, also while a server dies or stops and clients go away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integrations.vllm.routers.checks import (
    a_third_go_away,
    all_right,
    is_killed_and_returns,
    nothing_left,
    stands_still,
)
from tests.integrations.vllm.routers.deployment import Router, Servers, vllm_router
from tests.integrations.vllm.routers.questions import Question

pytestmark = [pytest.mark.vllm, pytest.mark.routers, pytest.mark.timeout(400)]

Start = Callable[[Router], Router]


@pytest.fixture
def router(servers: Servers, started: Start, router_program: Path, tmp_path: Path) -> Router:
    return started(vllm_router(router_program, servers, tmp_path))


def test_every_text_is_right(
    servers: Servers, router: Router, questions: list[Question], texts: list[str]
) -> None:
    answers = all_right(router, servers, questions, texts)
    streamed = [answer for q, answer in zip(questions, answers, strict=True) if q.stream]
    assert min(answer.chunks for answer in streamed) > 1
    nothing_left(servers)


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
