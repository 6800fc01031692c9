"""What an HTTP client gets where a ticket is refused or comes too late, under both policies."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines.engines import PREFILL as WANTED
from tests.long.routers.checks import nothing_left
from tests.long.routers.deployment import DECODE, PREFILL, Servers
from tests.long.routers.questions import Answer, Question, ask

pytestmark = pytest.mark.timeout(400)

LEASE_SECONDS = 8.0
FORMS = slice(60, 64)  # of the common questions: one of each form, with some 300 tokens
INTERNAL = {
    "message": "Internal server error",
    "type": "InternalServerError",
    "param": None,
    "code": 500,
}
"""What vLLM says of every request that fails in its engine."""
POLICIES = ("fail", "recompute")

Ticket = dict[str, Any]


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A prefill server, and decode servers of both policies."""
    sides = {"prefill": PREFILL}
    sides |= {policy: DECODE | {"kv_load_failure_policy": policy} for policy in POLICIES}
    started = Servers(
        checkpoint,
        tmp_path_factory.mktemp("policies"),
        sides,
        extra={"kv_lease_duration": LEASE_SECONDS},
    )
    with contextlib.closing(started):
        yield started.wait_started()


def prefilled(servers: Servers, questions: Sequence[Question]) -> dict[str, list[Ticket]]:
    """Do what a router does first, for a decode server of either policy; return the tickets."""
    more = {"kv_transfer_params": WANTED, "max_tokens": 1}
    address = servers["prefill"].address

    def ticket(question: Question) -> Ticket:
        answer = ask(address, replace(question, stream=False, more=more), servers.model)
        assert answer.params, answer
        found: Ticket = answer.params
        return found

    return {policy: [ticket(question) for question in questions] for policy in POLICIES}


def check(
    servers: Servers,
    questions: Sequence[Question],
    texts: Sequence[str],
    tickets: dict[str, list[Ticket]],
    cause: str,
) -> None:
    """See what clients get for bad tickets, and that the log names request and ``cause``.

    The requests' ids are ``client-`` and a number.
    """
    for policy in POLICIES:
        server = servers[policy]
        log = len(server.log())
        for number, ticket in enumerate(tickets[policy]):
            more = {"kv_transfer_params": ticket}
            asked = replace(questions[number], id=f"client-{number}", more=more)
            answer = ask(server.address, asked, servers.model)
            if policy == "fail":
                failed(asked, answer)
            else:
                assert answer.complete, answer
                assert (answer.text, answer.params) == (texts[number], None), answer
            assert re.search(f"client-{number}-.*{cause}", server.log()[log:])


def failed(question: Question, answer: Answer) -> None:
    """The request has ended with vLLM's error, and no text."""
    assert answer.status == (200 if question.stream else 500), answer
    assert answer.error == INTERNAL, answer
    assert (answer.text, answer.finish_reason, answer.params) == ("", None, None), answer
    assert answer.done, answer


def test_a_ticket_that_was_altered(
    servers: Servers, questions: list[Question], texts: list[str]
) -> None:
    tickets = prefilled(servers, questions[FORMS])
    for ticket in (ticket for each in tickets.values() for ticket in each):
        ticket["remote_request_id"] += "x"
    check(servers, questions[FORMS], texts[FORMS], tickets, "cause signature")


def test_a_ticket_of_an_engine_that_died(
    servers: Servers, questions: list[Question], texts: list[str]
) -> None:
    """Before its return at the same address, and after."""
    forms, expected = questions[FORMS], texts[FORMS]
    while_dead, after = (prefilled(servers, forms) for _ in range(2))
    servers.kill("prefill")
    check(servers, forms, expected, while_dead, "cause (peer_lost|unreachable)")
    servers.launch("prefill")
    servers["prefill"].wait_started()
    check(servers, forms, expected, after, "cause ticket.*was restarted since")
    nothing_left(servers)
