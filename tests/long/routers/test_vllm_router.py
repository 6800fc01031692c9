"""vllm-router between real servers, also while a server dies or stops and clients go away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines.http_server import post
from tests.long.routers.checks import (
    a_third_go_away,
    all_right,
    is_killed_and_returns,
    nothing_left,
    stands_still,
)
from tests.long.routers.deployment import Router, Servers, vllm_router
from tests.long.routers.questions import Question

pytestmark = pytest.mark.timeout(400)

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
