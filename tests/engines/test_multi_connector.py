"""kvferry beside an offloading connector, both children of vLLM's MultiConnector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.conversations import (
    RECOMPUTE,
    TWO_WAY,
    Conversation,
    check_turns,
    forget,
    idle,
    same_answer,
    words,
)
from tests.engines.early import (
    Legs,
    computed_tokens,
    early_loads,
    hand_over_early,
    preempt,
)
from tests.engines.engines import CONNECTOR, PATIENT, Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import eventually, hand_over, idle_blocks, pulled, pulled_by, texts

pytestmark = pytest.mark.timeout(300)

LENGTHS = (5, 33, 64, 200)
CHUNK = 64
TOKENS = "vllm:kvferry_tokens"

OFFLOADING: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostSpec",
        "spec_module_path": "tests.engines.offload",
        "cpu_bytes_to_use": 64 << 20,
    },
}


ANNOUNCING: dict[str, Any] = {
    "kv_connector": "AnnouncingConnector",
    "kv_connector_module_path": "tests.engines.offload",
    "kv_role": "kv_both",
    "kv_connector_extra_config": OFFLOADING["kv_connector_extra_config"],
}
"""The same, with a handshake of its own."""


def ferry(role: str, **extra: Any) -> dict[str, Any]:
    return CONNECTOR | {"kv_role": role, "kv_connector_extra_config": PATIENT | extra}


def start_with(
    start_engine: StartEngine,
    name: str,
    *children: dict[str, Any],
    role: str = "kv_both",
    **options: Any,
) -> Engine:
    """An engine with several connectors, in this order."""
    transfer = RECOMPUTE | {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": list(children)},
    }
    return start_engine(name, kv_transfer_config=transfer, enable_prefix_caching=True, **options)


@pytest.fixture(scope="module")
def engines(
    start_engine: StartEngine, prefill: Engine, decode: Engine
) -> Iterator[dict[str, Engine]]:
    """By name: those that have only kvferry, and those that have it first, or second.

    The latter prefill in chunks, decode, and hold answers for the next turn.
    """
    both = ferry("kv_both", **TWO_WAY)
    chunks: dict[str, Any] = {"max_num_batched_tokens": CHUNK}
    started = {
        "first": start_with(start_engine, "first", both, OFFLOADING, **chunks),
        "second": start_with(start_engine, "second", OFFLOADING, both, **chunks),
    }
    yield started | {"prefill": prefill, "decode": decode}
    for engine in started.values():
        engine.close()


def free_blocks(*some: Engine) -> list[int]:
    """How many blocks each engine has free; what it holds for conversations is forgotten."""
    forget(*some)
    return idle(*some)


PAIRS = (("first", "second"), ("second", "first"), ("prefill", "second"), ("first", "decode"))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_hand_over(reference: Engine, engines: dict[str, Engine], source: str, target: str) -> None:
    """Wherever the other connector stands, the pages are pulled, and given back afterwards."""
    prompts = [prompt(length, seed=PAIRS.index((source, target))) for length in LENGTHS]
    prefill, decode = engines[source], engines[target]
    free = free_blocks(prefill, decode)
    got, counters = hand_over(prefill, decode, *prompts)
    assert got == texts(reference, *prompts)
    assert pulled(counters) == counters[TOKENS] == sum(LENGTHS)
    assert free_blocks(prefill, decode) == free


def test_what_was_pulled_is_offloaded(reference: Engine, engines: dict[str, Engine]) -> None:
    """The other connector keeps pages that came from kvferry, and they are as good as any."""
    prefill, decode = engines["prefill"], engines["second"]
    wanted = prompt(200, seed=20)
    hand_over(prefill, decode, wanted)
    eventually(lambda: decode.run(probes.forget_prefixes))
    before = decode.run(probes.metrics)
    [completion] = decode.generate(wanted)
    after = decode.run(probes.metrics)
    assert completion.text == texts(reference, wanted)[0]
    assert pulled(after) - pulled(before) == 192
    assert after[TOKENS] == before[TOKENS]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("target", "by_kvferry"), [("first", 200), ("second", 0)])
def test_both_have_the_pages(
    reference: Engine, engines: dict[str, Engine], target: str, by_kvferry: int, early: bool
) -> None:
    """The first child that has them loads; a producer that is not read is told so at once, or gives
    back with the ticket what is not read early."""
    prefill, decode = engines["prefill"], engines[target]
    wanted = prompt(200, seed=21 + early)
    hand_over(prefill, decode, wanted)
    eventually(lambda: decode.run(probes.forget_prefixes))
    free, before = idle_blocks(prefill), decode.run(probes.metrics)
    got = (
        hand_over_early(prefill, decode, wanted) if early else hand_over(prefill, decode, wanted)[0]
    )
    after = decode.run(probes.metrics)
    assert got == texts(reference, wanted)
    assert after[TOKENS] - before[TOKENS] == by_kvferry
    assert pulled(after) - pulled(before) == (by_kvferry or 192)
    eventually(lambda: prefill.run(probes.free_blocks) == free)


@pytest.mark.parametrize(("source", "target"), PAIRS[:2])
def test_early_hand_over(
    reference: Engine, engines: dict[str, Engine], source: str, target: str
) -> None:
    """Chunk by chunk, while the other connector keeps the same pages."""
    prefill, decode = engines[source], engines[target]
    prompts = [prompt(length, seed=30 + len(source)) for length in (*LENGTHS, 600)]
    free, begun = free_blocks(prefill, decode), early_loads(decode)
    assert hand_over_early(prefill, decode, *prompts) == texts(reference, *prompts)
    assert early_loads(decode) > begun
    assert free_blocks(prefill, decode) == free


def test_early_pages_that_were_offloaded(reference: Engine, engines: dict[str, Engine]) -> None:
    """Prefill has a prompt's beginning from the other connector, also after a preemption."""
    prefill, decode = engines["first"], engines["decode"]
    first = prompt(200, seed=40)
    longer = [*first, *prompt(300, seed=41)]
    free = free_blocks(prefill, decode)
    texts(prefill, first)
    eventually(lambda: prefill.run(probes.forget_prefixes))
    offloaded = pulled_by(prefill)
    legs = Legs(prefill, decode, longer)
    with prefill.paused():
        legs.begin_prefill()
        legs.begin_decode()
        while prefill.run(computed_tokens, legs.there[0]) < 192 + 2 * CHUNK:
            prefill.step()
        legs.wait_begun()
        prefill.run(preempt)
    assert legs.texts() == texts(reference, longer)
    assert pulled_by(prefill) >= offloaded + 192
    assert free_blocks(prefill, decode) == free


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_early_aborts(reference: Engine, engines: dict[str, Engine], side: str) -> None:
    prefill, decode = engines["second"], engines["first"]
    free = free_blocks(prefill, decode)
    for steps in (1, 3, 5):
        legs = Legs(prefill, decode, prompt(300, seed=steps + (50 if side == "decode" else 60)))
        with prefill.paused():
            legs.begin_prefill()
            legs.begin_decode()
            prefill.step(steps)
            if steps == 3:
                legs.wait_begun()
            if side == "decode":
                decode.abort(legs.here[0])
            else:
                prefill.abort(legs.there[0])
        assert free_blocks(prefill, decode) == free
    wanted = prompt(300, seed=70)
    assert hand_over_early(prefill, decode, wanted) == texts(reference, wanted)


def test_turns(reference: Engine, engines: dict[str, Engine]) -> None:
    """Prefill computes as little as with kvferry alone."""
    conversation = Conversation(prefill=engines["first"], decode=engines["second"])
    check_turns(reference, conversation, block=32)


def test_the_other_connector_has_the_turns_before(
    reference: Engine, engines: dict[str, Engine]
) -> None:
    """Of several connectors, vLLM lets one load: the first that has anything.

    If that is the other one, prefill computes the answers again, and decode's pages are free.
    """
    prefill, decode = engines["second"], engines["first"]
    free = free_blocks(prefill, decode)
    conversation = Conversation(prefill=prefill, decode=decode)
    conversation.say(words(70), max_tokens=50)
    eventually(lambda: prefill.run(probes.forget_prefixes))
    asked = conversation.ask(words(30))
    assert (asked.pulled, asked.computed) == (64, len(asked.prompt) - 64)
    eventually(lambda: decode.run(probes.free_blocks) == free[1])
    turn = conversation.answer(asked, max_tokens=50)
    assert same_answer(reference, turn, max_tokens=50)
    conversation.end()


def test_handshake_of_another_connector(
    reference: Engine, engines: dict[str, Engine], start_engine: StartEngine
) -> None:
    """MultiConnector gives the first child's to all: ours stands before one that has its own."""
    both = start_with(start_engine, "announcing", ferry("kv_both"), ANNOUNCING)
    wanted = prompt(70, seed=23)
    assert hand_over(both, engines["decode"], wanted)[0] == texts(reference, wanted)
    assert hand_over(engines["prefill"], both, wanted)[0] == texts(reference, wanted)
    both.close()


def test_handshake_of_another_connector_comes_first(
    reference: Engine, start_engine: StartEngine
) -> None:
    """Then there is none of ours: it is said at start, and the engine works for itself."""
    both = start_with(start_engine, "announced", ANNOUNCING, ferry("kv_both"))
    assert "KVFerryConnector must come before" in both.log()
    [completion] = both.generate(prompt(70, seed=24))
    assert completion.text == texts(reference, prompt(70, seed=24))[0]
    [ticket] = both.prefill(prompt(71, seed=24))
    assert ticket["remote_port"] == 0
    both.close()
