"""What an HTTP client gets where a ticket is refused or comes too late, under both policies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines.engines import PREFILL as WANTED
from tests.long.routers.checks import nothing_left
from tests.long.routers.deployment import (
    DECODE,
    HEALTH,
    MULTI_TURN,
    PREFILL,
    TOY,
    Router,
    Servers,
    proxy,
    vllm_router,
)
from tests.long.routers.questions import Answer, Question, ask

pytestmark = pytest.mark.timeout(400)

LEASE_SECONDS = 8.0
FORMS = slice(60, 64)
"""Of the common questions: one of each form, with some 300 tokens."""

INTERNAL = {
    "message": "Internal server error",
    "type": "InternalServerError",
    "param": None,
    "code": 500,
}
"""What vLLM says of every request that fails in its engine."""

POLICIES = ("fail", "recompute")

Ticket = dict[str, Any]
Start = Callable[[Router], Router]


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A prefill server, decode servers of both policies, and one that refuses all tickets."""
    sides = {"prefill": PREFILL, "stranger": DECODE}
    sides |= {policy: DECODE | {"kv_load_failure_policy": policy} for policy in POLICIES}
    started = Servers(
        checkpoint,
        tmp_path_factory.mktemp("policies"),
        sides,
        extra={"kv_lease_duration": LEASE_SECONDS},
        strangers=["stranger"],
    )
    try:
        yield started.wait_started()
    finally:
        started.close()


@pytest.fixture
def forms(questions: list[Question]) -> list[Question]:
    return questions[FORMS]


@pytest.fixture
def expected(texts: list[str]) -> list[str]:
    return texts[FORMS]


def prefilled(servers: Servers, questions: Sequence[Question]) -> list[Ticket]:
    """Do what a router does first; return the tickets."""
    more = {"kv_transfer_params": WANTED, "max_tokens": 1}
    answers = [
        ask(servers["prefill"].address, replace(question, stream=False, more=more), servers.model)
        for question in questions
    ]
    tickets = [answer.params for answer in answers]
    assert all(tickets), answers
    return tickets


def decoded(
    servers: Servers, side: str, questions: Sequence[Question], tickets: Sequence[Ticket]
) -> list[Answer]:
    """Do what a router does then. The requests' ids are ``client-`` and a number."""
    return [
        ask(
            servers[side].address,
            replace(question, id=f"client-{number}", more={"kv_transfer_params": ticket}),
            servers.model,
        )
        for number, (question, ticket) in enumerate(zip(questions, tickets, strict=True))
    ]


def fails_or_recomputes(
    servers: Servers,
    questions: Sequence[Question],
    texts: Sequence[str],
    tickets: dict[str, list[Ticket]],
    cause: str,
) -> None:
    """See what clients get for bad tickets, and that the log names request and ``cause``."""
    for policy in POLICIES:
        log = len(servers[policy].log())
        answers = decoded(servers, policy, questions, tickets[policy])
        check = failed if policy == "fail" else recomputed
        for question, answer, text in zip(questions, answers, texts, strict=True):
            check(question, answer, text)
        lines = servers[policy].log()[log:].splitlines()
        for number in range(len(questions)):
            named = [line for line in lines if re.search(f"client-{number}-.*{cause}", line)]
            assert named, lines


def failed(question: Question, answer: Answer, text: str) -> None:
    """The request has ended with vLLM's error, and no text."""
    assert answer.status == (200 if question.stream else 500), answer
    assert answer.error == INTERNAL, answer
    assert answer.text == "", answer
    assert answer.finish_reason is None, answer
    assert answer.params is None, answer
    assert answer.done, answer


def recomputed(question: Question, answer: Answer, text: str) -> None:
    """The client notices nothing."""
    assert answer.complete, answer
    assert (answer.text, answer.finish_reason) == (text, "length"), answer
    assert answer.params is None, answer


def for_both(servers: Servers, questions: Sequence[Question]) -> dict[str, list[Ticket]]:
    return {policy: prefilled(servers, questions) for policy in POLICIES}


def used_by_both(
    servers: Servers, questions: Sequence[Question], texts: Sequence[str]
) -> dict[str, list[Ticket]]:
    """Hand over to both, and see that every text is right; return the used tickets."""
    used: dict[str, list[Ticket]] = {policy: [] for policy in POLICIES}
    for policy in POLICIES:
        loads = servers[policy].counter("vllm:kvferry_loads", "")
        for question, text in zip(questions, texts, strict=True):
            tickets = prefilled(servers, [question])
            (answer,) = decoded(servers, policy, [question], tickets)
            recomputed(question, answer, text)
            used[policy] += tickets
        assert servers[policy].counter("vllm:kvferry_loads", "") - loads == len(questions)
    return used


def test_a_ticket_that_was_altered(
    servers: Servers, forms: list[Question], expected: list[str]
) -> None:
    tickets = for_both(servers, forms)
    for ticket in (ticket for each in tickets.values() for ticket in each):
        ticket["remote_request_id"] += "x"
    fails_or_recomputes(servers, forms, expected, tickets, "cause signature")


def test_a_ticket_that_was_used(
    servers: Servers, forms: list[Question], expected: list[str]
) -> None:
    used = used_by_both(servers, forms, expected)
    fails_or_recomputes(servers, forms, expected, used, "cause stale")


def test_a_ticket_of_an_engine_that_died(
    servers: Servers, forms: list[Question], expected: list[str]
) -> None:
    """Before its return at the same address, and after."""
    while_dead, after = for_both(servers, forms), for_both(servers, forms)
    servers.kill("prefill")
    fails_or_recomputes(servers, forms, expected, while_dead, "cause (peer_lost|unreachable)")
    servers.launch("prefill")
    servers["prefill"].wait_started()
    fails_or_recomputes(servers, forms, expected, after, "cause ticket.*was restarted since")
    used_by_both(servers, forms, expected)
    nothing_left(servers)


def test_vllm_router_passes_the_error_on(
    servers: Servers, started: Start, router_program: Path, tmp_path: Path, forms: list[Question]
) -> None:
    """The router does not try again."""
    router = started(vllm_router(router_program, servers, tmp_path, decode="stranger"))
    for question in forms:
        failed(question, ask(router.address, question, servers.model), "")
    refused = servers["stranger"].counter("vllm:kvferry_refused_tickets", 'reason="signature"')
    assert refused == len(forms)


@pytest.mark.parametrize(
    ("script", "whole"),
    [(TOY, (0, None)), (MULTI_TURN, (200, None))],
    ids=["toy_proxy_server", "disagg_proxy_multiturn"],
)
def test_proxies_hide_the_error_of_a_whole_answer(
    servers: Servers,
    started: Start,
    vllm_source: Path,
    tmp_path: Path,
    forms: list[Question],
    script: Path,
    whole: tuple[int, str | None],
) -> None:
    """The toy proxy breaks the connection, and the multi-turn proxy answers with an empty text."""
    started_proxy = proxy(
        vllm_source / script, HEALTH[script], servers, tmp_path, decode="stranger"
    )
    router = started(started_proxy)
    for question in forms:
        answer = ask(router.address, question, servers.model)
        if question.stream:
            failed(question, answer, "")
        else:
            assert (answer.status, answer.finish_reason, answer.text) == (*whole, ""), answer
