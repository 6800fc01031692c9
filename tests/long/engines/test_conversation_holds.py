"""Conversations under faults and on full engines: they cost time, never text or blocks.

`fixtures.nothing_is_left` sees after each test that both engines have all they had before.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes, ranks
from tests.engines.conversations import Conversation, words
from tests.engines.engines import PREFILL, Engine
from tests.engines.fixtures import StartEngine
from tests.engines.fleet import TALKS, TWO_WAY, Engines, cast
from tests.engines.steps import counted, texts
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

SMALL = TALKS | {
    "extra": TWO_WAY | {"kv_lease_duration": 600.0},
    # The null block included: room for eight conversations.
    "num_gpu_blocks_override": 65,
}
FITTING = 8
SAID = 230

RECLAIMED = 'conversation_holds_total{driver="loopback",outcome="reclaimed"}'

engines = cast(prefill=SMALL, decode=SMALL)


@pytest.mark.parametrize("same_port", [True, False])
def test_decode_restarted(
    reference: Engine, engines: Engines, start_engine: StartEngine, same_port: bool
) -> None:
    """At its old port or at another: the conversation goes on, with all of it computed once."""
    named = TALKS | {"transfer": TALKS["transfer"] | {"engine_id": f"again-{same_port}"}}
    talk = Conversation(prefill=engines["prefill"], decode=start_engine("again", **named))
    talk.say(words(40))
    assert talk.ticket is not None
    port = {"side_channel_port": talk.ticket["remote_port"]} if same_port else {}
    talk.decode.kill()
    talk.decode = start_engine("again", **named | {"extra": TWO_WAY | port})
    talk.check_turn(reference, words(30), len(talk.tokens) + 30, 0)
    talk.check_turn(reference, words(20), 21, len(talk.tokens) - 1)
    talk.decode.close()


# Full engines: what they hold for conversations goes first, and nobody waits for it.


def fill(engines: Engines, count: int, answered: int = 20) -> list[Conversation]:
    """Conversations after their first turns, the oldest first; decode holds 8 blocks of each."""
    prefill, decode = engines["prefill"], engines["decode"]
    talks = []
    for _ in range(count):
        talks.append(Conversation(prefill=prefill, decode=decode))
        talks[-1].say(words(SAID), max_tokens=answered)
    assert decode.run(probes.kept) == count
    eventually(lambda: prefill.run(ranks.holds) == [0])
    return talks


def test_running_request_is_not_preempted(reference: Engine, engines: Engines) -> None:
    """It grows into the blocks of the oldest conversation, and loses only a step or two."""
    fill(engines, FITTING - 1)
    decode, asked = engines["decode"], words(100)
    before = decode.run(probes.exposed)[RECLAIMED]
    assert texts(decode, asked, max_tokens=300) == texts(reference, asked, max_tokens=300)
    eventually(lambda: decode.run(probes.exposed)[RECLAIMED] == before + 1)
    assert counted(decode, "vllm:num_preemptions") == 0


def test_engines_that_need_each_others_holds(reference: Engine, engines: Engines) -> None:
    """Decode is full of answers that prefill asks for, prefill of prompts that decode asks for."""
    talks = fill(engines, FITTING)
    prefill, decode = engines["prefill"], engines["decode"]
    prompts = [prompt(SAID, seed=90 + number) for number in range(FITTING)]
    tickets = prefill.prefill(*prompts)
    turns = [[*each.tokens, *words(20)] for each in talks]
    more = [words(SAID) for _ in range(4)]
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
        for request, each in zip(requests, prompts, strict=True):
            if request in prefill.finished:
                [prefilled] = prefill.results([request])
                [decoding[request]] = decode.submit(each, params=prefilled.params)
        return len(decoding) == len(requests)

    eventually(routed)
    return [decoding[request] for request in requests]
