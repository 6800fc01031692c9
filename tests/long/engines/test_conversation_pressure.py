"""Conversations on engines that are full: what they hold goes first, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.conversations import RECOMPUTE, ROLE, TWO_WAY, Conversation
from tests.engines.engines import PREFILL, Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import eventually, texts
from tests.long.engines.conversation_holds import (
    counted,
    held,
    kept,
    nothing_lost,
    outcomes,
)

pytestmark = pytest.mark.timeout(300)

LONG = 600.0
"""Seconds of a lease that no test waits for."""
BLOCKS = 65
"""Of 32 tokens each, the null block included: room for eight conversations."""
FITTING = 8
SAID = 230
ANSWER = 20
SOON = 4
"""In so many steps of an engine a request has blocks that others held."""
PREEMPTIONS = "vllm:num_preemptions"
FAILED = "vllm:kvferry_failed_loads"
Pair = tuple[Engine, Engine]


@pytest.fixture(scope="module")
def engines(start_engine: StartEngine) -> Pair:
    options: dict[str, Any] = {
        "extra": TWO_WAY | {"kv_lease_duration": LONG},
        "transfer": RECOMPUTE,
        "num_gpu_blocks_override": BLOCKS,
    }
    prefill, decode = (start_engine(f"small-{name}", ROLE, **options) for name in "pd")
    return prefill, decode


@pytest.fixture
def pair(engines: Pair) -> Iterator[Pair]:
    """The engines. At the end, both have all their blocks."""
    with nothing_lost(*engines):
        yield engines


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file that does not exist before a test makes it, or ends; see `probes.slow_reads`."""
    path = tmp_path / "gate"
    yield path
    path.touch()


def talk(pair: Pair, count: int, seed: int) -> list[Conversation]:
    """Conversations after their first turns, the oldest first; decode holds 8 blocks of each."""
    prefill, decode = pair
    prompts = [prompt(SAID, seed=seed + number) for number in range(count)]
    tickets = prefill.prefill(*prompts)
    talks = []
    for words, ticket in zip(prompts, tickets, strict=True):
        [answer] = decode.generate(words, params=ticket, max_tokens=ANSWER)
        tokens = [*words, *answer.tokens]
        talks.append(
            Conversation(prefill=prefill, decode=decode, tokens=tokens, ticket=answer.params)
        )
    assert decode.run(kept) == count
    eventually(lambda: prefill.run(held) == 0)
    return talks


def test_new_request_is_served_at_once(reference: Engine, pair: Pair) -> None:
    """The oldest conversation makes room, and no other."""
    first, second, *_ = talk(pair, FITTING, seed=0)
    decode, before = pair[1], outcomes(pair[1])
    assert decode.run(probes.free_blocks) == 0
    with decode.paused():
        [request] = decode.submit(prompt(SAID, seed=50), max_tokens=1)
        decode.step(SOON)
        assert decode.finished == [request]
    decode.results([request])
    counted(decode, before, reclaimed=1)
    for each, pulled in ((second, len(second.tokens) - 1), (first, 0)):
        turn = each.say(prompt(5, seed=51), max_tokens=5)
        assert turn.completion.text == texts(reference, turn.prompt, max_tokens=5)[0]
        if pulled:
            assert turn.pulled == pulled


def test_running_request_is_not_preempted(reference: Engine, pair: Pair) -> None:
    """It grows into the blocks of the oldest conversation, and loses only a step or two."""
    talk(pair, FITTING - 1, seed=10)
    decode, before = pair[1], outcomes(pair[1])
    [text] = texts(decode, prompt(100, seed=60), max_tokens=300)
    assert text == texts(reference, prompt(100, seed=60), max_tokens=300)[0]
    counted(decode, before, reclaimed=1)
    assert decode.run(probes.metrics).get(PREEMPTIONS, 0) == 0


def test_reclaimed_while_it_is_pulled(reference: Engine, pair: Pair, gate: Path) -> None:
    """A claim does not protect a conversation: prefill's fence fails, and it computes."""
    [oldest, *_] = talk(pair, FITTING, seed=20)
    prefill, decode = pair
    failed = prefill.run(probes.metrics).get(FAILED, 0)
    prefill.run(probes.slow_reads, str(gate))
    turn = [*oldest.tokens, *prompt(20, seed=70)]
    [request] = prefill.submit(turn, max_tokens=1, params=oldest.ticket)
    eventually(gate.with_suffix(".reached").exists)
    eventually(lambda: decode.run(probes.claimed) == 1)
    texts(decode, prompt(SAID, seed=71), max_tokens=1)
    assert decode.run(probes.claimed) == 0
    gate.touch()
    [prefilled] = prefill.results([request])
    assert prefill.run(probes.metrics)[FAILED] - failed == 1
    assert texts(decode, turn, params=prefilled.params) == texts(reference, turn)


def test_abort_while_prefill_waits_for_blocks(reference: Engine, pair: Pair) -> None:
    """Decode hears of it, and gives up the pages; what fills prefill is still good."""
    [aborted] = talk(pair, 1, seed=30)
    prefill, decode = pair
    prompts = [prompt(SAID, seed=80 + number) for number in range(FITTING)]
    tickets = prefill.prefill(*prompts)
    with prefill.paused():
        turn = [*aborted.tokens, 1]
        [request] = prefill.submit(turn, max_tokens=1, params=aborted.ticket)
        prefill.step(2)
        assert prefill.run(probes.statuses)[-1] == "WAITING"
        prefill.abort(request)
    eventually(lambda: decode.run(kept) == 0)
    assert texts(decode, *prompts, params=tickets) == texts(reference, *prompts)


def test_engines_that_need_each_others_holds(reference: Engine, pair: Pair) -> None:
    """Decode is full of answers that prefill asks for, prefill of prompts that decode asks for."""
    prefill, decode = pair
    talks = talk(pair, FITTING, seed=40)
    prompts = [prompt(SAID, seed=90 + number) for number in range(FITTING)]
    tickets = prefill.prefill(*prompts)
    turns = [[*each.tokens, *prompt(20, seed=100)] for each in talks]
    more = [prompt(SAID, seed=110 + number) for number in range(4)]
    params = [each.ticket for each in talks] + [PREFILL] * len(more)
    prefilling = prefill.submit(*turns, *more, max_tokens=1, params=params)
    decoding = decode.submit(*prompts, *more, params=[*tickets, *[None] * len(more)])
    decoding += route(prefill, decode, prefilling, [*turns, *more])
    asked = [*prompts, *more, *turns, *more]
    assert [each.text for each in decode.results(decoding)] == texts(reference, *asked)


def route(
    prefill: Engine, decode: Engine, requests: Sequence[str], prompts: Sequence[list[int]]
) -> list[str]:
    """Hand each prompt to decode as soon as prefill has computed it, in any sequence."""
    decoding: dict[str, str] = {}

    def routed() -> bool:
        prefill.run(probes.free_blocks)  # takes in what has ended
        for request, words in zip(requests, prompts, strict=True):
            if request in prefill.finished:
                [prefilled] = prefill.results([request])
                [decoding[request]] = decode.submit(words, params=prefilled.params)
        return len(decoding) == len(requests)

    eventually(routed)
    return [decoding[request] for request in requests]


def test_loaded_request_that_waits_for_blocks(reference: Engine, pair: Pair, gate: Path) -> None:
    """While a request loads, an answer takes the blocks that the rest of its prompt needs."""
    prefill, decode = pair
    front, whole = prompt(32, seed=120), [*prompt(32, seed=120), *prompt(500, seed=121)]
    [ticket, other] = prefill.prefill(front, prompt(992, seed=122))
    decode.run(probes.slow_reads, str(gate))
    [request] = decode.submit(whole, params=ticket)
    eventually(gate.with_suffix(".reached").exists)
    # vLLM computes a prompt with prompt_logprobs itself; so the ticket's pages are not loaded.
    for words in (prompt(992, seed=122), prompt(900, seed=122)):
        decode.generate(words, params=other, max_tokens=1, prompt_logprobs=1)
    assert decode.run(kept) == 2
    before = outcomes(decode)
    gate.touch()
    [completion] = decode.results([request])
    assert completion.text == texts(reference, whole)[0]
    counted(decode, before, reclaimed=1)
