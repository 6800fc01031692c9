"""Conversations under faults: restarts, wrong tickets and aborts cost time, never text or blocks.

The text of each turn is compared with that of an ordinary engine.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.conversations import RECOMPUTE, ROLE, TWO_WAY, Conversation, Turn
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import eventually, pulled_by, texts
from tests.long.engines.conversation_holds import (
    counted,
    forged,
    held,
    kept,
    nothing_lost,
    outcomes,
)

pytestmark = pytest.mark.timeout(300)

CHUNK = 64
"""How many tokens prefill computes in one step."""
LEASE = 1.0
WAITS = "WAITING_FOR_REMOTE_KVS"
FAILED = "vllm:kvferry_failed_loads"
LATE = "nobody read its pages within the lease"


@pytest.fixture(scope="module")
def prefill(start_engine: StartEngine) -> Engine:
    return start_engine(
        "prefill", ROLE, extra=TWO_WAY, transfer=RECOMPUTE, max_num_batched_tokens=CHUNK
    )


@pytest.fixture(scope="module")
def decode(start_engine: StartEngine) -> Engine:
    """Holds its answers for a long time, and schedules a step ahead."""
    options = {"transfer": RECOMPUTE, "async_scheduling": True}
    return start_engine("decode", ROLE, extra=TWO_WAY, **options)


@pytest.fixture(scope="module")
def hasty(start_engine: StartEngine) -> Engine:
    """Decodes, holds what is claimed for a short time, and at most ten blocks."""
    limits = {"kv_lease_duration": LEASE, "max_held_fraction": 0.02}
    return start_engine("hasty", ROLE, extra=TWO_WAY | limits, transfer=RECOMPUTE)


@pytest.fixture
def talk(prefill: Engine, decode: Engine) -> Iterator[Conversation]:
    """A conversation after its first turn. At its end, both engines have all their blocks."""
    with nothing_lost(prefill, decode):
        free = prefill.run(probes.free_blocks)
        conversation = Conversation(prefill=prefill, decode=decode)
        conversation.say(prompt(100, seed=1))
        eventually(lambda: prefill.run(probes.free_blocks) == free)  # decode has told it
        yield conversation


def check(reference: Engine, turn: Turn, **options: Any) -> None:
    """The text is that of an engine that computes everything."""
    assert turn.completion.text == texts(reference, turn.prompt, **options)[0]


def computed_whole(reference: Engine, turn: Turn) -> None:
    """Prefill pulled nothing for a turn, and its text is right."""
    check(reference, turn)
    assert (turn.computed, turn.pulled) == (len(turn.prompt), 0)


def pulled_history(reference: Engine, turn: Turn, said: int, sampled: int = 1) -> None:
    """Prefill computed only what the user said, and the token that decode sampled last."""
    check(reference, turn)
    computed = said + sampled
    assert (turn.computed, turn.pulled) == (computed, len(turn.prompt) - computed)


# Restarts.


def test_decode_restarted(reference: Engine, prefill: Engine, start_engine: StartEngine) -> None:
    """At its old port or at another: the conversation goes on, with all of it computed once."""
    named = RECOMPUTE | {"engine_id": "decode-again"}
    decode = start_engine("decode-again", ROLE, extra=TWO_WAY, transfer=named)
    with nothing_lost(prefill):
        talk = Conversation(prefill=prefill, decode=decode)
        talk.say(prompt(40, seed=2))
        for same_port in (True, False):
            assert talk.ticket is not None
            port = {"side_channel_port": talk.ticket["remote_port"]} if same_port else {}
            talk.decode.kill()
            talk.decode = start_engine("decode-again", ROLE, extra=TWO_WAY | port, transfer=named)
            computed_whole(reference, talk.say(prompt(30, seed=3)))
            _abort_during_the_handshake(prefill, talk.decode)
            pulled_history(reference, talk.say(prompt(20, seed=4)), 20)
    talk.decode.close()


def _abort_during_the_handshake(prefill: Engine, decode: Engine) -> None:
    """Decode does not answer prefill's first connection to it; its pages come back when it does."""
    talk = Conversation(prefill=prefill, decode=decode)
    talk.say(prompt(50, seed=2))
    before, pid = decode.run(kept), decode.run(_pid)
    os.kill(pid, signal.SIGSTOP)
    try:
        [request] = prefill.submit([*talk.tokens, 1], max_tokens=1, params=talk.ticket)
        eventually(lambda: prefill.run(probes.statuses) == [WAITS])
        prefill.abort(request)
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: prefill.run(probes.statuses) == [])
    eventually(lambda: decode.run(kept) == before - 1)


def test_prefill_killed_while_it_pulls(
    reference: Engine,
    prefill: Engine,
    decode: Engine,
    hasty: Engine,
    start_engine: StartEngine,
    tmp_path: Path,
) -> None:
    """Decode's pages come back after a lease; another conversation goes on with a new prefill."""
    mortal = start_engine("mortal", ROLE, extra=TWO_WAY, transfer=RECOMPUTE)
    before = outcomes(hasty)
    with nothing_lost(prefill, decode, hasty):
        talk = Conversation(prefill=mortal, decode=decode)
        talk.say(prompt(60, seed=5))
        lost = Conversation(prefill=mortal, decode=hasty)
        lost.say(prompt(61, seed=5))
        eventually(lambda: hasty.run(held) == hasty.run(kept) == 1)
        gate = tmp_path / "gate"
        mortal.run(probes.slow_reads, str(gate))
        mortal.submit([*lost.tokens, 1], max_tokens=1, params=lost.ticket)
        eventually(lambda: hasty.run(probes.claimed) == 1)
        assert gate.with_suffix(".reached").exists()
        mortal.kill()
        eventually(lambda: hasty.run(held) == 0)
        assert LATE in hasty.log()
        talk.prefill = lost.prefill = prefill
        pulled_history(reference, talk.say(prompt(20, seed=6)), 20)
        check(reference, lost.say(prompt(20, seed=6)))
    counted(hasty, before, expired=1)


def test_conversations_beyond_the_limit(reference: Engine, prefill: Engine, hasty: Engine) -> None:
    """The oldest one's pages are given up, which nobody is warned of; a long answer has none."""
    before = outcomes(hasty)
    with nothing_lost(prefill, hasty):
        first, second, third = (Conversation(prefill=prefill, decode=hasty) for _ in range(3))
        for number, talk in enumerate((first, second, third)):
            talk.say(prompt(100, seed=24 + number))
        counted(hasty, before, evicted=1)
        pulled_history(reference, second.say(prompt(20, seed=27)), 20)
        check(reference, first.say(prompt(20, seed=27)))
        third.say(prompt(300, seed=28))
        assert third.ticket is None
        counted(hasty, before, refused=1)
    assert "cause evicted" not in hasty.log()


def test_nobody_asks_again(start_engine: StartEngine, prefill: Engine) -> None:
    """The answer's pages come back after their time to live, and no line warns of that."""
    brief = start_engine("brief", ROLE, extra=TWO_WAY | {"decoder_kv_blocks_ttl": LEASE})
    before = outcomes(brief)
    with nothing_lost(prefill, brief):
        talk = Conversation(prefill=prefill, decode=brief)
        talk.say(prompt(70, seed=7))
        counted(brief, before, expired=1)
    start, serving = brief.log().split("serves engine")
    assert not re.search("WARNING.*(kvferry|expired|lease)", serving)
    assert "kv_load_failure_policy is 'fail'" in start
    brief.close()


# Tickets that are not the conversation's.


def test_altered_ticket(reference: Engine, talk: Conversation) -> None:
    """A client puts its own prompt's digests into another's ticket: the proof shows that."""
    words = prompt(120, seed=11)
    assert talk.ticket is not None
    thief = another(talk, ticket=forged(talk.ticket, words))
    before = talk.prefill.run(probes.metrics)[FAILED]
    check(reference, thief.say(words))
    assert talk.prefill.run(probes.metrics)[FAILED] - before == 1
    pulled_history(reference, talk.say(prompt(20, seed=11)), 20)


def test_ticket_used_twice_at_once(reference: Engine, talk: Conversation) -> None:
    """Both turns pull, and then nothing is held."""
    turns = [[*talk.tokens, *prompt(20, seed=seed)] for seed in (13, 14)]
    before = pulled_by(talk.prefill)
    with talk.prefill.paused():
        requests = talk.prefill.submit(*turns, max_tokens=1, params=talk.ticket)
    tickets = [completion.params for completion in talk.prefill.results(requests)]
    assert texts(talk.decode, *turns, params=tickets) == texts(reference, *turns)
    assert pulled_by(talk.prefill) - before == 2 * (len(talk.tokens) - 1)


def another(talk: Conversation, **given: Any) -> Conversation:
    """A conversation between the same engines."""
    return Conversation(prefill=talk.prefill, decode=talk.decode, **given)


# Aborts, in the order of a turn's phases. That of a request that waits for blocks is in
# test_conversation_pressure.py.


@pytest.fixture
def gate(slow: Path) -> Iterator[Path]:
    """Prefill's reads of pages last until this file exists."""
    for path in (slow, slow.with_suffix(".reached")):
        path.unlink(missing_ok=True)
    yield slow
    slow.touch()


@pytest.fixture(scope="module")
def slow(prefill: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See ``gate``; all tests share the file, so that reads are slowed down once."""
    gate = tmp_path_factory.mktemp("slow") / "gate"
    prefill.run(probes.slow_reads, str(gate))
    return gate


def test_abort_while_prefill_pulls(talk: Conversation, gate: Path) -> None:
    """Its blocks stay until no byte can land in them; then decode's come back, too."""
    turn = [*talk.tokens, *prompt(20, seed=17)]
    [request] = talk.prefill.submit(turn, max_tokens=1, params=talk.ticket)
    eventually(gate.with_suffix(".reached").exists)
    talk.prefill.abort(request)
    gate.touch()
    eventually(lambda: talk.decode.run(kept) == 0)


def test_abort_while_prefill_computes(talk: Conversation) -> None:
    """Its blocks are free at once, and decode's were when they had been read."""
    free = talk.prefill.run(probes.free_blocks)
    turn = [*talk.tokens, *prompt(3 * CHUNK, seed=18)]
    with talk.prefill.paused():
        [request] = talk.prefill.submit(turn, max_tokens=1, params=talk.ticket)
        step_until_running(talk.prefill)
        assert talk.prefill.run(probes.free_blocks) < free
        talk.prefill.abort(request)
        assert talk.prefill.run(probes.free_blocks) == free
    eventually(lambda: talk.decode.run(kept) == 0)


def test_abort_after_the_ticket(reference: Engine, talk: Conversation) -> None:
    """On prefill that comes too late; on decode, prefill's pages come back, and no answer's stay.

    Decode is aborted before its first step, or while it decodes.
    """
    turn = [*talk.tokens, *prompt(20, seed=19)]
    [prefilled] = talk.prefill.generate(turn, max_tokens=1, params=talk.ticket)
    talk.prefill.abort(prefilled.id)
    with talk.decode.paused():
        [request] = talk.decode.submit(turn, params=prefilled.params)
        talk.decode.abort(request)
    eventually(lambda: talk.prefill.run(held) == 0)
    [ticket] = talk.prefill.prefill(turn)
    with talk.decode.paused():
        [request] = talk.decode.submit(turn, params=ticket, max_tokens=500)
        step_until_running(talk.decode)
        talk.decode.step(3)
        talk.decode.abort(request)
    eventually(lambda: talk.prefill.run(held) == 0)
    assert talk.decode.run(kept) == 0
    [ticket] = talk.prefill.prefill(turn)
    assert texts(talk.decode, turn, params=ticket) == texts(reference, turn)


def step_until_running(engine: Engine) -> None:
    """Step a paused engine until its only request has been computed in part."""

    def runs() -> bool:
        engine.step()
        return bool(engine.run(probes.statuses) == ["RUNNING"])

    eventually(runs)


# How an answer ends.


def test_stop_string_gives_no_ticket(reference: Engine, talk: Conversation) -> None:
    """vLLM's front end finds it and aborts the request, whose blocks come back."""
    [full] = texts(reference, [*talk.tokens, *prompt(20, seed=22)])
    stop = {"stop": full[len(full) // 2 :][:4]}
    turn = talk.say(prompt(20, seed=22), **stop)
    assert turn.completion.finish_reason == "stop"
    check(reference, turn, **stop)
    assert talk.ticket is None
    assert talk.decode.run(kept) == 0
    computed_whole(reference, talk.say(prompt(20, seed=23)))


def _pid(engine: object) -> int:
    return os.getpid()
