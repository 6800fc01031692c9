"""vllm-router between real servers, also while a server dies or stops and clients go away."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integrations.vllm.routers.checks import (
    BEFORE_FAULT,
    DURING_FAULT,
    all_right,
    ask_during,
    goes_on,
    is_killed_and_returns,
    none_wrong,
    nothing_left,
)
from tests.integrations.vllm.routers.deployment import Router, Servers, vllm_router
from tests.integrations.vllm.routers.questions import AT_ONCE, Answer, Question, ask

pytestmark = [pytest.mark.vllm, pytest.mark.routers, pytest.mark.timeout(400)]

Start = Callable[[Router], Router]

STOPPED_SECONDS = 4.0


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
    def stop() -> None:
        servers[side].send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        servers[side].send_signal(signal.SIGCONT)

    answers = ask_during(stop, router, servers, questions[:DURING_FAULT])
    assert none_wrong(answers, texts[:DURING_FAULT]) >= BEFORE_FAULT
    goes_on(router, servers, questions, texts)


def test_a_third_of_the_clients_go_away(
    servers: Servers, router: Router, questions: list[Question], texts: list[str]
) -> None:
    """Those that stream close the connection in the middle, the others before an answer."""

    def one(number: int) -> Answer:
        question = questions[number]
        leave = number % 3 == 0
        after = None if not leave else 2 if question.stream else 0
        return ask(router.address, question, servers.model, leave_after=after)

    with ThreadPoolExecutor(AT_ONCE) as clients:
        answers = list(clients.map(one, range(len(questions))))
    none_wrong(answers, texts)
    assert all(answer.complete for number, answer in enumerate(answers) if number % 3)
    goes_on(router, servers, questions, texts)
