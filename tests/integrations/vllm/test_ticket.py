"""The ticket as `kv_transfer_params`. Needs no vLLM."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import TicketError
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.integrations.vllm.ticket import KEY, Offer, Sizes, read

OFFER = Offer(
    engine="engine-1",
    incarnation=(1 << 63) - 1,
    request="r-1",
    host="10.0.0.1",
    port=5600,
    hold=Hold(slot=7, generation=(1 << 63) - 2),
    pages=[[5, 4, 9]],
    first_index=[2],
    tokens=96,
    digest=bytes(range(16)),
    computed=True,
    sizes=Sizes(),
)

NIXL_KEYS = {
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "transfer_mode",
}


def test_read_gives_what_was_offered() -> None:
    assert read(json.loads(json.dumps(OFFER.params()))) == Ticket(
        engine="engine-1",
        incarnation=(1 << 63) - 1,
        request="r-1",
        host="10.0.0.1",
        port=5600,
        hold=Hold(slot=7, generation=(1 << 63) - 2),
        pages=((5, 4, 9),),
        first_index=(2,),
        tokens=96,
        digest=bytes(range(16)),
        computed=True,
        tp_size=1,
    )


def test_keys_are_those_of_nixl_and_one_more() -> None:
    assert set(OFFER.params()) == NIXL_KEYS | {KEY}


def test_no_number_is_too_long_for_a_router() -> None:
    """JSON numbers are doubles to many programs: integers beyond 53 bits would change."""

    def numbers(value: Any) -> list[int]:
        if isinstance(value, dict):
            return [n for each in value.values() for n in numbers(each)]
        if isinstance(value, list):
            return [n for each in value for n in numbers(each)]
        return [value] if isinstance(value, int) else []

    assert max(numbers(OFFER.params())) < 1 << 53


def test_ticket_of_another_connector() -> None:
    params = OFFER.params()
    del params[KEY]
    with pytest.raises(TicketError, match="another connector made it"):
        read(params)


def test_ticket_of_another_version() -> None:
    params = OFFER.params()
    params[KEY]["version"] = 2
    with pytest.raises(TicketError, match="version 2; this engine reads 1"):
        read(params)


def test_engine_that_serves_no_handshake() -> None:
    params = OFFER.params() | {"remote_port": 0}
    with pytest.raises(TicketError, match="port 0"):
        read(params)


@pytest.mark.parametrize("key", ["remote_port", "remote_block_ids", KEY])
def test_text_that_cannot_be_encoded(key: str) -> None:
    """JSON can name half a surrogate pair, and Python reads it."""
    with pytest.raises(TicketError, match="kv_transfer_params"):
        read(OFFER.params() | {key: json.loads('"\\ud800"')})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=8), each),
    max_leaves=5,
)


@given(data=st.data())
def test_anything_else_is_refused_and_nothing_else_raised(data: st.DataObject) -> None:
    params = OFFER.params()
    where = data.draw(st.sampled_from([params, params[KEY]]))
    key = data.draw(st.sampled_from(sorted(where)))
    if data.draw(st.booleans()):
        where[key] = data.draw(json_values)
    else:
        del where[key]
    with contextlib.suppress(TicketError):
        assert isinstance(read(params), Ticket)
