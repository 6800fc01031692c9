"""What is refused, by name and with the remedy; no refused ticket ends an engine or poisons it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from examples.tiny_llama import prompt
from kvferry.core.side_channel.sockets import own_address
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import (
    check_decoded,
    check_refused,
    pulled_by,
    texts,
)

pytestmark = pytest.mark.timeout(300)

Params = dict[str, Any]


def _another_digest(mine: Params) -> None:
    mine["kvferry"]["digest"] = "00" * 16


def _next_blocks(mine: Params) -> None:
    mine["remote_block_ids"] = [[block + 1 for block in ids] for ids in mine["remote_block_ids"]]


def _nobody(mine: Params) -> None:
    mine |= {"remote_engine_id": "gone", "remote_port": 1}


FORGERIES = {
    _another_digest: "for another prompt",
    _next_blocks: "it was altered on its way",
    _nobody: "nobody listens there",
}


@pytest.fixture(scope="module")
def caching(start_engine: StartEngine) -> Engine:
    """Decodes, and would keep what it pulled under the wrong prompt for everybody."""
    return start_engine("caching-decode", "kv_consumer", enable_prefix_caching=True)


def test_forged_tickets(reference: Engine, prefill: Engine, caching: Engine) -> None:
    """Each fails its own request, and no other; the genuine one is good after them.

    All of its prompt is pulled, so no page of it was in the prefix cache.
    """
    mine = prompt(70, seed=20)
    [ticket] = prefill.prefill(mine)
    for change, reason in FORGERIES.items():
        forged = copy.deepcopy(ticket)
        change(forged)
        check_refused(caching, mine, forged, reason)
    before = pulled_by(caching)
    check_decoded(reference, caching, mine, ticket)
    assert pulled_by(caching) - before == 70
    assert texts(caching, mine) == texts(reference, mine)


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
