"""What has to hold of answers that came through a router, and of engines afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from examples.tiny_llama import prompt
from tests.engines.http_server import HttpServer, Program
from tests.long.routers.deployment import Servers
from tests.long.routers.questions import AT_ONCE, Answer, Question, ask, ask_all
from tests.waiting import eventually

BEFORE_FAULT = 10  # how many requests have been answered when a fault happens
DURING_FAULT = 60
AFTER_FAULT = 24

EMPTY_WHEN_IDLE = (
    "vllm:kvferry_held_pages",
    "vllm:kvferry_quarantined_pages",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)
"""Gauges that are 0 on an engine that has nothing to do and holds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """What clients ask through a router, and what one ordinary engine answers to that."""

    servers: Servers
    router: Program
    questions: Sequence[Question]
    texts: Sequence[str]

    def check(self, count: int | None = None) -> list[Answer]:
        """See that the first texts are right, decode pulled every prompt, and nothing is left."""
        questions, texts = self.questions[:count], self.texts[:count]
        decode = self.servers["decode"]
        pulled, loads = decode.pulled(), decode.counter("vllm:kvferry_loads")
        answers = ask_all(self.router.address, questions, self.servers.model)
        wrong = [
            (question, answer)
            for question, answer, text in zip(questions, answers, texts, strict=True)
            if not answer.complete or answer.text != text or answer.finish_reason != "length"
        ]
        logs = self.router.log()[-2000:], decode.log()[-2000:]
        assert not wrong, f"{len(wrong)}: {wrong[:2]}\n{logs}"
        assert decode.pulled() - pulled == sum(len(question.prompt) for question in questions)
        assert decode.counter("vllm:kvferry_loads") - loads == len(questions)
        nothing_left(self.servers)
        return answers

    def check_during(self, fault: Callable[[], None]) -> int:
        """Ask several at once, cause a fault meanwhile, and return how many are complete.

        No client takes a wrong text for an answer, then or later.
        """
        questions = self.questions[:DURING_FAULT]
        with ThreadPoolExecutor(AT_ONCE + 1) as clients:

            def asked(some: Sequence[Question]) -> list[Future[Answer]]:
                address, model = self.router.address, self.servers.model
                return [clients.submit(ask, address, each, model) for each in some]

            first = asked(questions[: 2 * BEFORE_FAULT])
            answered: set[object] = set()
            while len(answered) < BEFORE_FAULT:
                answered |= wait(set(first) - answered, return_when=FIRST_COMPLETED).done
            faulty = clients.submit(fault)
            answers = [each.result() for each in [*first, *asked(questions[2 * BEFORE_FAULT :])]]
            faulty.result()
        complete = self._none_wrong(answers)
        assert complete >= BEFORE_FAULT
        self._goes_on()
        return complete

    def check_killed(self, side: str) -> None:
        """Kill a server under load and start it again."""

        def restart() -> None:
            self.servers.kill(side)
            self.servers.launch(side)
            self.servers[side].wait_started()

        assert self.check_during(restart) < DURING_FAULT

    def _none_wrong(self, answers: Sequence[Answer]) -> int:
        """See that no text is wrong; return how many are complete."""
        for answer, text in zip(answers, self.texts, strict=False):
            assert answer.text == text if answer.complete else text.startswith(answer.text), answer
        return sum(answer.complete for answer in answers)

    def _goes_on(self) -> None:
        """See that requests are answered as before."""
        first, model = self.questions[0], self.servers.model
        eventually(lambda: ask(self.router.address, first, model).complete)
        self.check(AFTER_FAULT)


def nothing_left(servers: Servers) -> None:
    """Wait until no engine has a request, a hold or a block in use."""
    for server in servers:
        eventually(lambda server=server: _is_empty(server, servers.model))  # type: ignore[misc]


def _is_empty(server: HttpServer, model: str) -> bool:
    """Return whether an engine has nothing, after a request that has its metrics collected."""
    server.texts(prompt(5), model, max_tokens=1)
    return all(server.gauge(name) == 0 for name in EMPTY_WHEN_IDLE)
