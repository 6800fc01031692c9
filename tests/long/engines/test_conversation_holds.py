"""Conversations under faults and on full engines: they cost time, never text or blocks.

`fixtures.nothing_is_left` sees after each test that both engines have all they had before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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

CHUNK = 64
"""How many tokens prefill computes in one step."""
LEASE = 1.0
SMALL = TALKS | {
    "extra": TWO_WAY | {"kv_lease_duration": 600.0},
    # The null block included: room for eight conversations.
    "num_gpu_blocks_override": 65,
}
FITTING = 8
SAID = 230
FAILED = "vllm:kvferry_failed_loads"

engines = cast(
    prefill=TALKS | {"max_num_batched_tokens": CHUNK},
    decode=TALKS | {"async_scheduling": True},
    # Holds what is claimed for a short time, and at most ten blocks.
    hasty=TALKS | {"extra": TWO_WAY | {"kv_lease_duration": LEASE, "max_held_fraction": 0.02}},
    brief=TALKS | {"extra": TWO_WAY | {"decoder_kv_blocks_ttl": LEASE}, "transfer": {}},
    small_prefill=SMALL,
    small_decode=SMALL,
)


@pytest.fixture
def talk(engines: Engines) -> Conversation:
    """A conversation after its first turn, of which decode alone holds pages."""
    found = Conversation(prefill=engines["prefill"], decode=engines["decode"])
    found.say(words(100))
    eventually(lambda: engines["prefill"].run(ranks.holds) == [0])
    return found


def outcomes(engine: Engine) -> dict[str, float]:
    """How many conversations an engine has held, by what became of that."""
    samples: dict[str, float] = engine.run(probes.exposed)
    name = 'conversation_holds_total{driver="loopback",outcome="'
    return {key[len(name) : -2]: value for key, value in samples.items() if key.startswith(name)}


def check_outcomes(engine: Engine, before: dict[str, float], **more: int) -> None:
    """Wait until an engine's ``outcomes`` are so many more: metrics may come a step later."""
    wanted = {outcome: before[outcome] + count for outcome, count in more.items()}
    eventually(lambda: wanted.items() <= outcomes(engine).items())


def check_next(reference: Engine, talk: Conversation, said: int) -> None:
    """Prefill computes only what the user says, and the token that decode sampled last."""
    talk.check_turn(reference, words(said), said + 1, len(talk.tokens) - 1)


# Restarts, and ends.


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
    check_next(reference, talk, 20)
    talk.decode.close()


def test_prefill_killed_while_it_pulls(
    reference: Engine,
    engines: Engines,
    talk: Conversation,
    start_engine: StartEngine,
    gate: Path,
) -> None:
    """Decode's pages come back after a lease; conversations go on with another prefill."""
    hasty, mortal = engines["hasty"], start_engine("mortal", **TALKS)
    before = outcomes(hasty)
    lost = Conversation(prefill=mortal, decode=hasty)
    lost.say(words(61))
    mortal.run(ranks.disturb_reads, "slow", str(gate))
    mortal.submit([*lost.tokens, 1], max_tokens=1, params=lost.ticket)
    eventually(lambda: hasty.run(ranks.claimed) == 1)
    mortal.kill()
    eventually(lambda: hasty.run(ranks.holds) == [0])
    assert "nobody read its pages within the lease" in hasty.log()
    check_outcomes(hasty, before, expired=1)
    lost.prefill = engines["prefill"]
    lost.check(reference, lost.say(words(20)))
    check_next(reference, talk, 20)


# Aborts, in the order of a turn's phases.


def test_abort_while_prefill_pulls(talk: Conversation, gate: Path) -> None:
    """Its blocks stay until no byte can land in them; then decode's come back, too."""
    talk.prefill.run(ranks.disturb_reads, "slow", str(gate))
    turn = [*talk.tokens, *words(20)]
    [request] = talk.prefill.submit(turn, max_tokens=1, params=talk.ticket)
    eventually(gate.with_suffix(".reached").exists)
    talk.prefill.abort(request)
    gate.touch()
    eventually(lambda: talk.decode.run(probes.kept) == 0)


# Full engines: what they hold for conversations goes first, and nobody waits for it.


def fill(engines: Engines, count: int, answered: int = 20) -> list[Conversation]:
    """Conversations after their first turns, the oldest first; decode holds 8 blocks of each."""
    prefill, decode = engines["small_prefill"], engines["small_decode"]
    talks = []
    for _ in range(count):
        talks.append(Conversation(prefill=prefill, decode=decode))
        talks[-1].say(words(SAID), max_tokens=answered)
    assert decode.run(probes.kept) == count
    eventually(lambda: prefill.run(ranks.holds) == [0])
    return talks


def test_new_request_is_served_at_once(reference: Engine, engines: Engines) -> None:
    """The oldest conversation makes room, and no other."""
    first, second, *_ = fill(engines, FITTING)
    decode = engines["small_decode"]
    before = outcomes(decode)
    assert decode.run(probes.free_blocks) == 0
    with decode.paused():
        [request] = decode.submit(words(SAID), max_tokens=1)
        decode.step(4)
        assert decode.finished == [request]
    decode.results([request])
    check_outcomes(decode, before, reclaimed=1)
    second.check_turn(reference, words(5), 6, len(second.tokens) - 1, max_tokens=5)
    first.check(reference, first.say(words(5), max_tokens=5), max_tokens=5)


def test_running_request_is_not_preempted(reference: Engine, engines: Engines) -> None:
    """It grows into the blocks of the oldest conversation, and loses only a step or two."""
    fill(engines, FITTING - 1)
    decode, asked = engines["small_decode"], words(100)
    before = outcomes(decode)
    assert texts(decode, asked, max_tokens=300) == texts(reference, asked, max_tokens=300)
    check_outcomes(decode, before, reclaimed=1)
    assert counted(decode, "vllm:num_preemptions") == 0


def test_engines_that_need_each_others_holds(reference: Engine, engines: Engines) -> None:
    """Decode is full of answers that prefill asks for, prefill of prompts that decode asks for."""
    talks = fill(engines, FITTING)
    prefill, decode = engines["small_prefill"], engines["small_decode"]
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
