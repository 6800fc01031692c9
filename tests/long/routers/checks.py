"""What has to hold of answers that came through a router, and of engines afterwards."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from examples.tiny_llama import prompt
from tests.engines.http_server import HttpServer
from tests.engines.steps import eventually
from tests.long.routers.deployment import Router, Servers
from tests.long.routers.questions import AT_ONCE, Answer, Question, ask, ask_all

BEFORE_FAULT = 10
"""How many requests have been answered when a fault happens."""
DURING_FAULT = 60
AFTER_FAULT = 24
STOPPED_SECONDS = 4.0

EMPTY_WHEN_IDLE = (
    "vllm:kvferry_held_pages",
    "vllm:kvferry_quarantined_pages",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)
"""Gauges that are 0 on an engine that has nothing to do and holds nothing."""


def all_right(
    router: Router, servers: Servers, questions: Sequence[Question], texts: Sequence[str]
) -> list[Answer]:
    """Ask through a router; see that every text is right and that decode pulled every prompt."""
    decode = servers["decode"]
    pulled, loads = _pulled(decode), decode.counter("vllm:kvferry_loads", "")
    answers = ask_all(router.address, questions, servers.model)
    wrong = [
        (question, answer)
        for question, answer, text in zip(questions, answers, texts, strict=True)
        if not answer.complete or answer.text != text or answer.finish_reason != "length"
    ]
    assert not wrong, f"{len(wrong)}: {wrong[:2]}\n{router.log()[-2000:]}\n{decode.log()[-2000:]}"
    assert _pulled(decode) - pulled == sum(len(question.prompt) for question in questions)
    assert decode.counter("vllm:kvferry_loads", "") - loads == len(questions)
    return answers


def none_wrong(answers: Sequence[Answer], texts: Sequence[str]) -> int:
    """See that no client took a wrong text for an answer; return how many texts are complete."""
    for answer, text in zip(answers, texts, strict=True):
        assert text.startswith(answer.text), answer
        if answer.complete:
            assert answer.text == text, answer
    return sum(answer.complete for answer in answers)


def _first_failed(answers: Sequence[Answer]) -> Answer | None:
    return next((each for each in answers if not each.complete), None)


def ask_during(
    fault: Callable[[], None], router: Router, servers: Servers, questions: Sequence[Question]
) -> list[Answer]:
    """Ask several at once; call ``fault`` when some have been answered, and ask the others then."""
    with ThreadPoolExecutor(AT_ONCE + 1) as clients:

        def asked(some: Sequence[Question]) -> list[Future[Answer]]:
            return [clients.submit(ask, router.address, each, servers.model) for each in some]

        first = asked(questions[: 2 * BEFORE_FAULT])
        answered: set[object] = set()
        while len(answered) < BEFORE_FAULT:
            answered |= wait(set(first) - answered, return_when=FIRST_COMPLETED).done
        faulty = clients.submit(fault)
        answers = [each.result() for each in [*first, *asked(questions[2 * BEFORE_FAULT :])]]
        faulty.result()
        return answers


def is_killed_and_returns(
    side: str, servers: Servers, router: Router, questions: Sequence[Question], texts: Sequence[str]
) -> None:
    """Kill a server under load and start it again; see that no text is wrong, then or later."""

    def restart() -> None:
        servers.kill(side)
        servers.launch(side)
        servers[side].wait_started()

    answers = ask_during(restart, router, servers, questions[:DURING_FAULT])
    complete = none_wrong(answers, texts[:DURING_FAULT])
    assert BEFORE_FAULT <= complete < DURING_FAULT, (complete, _first_failed(answers))
    goes_on(router, servers, questions, texts)


def stands_still(
    side: str, servers: Servers, router: Router, questions: Sequence[Question], texts: Sequence[str]
) -> None:
    """Stop a server under load for some seconds; see that no text is wrong, then or later."""

    def stop() -> None:
        servers[side].send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        servers[side].send_signal(signal.SIGCONT)

    answers = ask_during(stop, router, servers, questions[:DURING_FAULT])
    assert none_wrong(answers, texts[:DURING_FAULT]) >= BEFORE_FAULT
    goes_on(router, servers, questions, texts)


def a_third_go_away(
    servers: Servers, router: Router, questions: Sequence[Question], texts: Sequence[str]
) -> None:
    """Have a third of the clients leave; see that the others are answered, and nothing is left.

    Those that stream close the connection in the middle, the others before an answer.
    """

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


def goes_on(
    router: Router, servers: Servers, questions: Sequence[Question], texts: Sequence[str]
) -> None:
    """See that requests are answered as before, and that nothing of the others is left."""
    eventually(lambda: ask(router.address, questions[0], servers.model).complete)
    all_right(router, servers, questions[:AFTER_FAULT], texts[:AFTER_FAULT])
    nothing_left(servers)


def nothing_left(servers: Servers) -> None:
    """Wait until no engine has a request, a hold or a block in use."""
    for server in servers:
        eventually(lambda server=server: _is_empty(server, servers.model))  # type: ignore[misc]


def _is_empty(server: HttpServer, model: str) -> bool:
    """Return whether an engine has nothing, after a request that has its metrics collected."""
    status, answer = server.complete(model, prompt(5), max_tokens=1)
    assert status == 200, answer
    return all(server.gauge(name) == 0 for name in EMPTY_WHEN_IDLE)


def _pulled(server: HttpServer) -> float:
    """Return how many tokens of prompts came from another engine."""
    return server.counter("vllm:prompt_tokens_by_source", 'source="external_kv_transfer"')
