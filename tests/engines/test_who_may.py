"""Real engines with keys and signed tickets; clients and strangers that want what is not theirs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from examples.tiny_llama import prompt
from kvferry.cli.commands import app
from kvferry.core.side_channel.sockets import own_address
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import hand_over, pulled, pulled_by, texts

pytestmark = pytest.mark.timeout(300)

HERE = ["127.0.0.0/8"]


class Pair(NamedTuple):
    prefill: Engine
    decode: Engine


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The settings of both sides, as ``kvferry keygen`` prints them."""
    folder: Path = tmp_path_factory.mktemp("keys")
    assert CliRunner().invoke(app, ["keygen", str(folder)]).exit_code == 0
    return {
        mine: {
            "curve_secret_key": f"file:{folder}/{mine}.secret",
            "curve_peers": [f"file:{folder}/{theirs}.public"],
            "ticket_secrets": [f"file:{folder}/ticket.secret"],
        }
        for mine, theirs in (("prefill", "decode"), ("decode", "prefill"))
    }


@pytest.fixture(scope="module")
def pair(start_engine: StartEngine, keys: dict[str, dict[str, Any]]) -> Pair:
    return Pair(
        start_engine(
            "keyed-prefill", "kv_producer", extra=keys["prefill"] | {"allowed_peers": HERE}
        ),
        start_engine("keyed-decode", "kv_consumer", extra=keys["decode"] | {"allowed_peers": HERE}),
    )


def works(pair: Pair, reference: Engine, seed: int) -> bool:
    mine = prompt(70, seed=seed)
    answers, counted = hand_over(pair.prefill, pair.decode, mine)
    return answers == texts(reference, mine) and pulled(counted) == 70


def refusal(engine: Engine, tokens: list[int], ticket: dict[str, Any]) -> str:
    """What the engine's log says of a request that fails."""
    [completion] = engine.generate(tokens, params=ticket)
    assert (completion.finish_reason, completion.text) == ("error", "")
    [line] = [
        line for line in engine.log().splitlines() if completion.id in line and "WARNING" in line
    ]
    return line


def test_engines_with_keys_hand_over(reference: Engine, pair: Pair) -> None:
    assert works(pair, reference, 1)


def test_forged_ticket_for_another_requests_pages(reference: Engine, pair: Pair) -> None:
    """From two genuine ones, of requests of the same length."""
    mine, theirs = prompt(70, seed=2), prompt(70, seed=3)
    tickets = pair.prefill.prefill(mine, theirs)
    forged = copy.deepcopy(tickets[0])
    forged["remote_block_ids"] = tickets[1]["remote_block_ids"]
    for own in ("slot", "generation"):
        forged["kvferry"][own] = tickets[1]["kvferry"][own]
    assert "it was altered or made up" in refusal(pair.decode, mine, forged)
    assert "another prompt" in refusal(pair.decode, mine, tickets[1])
    [completion] = pair.decode.generate(mine, params=tickets[0])
    assert [completion.text] == texts(reference, mine)


def test_engines_of_which_only_one_is_set_up(prefill: Engine, decode: Engine, pair: Pair) -> None:
    [signed], [plain] = pair.prefill.prefill(prompt(40)), prefill.prefill(prompt(40))
    assert "no ticket_secrets to check it with" in refusal(decode, prompt(40), signed)
    assert "not signed" in refusal(pair.decode, prompt(40), plain)
    del signed["kvferry"]["signature"]
    assert "is encrypted, and this engine has no keys" in refusal(decode, prompt(40), signed)
    del signed["kvferry"]["key"]
    assert "its side channel is encrypted" in refusal(decode, prompt(40), signed)
    decode.generate(prompt(40), params=plain)  # its pages are held until then


# With nothing set.


@pytest.fixture(scope="module")
def caching(start_engine: StartEngine) -> Engine:
    """Decodes, and would keep what it pulled under the wrong prompt for everybody."""
    return start_engine("caching-decode", "kv_consumer", enable_prefix_caching=True)


def next_blocks(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    mine["remote_block_ids"] = [[block + 1 for block in ids] for ids in mine["remote_block_ids"]]


def blocks_of_another(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    mine["remote_block_ids"] = theirs["remote_block_ids"]


def without_proof(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    next_blocks(mine, theirs)
    for name in ("proof", "ticket_key", "host", "port"):
        del mine["kvferry"][name]


def proof_of_another(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    next_blocks(mine, theirs)
    mine["kvferry"]["proof"] = theirs["kvferry"]["proof"]


ALTERATIONS = [
    (next_blocks, "altered on its way"),
    (blocks_of_another, "altered on its way"),
    (without_proof, "neither a proof nor a signature"),
    (proof_of_another, "altered on its way"),
]


def test_altered_tickets_are_refused_and_poison_nothing(
    reference: Engine, prefill: Engine, caching: Engine
) -> None:
    mine, theirs = prompt(70, seed=20), prompt(70, seed=21)
    tickets = prefill.prefill(mine, theirs)
    for alter, words in ALTERATIONS:
        forged = copy.deepcopy(tickets[0])
        alter(forged, tickets[1])
        assert words in refusal(caching, mine, forged)
    before = pulled_by(caching)
    [completion] = caching.generate(mine, params=tickets[0])
    assert [completion.text] == texts(reference, mine)
    # All of it was pulled, so no page of the prompt was in the prefix cache.
    assert pulled_by(caching) - before == 70
    assert [one.text for one in caching.generate(mine)] == [completion.text]


def test_a_router_that_rewrites_the_address_breaks_nothing(
    reference: Engine, prefill: Engine, decode: Engine, pair: Pair
) -> None:
    """With and without secrets: the engine's own address is asked."""
    mine = prompt(70, seed=8)
    for both in (pair, Pair(prefill, decode)):
        [ticket] = both.prefill.prefill(mine)
        ticket |= {"remote_host": "192.0.2.1", "remote_port": 1}
        [completion] = both.decode.generate(mine, params=ticket)
        assert [completion.text] == texts(reference, mine)


@pytest.fixture(scope="module")
def picky(start_engine: StartEngine) -> Engine:
    """Connects to nobody here, and listens where others reach it, if there are others."""
    settings = {"allowed_peers": ["192.0.2.0/24"]}
    address = own_address()
    host = {"side_channel_host": address} if address else {}
    return start_engine("picky", "kv_consumer", extra=settings | host)


def test_address_that_is_not_allowed(picky: Engine, prefill: Engine) -> None:
    [ticket] = prefill.prefill(prompt(40))
    assert "in none of the networks of allowed_peers" in refusal(picky, prompt(40), ticket)


@pytest.mark.skipif(own_address() is None, reason="this host has no network")
def test_what_is_open_is_said_at_start(picky: Engine, decode: Engine, pair: Pair) -> None:
    warnings = ("is open: whoever reaches it learns", "tickets are not signed")
    assert [words for words in warnings if words not in picky.log()] == []
    quiet = decode.log() + pair.prefill.log() + pair.decode.log()
    assert [words for words in warnings if words in quiet] == []
