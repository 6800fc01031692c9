"""The hand-over between real engines again, over the driver nixl."""

from __future__ import annotations

import pytest

from examples.tiny_llama import prompt
from tests.engines.conversations import (
    RECOMPUTE,
    ROLE,
    TWO_WAY,
    Conversation,
    check_turns,
)
from tests.engines.early import check_early
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.ranks import at_rest, come_to
from tests.engines.steps import hand_over, pulled, texts

pytestmark = pytest.mark.timeout(600)

NIXL = {"driver": "nixl"}
LENGTHS = (2, 5, 31, 32, 33, 64, 65, 255, 256, 300, 511)
CHUNK = 64
TP2 = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def source(start_engine: StartEngine) -> Engine:
    """Prefills for others."""
    return start_engine("nixl-prefill", "kv_producer", extra=NIXL)


@pytest.fixture(scope="module")
def target(start_engine: StartEngine) -> Engine:
    """Decodes what others prefilled."""
    return start_engine("nixl-decode", "kv_consumer", extra=NIXL)


def test_one_at_a_time(reference: Engine, source: Engine, target: Engine) -> None:
    rest = at_rest(source, target)
    for length in LENGTHS:
        got, counters = hand_over(source, target, prompt(length))
        assert got == texts(reference, prompt(length))
        assert pulled(counters) == length
    come_to(rest, source, target)


def test_all_at_once(reference: Engine, source: Engine, target: Engine) -> None:
    prompts = [prompt(length, seed=1) for length in LENGTHS]
    rest = at_rest(source, target)
    got, counters = hand_over(source, target, *prompts)
    assert got == texts(reference, *prompts)
    assert pulled(counters) == counters["vllm:kvferry_tokens"] == sum(LENGTHS)
    come_to(rest, source, target)


def test_swapped_caches(reference: Engine, source: Engine, start_engine: StartEngine) -> None:
    """The control: from Y's cache comes Y's text, so the bytes are those that NIXL moved."""
    credulous = start_engine("nixl-credulous", "kv_consumer", extra=NIXL | {"verify_prompt": False})
    x, y = prompt(200, seed=10), prompt(200, seed=11)
    # What the decode engine computes itself, the last token, is the same in both.
    y[-1] = x[-1]
    [completion] = credulous.generate(x, params=source.prefill(y))
    credulous.close()
    assert completion.text == texts(reference, y)[0] != texts(reference, x)[0]


@pytest.mark.parametrize(("prefill_rank_count", "decode_rank_count"), [(1, 2), (2, 1)])
def test_ranks_of_another_number(
    reference: Engine,
    source: Engine,
    target: Engine,
    start_engine: StartEngine,
    prefill_rank_count: int,
    decode_rank_count: int,
) -> None:
    prompts = [prompt(length, seed=2) for length in LENGTHS]
    if prefill_rank_count > decode_rank_count:
        split = source = start_engine("nixl-prefill-tp2", "kv_producer", extra=NIXL, **TP2)
    else:
        split = target = start_engine("nixl-decode-tp2", "kv_consumer", extra=NIXL, **TP2)
    rest = at_rest(source, target)
    got, counters = hand_over(source, target, *prompts)
    assert got == texts(reference, *prompts)
    assert pulled(counters) == sum(LENGTHS)
    come_to(rest, source, target)
    split.close()


def test_early(reference: Engine, target: Engine, start_engine: StartEngine) -> None:
    """In chunks, with one preemption."""
    chunked = start_engine("nixl-chunks", "kv_producer", extra=NIXL, max_num_batched_tokens=CHUNK)
    check_early(reference, chunked, target, CHUNK)
    chunked.close()


def test_conversation(reference: Engine, start_engine: StartEngine) -> None:
    """Prefill pulls the turns before from decode, answers included."""
    extra = NIXL | TWO_WAY
    prefill, decode = (
        start_engine(f"nixl-{name}", ROLE, extra=extra, transfer=RECOMPUTE)
        for name in ("asking", "answering")
    )
    check_turns(reference, Conversation(prefill=prefill, decode=decode))
    prefill.close()
    decode.close()
