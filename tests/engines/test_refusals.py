"""What is refused, by name and with the remedy; no refused ticket ends an engine or poisons it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from examples.tiny_llama import prompt
from kvferry.core.side_channel.sockets import own_address
from tests.engines.engines import Engine, EngineError
from tests.engines.fixtures import StartEngine
from tests.engines.steps import (
    check_decoded,
    check_hand_over,
    check_refused,
    counted,
    pulled_by,
    texts,
    warning,
)

pytestmark = pytest.mark.timeout(300)

Params = dict[str, Any]


def _own(key: str, value: object) -> Callable[[Params, Params], None]:
    """Changes what stands under ``kvferry``."""
    return lambda mine, theirs: mine["kvferry"].update({key: value})


def _next_blocks(mine: Params, theirs: Params) -> None:
    mine["remote_block_ids"] = [[block + 1 for block in ids] for ids in mine["remote_block_ids"]]


def _without_proof(mine: Params, theirs: Params) -> None:
    for name in ("proof", "ticket_key", "host", "port"):
        del mine["kvferry"][name]


def _pages_of_another(mine: Params, theirs: Params) -> None:
    mine["remote_block_ids"] = theirs["remote_block_ids"]
    for own in ("slot", "generation", "proof"):
        mine["kvferry"][own] = theirs["kvferry"][own]


ALTERED = "it was altered on its way"
FORGERIES: dict[str, tuple[Callable[[Params, Params], Any], str]] = {
    "of another connector": (lambda mine, _: mine.pop("kvferry"), "another connector made it"),
    "of another incarnation": (_own("incarnation", "00000000000000ff"), "it was restarted since"),
    "with a negative block": (
        lambda mine, _: mine.update(remote_block_ids=[[1, 2, -3]]),
        "names block -3",
    ),
    "with another digest": (_own("digest", "00" * 16), "for another prompt"),
    "of an engine that is not there": (
        lambda mine, _: mine.update(remote_engine_id="gone", remote_port=1),
        "nobody listens there",
    ),
    "with other blocks": (_next_blocks, ALTERED),
    "with another request's pages": (_pages_of_another, ALTERED),
    "without a proof": (_without_proof, "neither a proof nor a signature"),
}


@pytest.fixture(scope="module")
def caching(start_engine: StartEngine) -> Engine:
    """Decodes, and would keep what it pulled under the wrong prompt for everybody."""
    return start_engine("caching-decode", "kv_consumer", enable_prefix_caching=True)


def test_forged_tickets(reference: Engine, prefill: Engine, caching: Engine) -> None:
    """Each fails its own request, and no other; the genuine one is good after them.

    All of its prompt is pulled, so no page of it was in the prefix cache.
    """
    mine, theirs = prompt(70, seed=20), prompt(70, seed=21)
    tickets = prefill.prefill(mine, theirs)
    for change, reason in FORGERIES.values():
        forged = copy.deepcopy(tickets[0])
        change(forged, tickets[1])
        check_refused(caching, mine, forged, reason)
    before = pulled_by(caching)
    check_decoded(reference, caching, mine, tickets[0])
    assert pulled_by(caching) - before == 70
    assert texts(caching, mine) == texts(reference, mine)


@pytest.fixture(scope="module")
def forgiving(start_engine: StartEngine) -> Engine:
    """Computes what it cannot load; it is both roles, and caches prefixes."""
    return start_engine(
        "forgiving",
        "kv_both",
        transfer={"kv_load_failure_policy": "recompute"},
        enable_prefix_caching=True,
    )


def test_ticket_of_this_very_engine(reference: Engine, forgiving: Engine) -> None:
    [ticket] = forgiving.prefill(prompt(71))
    completion = check_decoded(reference, forgiving, prompt(71), ticket)
    assert "made by this very engine" in warning(forgiving, completion.id)


def test_refused_ticket_is_recomputed_where_the_policy_says_so(
    reference: Engine, prefill: Engine, forgiving: Engine
) -> None:
    name = "vllm:kvferry_refused_tickets"
    before = counted(forgiving, name)
    for length in (33, 200):
        [ticket] = prefill.prefill(prompt(length, seed=1))
        ticket["kvferry"]["digest"] = "00" * 16
        check_decoded(reference, forgiving, prompt(length, seed=1), ticket)
    assert counted(forgiving, name) == before + 2
    check_hand_over(reference, prefill, forgiving, prompt(90, seed=1))


def test_refused_ticket_where_nothing_was_to_be_pulled(
    reference: Engine, prefill: Engine, decode: Engine
) -> None:
    """A prompt whose log probabilities are wanted is computed here anyway."""
    [ticket] = prefill.prefill(prompt(50))
    ticket["kvferry"]["digest"] = "00" * 16
    completion = check_decoded(reference, decode, prompt(50), ticket, prompt_logprobs=1)
    assert "ticket refused" in warning(decode, completion.id)


def test_a_router_that_rewrites_the_address_breaks_nothing(
    reference: Engine, prefill: Engine, decode: Engine
) -> None:
    """The engine's own address is asked."""
    [ticket] = prefill.prefill(prompt(70, seed=8))
    ticket |= {"remote_host": "192.0.2.1", "remote_port": 1}
    check_decoded(reference, decode, prompt(70, seed=8), ticket)


def test_address_that_is_not_allowed(prefill: Engine, start_engine: StartEngine) -> None:
    """The engine connects to nobody here, and listens where others reach it, if there are others:
    that is said at its start."""
    address = own_address()
    host = {"side_channel_host": address} if address else {}
    extra = {"allowed_peers": ["192.0.2.0/24"], **host}
    picky = start_engine("picky", "kv_consumer", extra=extra)
    [ticket] = prefill.prefill(prompt(40))
    check_refused(picky, prompt(40), ticket, "in none of the networks of allowed_peers")
    said = ["is open: whoever reaches it learns" in each.log() for each in (picky, prefill)]
    assert said == [address is not None, False]


def test_refused_at_start(start_engine: StartEngine) -> None:
    with pytest.raises(EngineError, match="'cuda' and the cache is in 'cpu' memory"):
        start_engine("refused", "kv_both", transfer={"kv_buffer_device": "cuda"})
