"""When pages may go back, whatever happens on either side.

`fixtures.nothing_is_left` sees after each test that both engines have all they had before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from kvferry.core.side_channel.connection import health
from kvferry.integrations.vllm import ticket_format
from tests.engines import probes, ranks
from tests.engines.engines import PREFILL, Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import (
    check_decoded,
    check_hand_over,
    check_refused,
    idle_blocks,
    texts,
)
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

LEASE = 1.0
FEW_BLOCKS = 40
"""Four prompts of 511 tokens write into all of them."""
OTHERS = 10
"""Requests of 1,000 tokens each: no machine runs them all within a few leases."""

Pair = tuple[Engine, Engine]
STAGED = {"extra": {"staging": True}}
KINDS: dict[str, dict[str, Any]] = {"direct": {"tensor_parallel_size": 2}, "staged": STAGED}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, start_engine: StartEngine) -> Iterator[Pair]:
    """Prefill, in chunks, and decode; of two ranks each unless they stage."""
    options = KINDS[request.param]
    prefill = start_engine("prefill", "kv_producer", max_num_batched_tokens=64, **options)
    decode = start_engine("decode", "kv_consumer", **options)
    yield prefill, decode
    prefill.close()
    decode.close()


@pytest.fixture(scope="module")
def hasty(start_engine: StartEngine) -> Engine:
    """Prefills, and holds pages for a second only, of which it has few."""
    return start_engine(
        "hasty",
        "kv_producer",
        extra={"kv_lease_duration": LEASE},
        num_gpu_blocks_override=FEW_BLOCKS,
    )


def released(prefill: Engine) -> None:
    """Wait until prefill holds nothing."""
    eventually(lambda: not any(prefill.run(ranks.holds)))


def last_rank(engine: Engine) -> int:
    return len(engine.run(ranks.holds)) - 1


# Leases.


def test_pages_reused_before_a_late_read(reference: Engine, hasty: Engine, decode: Engine) -> None:
    """The fence: other prompts' pages are never taken for this one's."""
    [late] = hasty.prefill(prompt(200, seed=1))
    released(hasty)
    others = [prompt(511, seed=seed) for seed in range(2, 6)]
    assert hasty.generate(*others, max_tokens=1)
    check_refused(decode, prompt(200, seed=1), late)
    check_hand_over(reference, hasty, decode, prompt(200, seed=1))


def test_pages_given_back_during_the_read(
    reference: Engine, hasty: Engine, pair: Pair, gate: Path
) -> None:
    """They stood when the read began, and not when it ended."""
    _, decode = pair
    decode.run(ranks.disturb_reads, "stuck", str(gate))
    [request] = decode.submit(prompt(150), params=hasty.prefill(prompt(150)))
    eventually(gate.with_suffix(".reached").exists)
    released(hasty)
    gate.touch()
    [completion] = decode.results([request])
    assert completion.finish_reason == "error"
    assert f"request {request}" in decode.log()
    check_hand_over(reference, hasty, decode, prompt(150))


def test_a_request_that_waits_its_turn_keeps_its_pages(
    reference: Engine, hasty: Engine, start_engine: StartEngine
) -> None:
    """Decode runs one request at a time, and those before it take longer than some leases."""
    decode = start_engine("narrow", "kv_consumer", max_num_seqs=1)
    [ticket] = hasty.prefill(prompt(100))
    others = decode.submit(*[prompt(10)] * OTHERS, max_tokens=1000)
    [waiting] = decode.submit(prompt(100), params=ticket)
    until = time.monotonic() + 3 * LEASE
    while time.monotonic() < until:
        assert hasty.run(ranks.holds) == [1]
        time.sleep(0.1)
    for other in others:
        decode.abort(other)
    [completion] = decode.results([waiting])
    assert completion.text == texts(reference, prompt(100))[0]
    decode.close()


def test_clients_cannot_pin_the_whole_cache(decode: Engine, start_engine: StartEngine) -> None:
    """What they do not fetch goes first, and a request of its own gets no ticket."""
    prefill = start_engine("limited", "kv_producer", extra={"max_held_fraction": 0.02})
    free = idle_blocks(prefill)
    first, *_, last = prefill.prefill(*(prompt(100, seed=seed) for seed in range(4)))
    eventually(lambda: free - prefill.run(probes.free_blocks) <= 0.02 * (free + 1))
    check_refused(decode, prompt(100, seed=0), first)
    [good] = decode.generate(prompt(100, seed=3), params=last)
    assert good.finish_reason == "length"
    assert "max_held_fraction" in prefill.log()
    assert prefill.prefill(prompt(511)) == [{}]


@pytest.mark.parametrize("kind", ["direct", "staged"])
def test_an_engine_that_is_shut_down_serves_what_it_holds(
    reference: Engine, decode: Engine, start_engine: StartEngine, kind: str
) -> None:
    """If its cache is staged, from host pages."""
    extra = {"drain_timeout": 20.0, "staging": kind == "staged"}
    prefill = start_engine("leaving", "kv_producer", extra=extra)
    check_hand_over(reference, prefill, decode, prompt(70))
    [ticket] = prefill.prefill(prompt(100))
    condition = health(ticket["remote_host"], ticket["remote_port"], timeout=20.0)
    assert condition.problems == []
    prefill.begin_close()
    check_decoded(reference, decode, prompt(100), ticket)
    prefill.close()


# Aborts, and tickets that are used several times.


def test_abort_on_decode_before_its_first_step(pair: Pair) -> None:
    """The producer hears of it, long before the lease is over."""
    prefill, decode = pair
    [ticket] = prefill.prefill(prompt(120))
    with decode.paused():
        [request] = decode.submit(prompt(120), params=ticket)
        decode.abort(request)
    released(prefill)


def test_abort_on_decode_during_the_load(reference: Engine, pair: Pair, gate: Path) -> None:
    """Its blocks stay until no byte can land in them, on the last rank too; then all come back."""
    prefill, decode = pair
    free = idle_blocks(decode)
    decode.run(ranks.disturb_reads, "stuck", str(gate), last_rank(decode))
    [request] = decode.submit(prompt(120), params=prefill.prefill(prompt(120)))
    eventually(gate.with_suffix(".reached").exists)
    decode.abort(request)
    if last_rank(decode):
        eventually(lambda: decode.run(ranks.half_reported) == [1])
    assert decode.run(probes.statuses) == ["FINISHED_ABORTED"]
    assert decode.run(probes.free_blocks) < free
    gate.touch()
    released(prefill)
    check_hand_over(reference, prefill, decode, prompt(120))


def test_abort_on_prefill(reference: Engine, pair: Pair) -> None:
    """Before there is a ticket its blocks are free at once, and its slot serves again."""
    prefill, decode = pair
    free = idle_blocks(prefill)
    with prefill.paused():
        [unstarted] = prefill.submit(prompt(300), params=PREFILL, max_tokens=1)
        prefill.abort(unstarted)
        [begun] = prefill.submit(prompt(300), params=PREFILL, max_tokens=1)
        prefill.step(2)
        assert prefill.run(probes.free_blocks) < free
        prefill.abort(begun)
        assert prefill.run(probes.free_blocks) == free
    check_hand_over(reference, prefill, decode, prompt(300))


def test_abort_on_prefill_after_the_ticket(reference: Engine, pair: Pair) -> None:
    """Too late: the pages are another engine's now."""
    prefill, decode = pair
    [completion] = prefill.generate(prompt(90), params=PREFILL, max_tokens=1)
    prefill.abort(completion.id)
    check_decoded(reference, decode, prompt(90), completion.params)


def test_a_rank_whose_read_fails(reference: Engine, pair: Pair, gate: Path) -> None:
    """What other ranks have read is worth nothing; the request fails, once, and no other one."""
    prefill, decode = pair
    lost, kept = prefill.prefill(prompt(100), prompt(101))
    decode.run(ranks.disturb_reads, "failing", str(gate), last_rank(decode))
    check_refused(decode, prompt(100), lost)
    gate.touch()
    check_decoded(reference, decode, prompt(101), kept)


def test_words_stand_before_the_ticket(reference: Engine, decode: Engine, pair: Pair) -> None:
    """On every rank, also where the scheduler is a step ahead of them: decode asks at once."""
    prefill, _ = pair
    with prefill.paused():
        ids = prefill.submit(prompt(200), prompt(33), params=PREFILL, max_tokens=1)
        while len(prefill.finished) < 2:
            prefill.step()
        params = [completion.params or {} for completion in prefill.results(ids)]
        for ticket in map(ticket_format.read_ticket, params):
            words = prefill.run(ranks.words, ticket.hold.slot)
            assert all(ticket.hold.stands(word) for word in words)
    for length, each in zip((200, 33), params, strict=True):
        check_decoded(reference, decode, prompt(length), each)


# Restarts.


def test_producer_is_restarted(
    reference: Engine, decode: Engine, start_engine: StartEngine
) -> None:
    """Same engine id, same port, another life: an old ticket is refused, a new one works."""
    named: dict[str, Any] = {"role": "kv_producer", "transfer": {"engine_id": "restarted"}}
    first = start_engine("restarted", **named)
    check_hand_over(reference, first, decode, prompt(60))
    old, older = first.prefill(prompt(61), prompt(62))
    first.close()
    second = start_engine("restarted", **named, extra={"side_channel_port": old["remote_port"]})
    for length, ticket in ((61, old), (62, older)):
        check_refused(decode, prompt(length), ticket)
    assert "it was restarted since" in decode.log()
    check_hand_over(reference, second, decode, prompt(61))


@pytest.mark.parametrize("kind", ["direct", "staged"])
def test_a_consumer_that_is_killed_and_started_again(
    reference: Engine, prefill: Engine, start_engine: StartEngine, gate: Path, kind: str
) -> None:
    """Pages that it was reading come back with their lease; its next start reads what still is."""
    extra = {"kv_lease_duration": LEASE, "staging": kind == "staged"}
    hasty = start_engine("bereaved", "kv_producer", extra=extra)
    named: dict[str, Any] = {"role": "kv_consumer", "transfer": {"engine_id": f"again-{kind}"}}
    named |= KINDS[kind]
    first = start_engine("again", **named)
    first.run(ranks.disturb_reads, "stuck", str(gate))
    [short], [long] = hasty.prefill(prompt(83)), prefill.prefill(prompt(84))
    first.submit(prompt(83), params=short)
    eventually(gate.with_suffix(".reached").exists)
    first.submit(prompt(84), params=long)
    first.kill()
    released(hasty)
    second = start_engine("again", **named)
    check_decoded(reference, second, prompt(84), long)
    released(prefill)
    for engine in (hasty, second):
        engine.close()
