"""The ticket as `kv_transfer_params`. ``tests/pinned`` has its bytes, ``tests/faults`` fuzzes."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec.json import encode

from kvferry.core.errors import TicketError, TicketReason
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.prompt_digest import MAX_BLOCK_DIGESTS, BlockDigests, chain
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.security import TicketKey, TicketSecrets
from kvferry.core.security.ticket_proof import check
from kvferry.integrations.vllm import ticket_format as ticket
from kvferry.integrations.vllm.ticket_format import (
    KEY,
    TicketParams,
    read_part,
    read_ticket,
)

SECRETS = TicketSecrets.of(["the secret of both engines"])
TICKET_KEY = TicketKey()

OFFER = TicketParams(
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
)

SALT = bytes(range(16))
CHAIN = BlockDigests(tokens=16, salt=SALT, digests=chain(range(96), 16, SALT, None, {}))
ANSWER = replace(OFFER, blocks=CHAIN)
"""The ticket of a conversation."""
BLOCKS = ANSWER.params()[KEY]["blocks"]

PROVED = OFFER.params(None, TICKET_KEY)

HALF_A_PAIR = '"\\ud800"'
NIXL_KEYS = OFFER.params().keys() - {KEY}


def travelled(params: dict[str, Any]) -> dict[str, Any]:
    """After a router has passed it on, with its keys in another order."""
    found: dict[str, Any] = json.loads(json.dumps(params, sort_keys=True))
    return found


def altered(params: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    """With another value of one of NIXL's keys, or else of a key under ours."""
    if key in NIXL_KEYS:
        return params | {key: value}
    return params | {KEY: params[KEY] | {key: value}}


def sign(params: dict[str, Any]) -> None:
    params[KEY]["signature"] = SECRETS.sign(ticket._content(params, proven=False)).hex()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({name: OFFER.params()[name] for name in NIXL_KEYS}, "another connector made it"),
        (altered(OFFER.params(), "version", 2), "version 2; this engine reads 1"),
        (replace(OFFER, port=0).params(None, TICKET_KEY), "the port is 0"),
        (OFFER.params() | {"remote_block_ids": [[]] * 257}, "remote_block_ids"),
        # JSON can name half a surrogate pair, and Python reads it.
        (OFFER.params() | {"remote_port": json.loads(HALF_A_PAIR)}, "kv_transfer_params"),
        (OFFER.params() | {"remote_block_ids": json.loads(HALF_A_PAIR)}, "kv_transfer_params"),
        (OFFER.params() | {KEY: json.loads(HALF_A_PAIR)}, "kv_transfer_params"),
        (altered(PROVED, "proof", ""), "proof has 0 bytes; it has 64"),
        *((altered(PROVED, "ticket_key", key), "key") for key in ("00" * 31, "00" * 33, "?", 7)),
        *(
            (altered(ANSWER.params(None, TICKET_KEY), "blocks", {**BLOCKS, name: value}), words)
            for name, value, words in [
                ("tokens", 0, "tokens of a block is 0"),
                ("tokens", 1 << 63, "blocks.tokens"),
                ("tokens", 16.5, "blocks.tokens"),
                ("salt", "0", "blocks.salt"),
                ("salt", None, "blocks.salt"),
                ("digests", "GG", "blocks.digests"),
                ("digests", "00" * 16 * (MAX_BLOCK_DIGESTS + 1), "blocks.digests"),
            ]
        ),
    ],
    ids=itertools.count(),
)
def test_what_is_no_ticket(params: dict[str, Any], words: str) -> None:
    with pytest.raises(TicketError, match=words):
        read_ticket(params)


def test_a_ticket_needs_a_proof_or_a_signature() -> None:
    with pytest.raises(TicketError, match="neither a proof nor a signature") as refused:
        read_ticket(OFFER.params())
    assert refused.value.reason is TicketReason.PROOF


class Counted(list[int]):
    """Counts how often somebody looks at it."""

    looks = 0

    def __iter__(self) -> Any:
        self.looks += 1
        return super().__iter__()


def test_more_pages_than_the_prompt_has_tokens_are_not_even_looked_at() -> None:
    pages = Counted(range(1, 100))
    with pytest.raises(TicketError, match="lists 99 blocks for a prompt of 98 tokens"):
        read_ticket(OFFER.params() | {"remote_block_ids": [pages]}, prompt=98)
    assert pages.looks == 0
    assert read_ticket(OFFER.params(None, TICKET_KEY), prompt=3).pages == ((5, 4, 9),)


# Signed.


STEERING = [
    ("remote_block_ids", [[5, 4, 8]]),
    ("remote_engine_id", "engine-2"),
    ("remote_request_id", "r-2"),
    ("remote_host", "10.0.0.2"),
    ("remote_port", 5601),
    ("tp_size", 2),
]
STEERING_HERE = [
    ("incarnation", "0000000000000007"),
    ("slot", 8),
    ("generation", "0000000000000007"),
    ("digest", "00" * 16),
    ("tokens", 97),
    ("computed", False),
    ("first_index", [3]),
    ("key", "00" * 32),
    ("host", "10.0.0.2"),
    ("port", 5601),
    ("ticket_key", "00" * 32),
    ("proof", "00" * 64),
    ("blocks", {**BLOCKS, "tokens": 8}),
    ("blocks", {**BLOCKS, "salt": "00" * 16}),
    ("blocks", {**BLOCKS, "digests": BLOCKS["digests"][:-32]}),
    ("blocks", {**BLOCKS, "digests": "00" + BLOCKS["digests"][2:]}),
    ("blocks", None),
    ("missing", [1]),
    ("weights", "others"),
    ("part", True),
    ("total", 98),
    ("of_a_newer_version", "?"),
    ("signature", "00" * 32),
]


@pytest.mark.parametrize(("key", "value"), [*STEERING, *STEERING_HERE])
def test_what_steers_a_read_is_signed_and_proved(key: str, value: object) -> None:
    """But for the address: a router may rewrite it."""
    with pytest.raises(TicketError, match="altered or made up"):
        read_ticket(altered(ANSWER.params(SECRETS), key, value), SECRETS)
    if key not in ("remote_host", "remote_port", "signature", "part"):
        assert not is_proved(read_ticket(altered(ANSWER.params(None, TICKET_KEY), key, value)))


def test_everything_that_is_read_is_in_those_lists() -> None:
    """So that a field which is added is signed, too."""
    here = {key for key, _ in STEERING_HERE} - {"of_a_newer_version"} | {"version"}
    assert set(ticket._NixlParams.__struct_fields__) == {key for key, _ in STEERING}
    assert set(ticket._FerryParams.__struct_fields__) == here


def test_what_a_router_changes_is_not_signed() -> None:
    params = OFFER.params(SECRETS) | {"do_remote_prefill": False, "router": "was here"}
    assert read_ticket(params, SECRETS) == read_ticket(OFFER.params(SECRETS), SECRETS)


# Proved.


def is_proved(ticket: Ticket) -> bool:
    """Whether a consumer that shook hands with its engine accepts it."""
    with contextlib.suppress(TicketError):
        check(ticket.proof, TICKET_KEY.public)
        return True
    return False


PART = replace(OFFER, tokens=64, total=96)
"""A part of ``OFFER``."""


def test_a_part_is_read_as_one() -> None:
    part = read_part(encode(PART.params(SECRETS)), SECRETS, is_last=False)
    assert (part.ticket.tokens, part.total, part.is_last) == (64, 96, False)
    with pytest.raises(TicketError, match="part of a ticket, for 64 of 96 tokens"):
        read_ticket(PART.params(SECRETS), SECRETS)
    with pytest.raises(TicketError, match="part of a ticket"):
        read_part(encode(PART.params(SECRETS)), SECRETS, is_last=True)
    for total in (0, 64, 63, -1, 1 << 33):
        offer = replace(PART, total=total) if total else OFFER
        with pytest.raises(TicketError, match=f"covers {offer.tokens} tokens, and the ticket"):
            read_part(encode(offer.params(SECRETS)), SECRETS, is_last=False)


def test_a_part_cannot_be_made_a_ticket() -> None:
    for secrets, key in ((SECRETS, None), (None, TICKET_KEY)):
        params = PART.params(secrets, key)
        del params[KEY]["part"]
        if secrets is not None:
            with pytest.raises(TicketError, match="altered or made up"):
                read_ticket(params, secrets)
        else:
            assert not is_proved(read_ticket(params))


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"7", b"\xff", b"[" * 100_000, b'{"kvferry": {}}'], ids=range(7)
)
@pytest.mark.parametrize("is_last", [False, True])
def test_malformed_parts(data: bytes, is_last: bool) -> None:
    with pytest.raises(TicketError):
        read_part(data, is_last=is_last)


REWRITTEN = {"remote_host": "192.0.2.1", "remote_port": 8100}


@pytest.mark.parametrize(("secrets", "routed"), [(None, ("192.0.2.1", 8100)), (SECRETS, None)])
def test_a_router_that_rewrites_the_address_breaks_no_proof(
    secrets: TicketSecrets | None, routed: tuple[str, int] | None
) -> None:
    """With secrets, only the address that they sign is asked."""
    ticket = read_ticket(OFFER.params(secrets, TICKET_KEY) | REWRITTEN, secrets)
    assert is_proved(ticket)
    assert (ticket.host, ticket.port, ticket.routed) == ("10.0.0.1", 5600, routed)


# Of other minor versions.


@pytest.mark.parametrize("conversation", [False, True])
def test_ticket_of_a_newer_minor_version(conversation: bool) -> None:
    """Fields that it adds are skipped, and are signed and proved nevertheless."""
    offer = ANSWER if conversation else OFFER
    signed, proved = offer.params() | {"remote_colour": "red"}, offer.params(None, TICKET_KEY)
    assert is_proved(read_ticket(proved))
    for params in (signed, proved):
        added = params[KEY]["blocks"] if conversation else params[KEY]
        added["compression"] = {"any": ["thing", 1, None, True]}
    sign(signed)
    assert read_ticket(travelled(signed), SECRETS) == read_ticket(offer.params(SECRETS), SECRETS)
    assert not is_proved(read_ticket(proved))
    added = signed[KEY]["blocks"] if conversation else signed[KEY]
    added["compression"]["any"] = []
    with pytest.raises(TicketError, match="altered or made up"):
        read_ticket(signed, SECRETS)
