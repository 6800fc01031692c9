"""kvferry beside an offloading connector, both children of vLLM's MultiConnector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.conversations import words
from tests.engines.early import hand_over_early
from tests.engines.engines import CONNECTOR, PATIENT, Engine
from tests.engines.fleet import RECOMPUTE, TWO_WAY, Engines, cast, fleet
from tests.engines.steps import check_decoded, check_hand_over, counted, pulled_by, texts
from tests.waiting import eventually

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
FERRY = CONNECTOR | {"kv_role": "kv_both", "kv_connector_extra_config": PATIENT | TWO_WAY}


def beside(*children: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The options of an engine with several connectors, in this order."""
    transfer = RECOMPUTE | {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }
    return {"kv_transfer_config": transfer, "enable_prefix_caching": True, **options}


engines = cast(
    "llama",
    {"max_num_batched_tokens": CHUNK},
    first=beside(FERRY, OFFLOADING),
    second=beside(OFFLOADING, FERRY),
)
PAIRS = (("first", "second"), ("second", "first"), ("prefill", "second"), ("first", "decode"))


@pytest.fixture
def pair(
    request: pytest.FixtureRequest, engines: Engines, prefill: Engine, decode: Engine
) -> tuple[Engine, Engine]:
    """Two engines by name: those that have only kvferry, and those that have it first, or second.

    The latter prefill in chunks, decode, and hold answers for the next turn.
    """
    known = {**engines, "prefill": prefill, "decode": decode}
    there, here = (known[name] for name in request.param)
    return there, here


def between(*pairs: tuple[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", pairs, indirect=True, ids="-".join)


Pair = tuple[Engine, Engine]


@between(*PAIRS)
def test_hand_over(reference: Engine, pair: Pair) -> None:
    """Wherever the other connector stands, the pages are pulled, and given back afterwards."""
    before = counted(pair[1], TOKENS)
    check_hand_over(reference, *pair, *map(words, LENGTHS))
    assert counted(pair[1], TOKENS) - before == sum(LENGTHS)


@between(("prefill", "second"))
def test_what_was_pulled_is_offloaded(reference: Engine, pair: Pair) -> None:
    """The other connector keeps pages that came from kvferry, and they are as good as any."""
    decode, wanted = pair[1], prompt(200, seed=20)
    check_hand_over(reference, *pair, wanted)
    eventually(lambda: decode.run(probes.forget_prefixes))
    pulled, tokens = pulled_by(decode), counted(decode, TOKENS)
    assert texts(decode, wanted) == texts(reference, wanted)
    assert (pulled_by(decode) - pulled, counted(decode, TOKENS)) == (192, tokens)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("pair", "by_kvferry"),
    [(("prefill", "first"), 200), (("prefill", "second"), 0)],
    indirect=["pair"],
)
def test_both_have_the_pages(reference: Engine, pair: Pair, by_kvferry: int, early: bool) -> None:
    """The first child that has them loads; a producer that is not read is told so at once, or gives
    back with the ticket what is not read early."""
    (prefill, decode), wanted = pair, prompt(200, seed=21 + early)
    check_hand_over(reference, prefill, decode, wanted)
    eventually(lambda: decode.run(probes.forget_prefixes))
    pulled, tokens = pulled_by(decode), counted(decode, TOKENS)
    if early:
        assert hand_over_early(prefill, decode, wanted) == texts(reference, wanted)
    else:
        check_decoded(reference, decode, wanted, prefill.prefill(wanted))
    assert counted(decode, TOKENS) - tokens == by_kvferry
    assert pulled_by(decode) - pulled == (by_kvferry or 192)
    eventually(lambda: prefill.run(probes.statuses) == [])


def test_windows_in_a_prefix_cache(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Prompts after a load: shorter and longer ones, such that branch off, and the same again.

    Of 429 loaded tokens the window of 80 begins at 350, prefill's pages at 320 and decode's at 288,
    and a hit of 384 tokens needs those from 305 on. An offloading connector keeps every page of a
    request, also one that vLLM's own cache leaves out: beside it, such a load fails.
    """
    options = beside(FERRY, OFFLOADING, block_size=96)
    with fleet(checkpoints["mistral"], tmp_path) as engines:
        prefill = engines.launch("prefill", "kv_producer", block_size=32)
        decode = engines.launch("decode", **options)
        engines.wait_started()
        loaded = words(430)
        before = pulled_by(decode)
        check_decoded(prefill, decode, loaded, prefill.prefill(loaded), max_tokens=8)
        assert pulled_by(decode) == before
        later = [loaded[:-30], loaded[:-60], loaded[:-30] + words(40), loaded + words(20), loaded]
        for asked in later:
            got, right = (each.generate(asked, max_tokens=8)[0] for each in (decode, prefill))
            assert got.tokens == right.tokens, len(asked)
