"""``Ticket``: the bounds of its values, and the check against the handshake."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvferry.core.errors import TicketError
from kvferry.core.lifecycle import ticket as module
from kvferry.core.lifecycle.prompt_digest import MAX_BLOCK_DIGESTS, BlockDigests
from kvferry.core.lifecycle.ticket import MAX_PAGE, MAX_TOKENS, Ticket, check_against, page_limits
from kvferry.core.memory import Region
from kvferry.core.messages import RankPayload
from kvferry.core.side_channel_messages import GENERATION_LIMIT
from tests.core.layouts import heads, layout, paged
from tests.core.messages import payload, ticket

TICKET = ticket(
    port=5600, incarnation=99, pages=((0, 0, 4, 7), (1,)), first_index=(0, 5), tokens=50
)


def blocks(tokens: int = 16, salt: int = 16, digests: int = 3) -> dict[str, Any]:
    """Return digests of blocks of ``tokens``, with that many bytes of salt, and digests."""
    made = BlockDigests(tokens=tokens, salt=bytes(salt), digests=bytes(digests * 16))
    return {"blocks": made}


UNEVEN = BlockDigests(tokens=16, salt=bytes(16), digests=bytes(47))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"engine": ""}, "engine has 0 characters"),
        ({"request": "r" * 257}, "request has 257 characters"),
        ({"host": "h" * 257}, "host has 257"),
        ({"port": 0}, "port 0"),
        ({"port": 65536}, "port 65536"),
        ({"incarnation": 0}, "incarnation 0"),
        ({"incarnation": GENERATION_LIMIT}, f"incarnation {GENERATION_LIMIT}"),
        ({"tokens": 0}, "0 tokens"),
        ({"tokens": MAX_TOKENS + 1}, "tokens"),
        ({"digest": bytes(15)}, "digest of 15 bytes"),
        ({"tp_size": 0}, "tp_size 0"),
        ({"tp_size": (1 << 16) + 1}, "tp_size 65537"),
        ({"key": bytes(31)}, "key of 31 bytes; it has 32"),
        ({"pages": ((),) * 257, "first_index": (0,) * 257}, "257 groups; 256 are allowed"),
        ({"first_index": (0,)}, "1 first indices for 2 groups"),
        ({"first_index": (0, -1)}, "first index of -1"),
        ({"first_index": (MAX_TOKENS + 1, 0)}, "first index of"),
        ({"missing": (1,)}, "missing tokens of 1 groups; there are 2"),
        ({"missing": (0, -1)}, "-1 missing tokens"),
        ({"missing": (MAX_TOKENS + 1, 0)}, "missing tokens are not in"),
        ({"pages": ((1, -2), (1,))}, "group 0 names block -2"),
        ({"pages": ((1, MAX_PAGE + 1), (1,))}, f"block {MAX_PAGE + 1}"),
        ({"pages": ((1,), (3, 4, 3))}, "group 1 names block 3 more than once"),
        (blocks(0), "blocks of 0 tokens"),
        (blocks(-16), "blocks of -16 tokens"),
        (blocks(MAX_TOKENS + 1), "blocks of"),
        (blocks(salt=0), "a salt of 0 bytes; it has 16"),
        (blocks(salt=15), "a salt of 15 bytes"),
        (blocks(salt=17), "a salt of 17 bytes"),
        ({"blocks": UNEVEN}, "digests of 47 bytes; each has 16"),
        (blocks(digests=4), "4 digests of blocks of 16 for 50 tokens"),
        (blocks(17), "3 digests of blocks of 17 for 50 tokens"),
        (blocks(51, digests=1), "1 digests of blocks of 51 for 50 tokens"),
        (
            {"tokens": MAX_TOKENS, **blocks(1, digests=MAX_BLOCK_DIGESTS + 1)},
            "513 digests of blocks; 512 are allowed",
        ),
    ],
)
def test_a_value_out_of_bounds_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TicketError, match=complaint):
        replace(TICKET, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "e" * 256, "request": "r", "host": "h"},
        {"port": 1},
        {"port": 65535},
        {"incarnation": 1},
        {"incarnation": GENERATION_LIMIT - 1},
        {"tokens": 1},
        {"tokens": MAX_TOKENS},
        {"tp_size": 1 << 16},
        {"key": bytes(32)},
        {"first_index": (MAX_TOKENS, 0)},
        {"missing": (MAX_TOKENS, 0)},
        {"pages": ((0, 0, 0), ())},
        {"pages": ((5,), (5,))},
        {"pages": ((MAX_PAGE,), (0,))},
        blocks(),
        blocks(1),
        blocks(digests=1),
        blocks(MAX_TOKENS, digests=0),  # with states, there are none
        {"tokens": MAX_TOKENS, **blocks(1, digests=MAX_BLOCK_DIGESTS)},
    ],
)
def test_values_at_the_bounds_are_allowed(changes: dict[str, Any]) -> None:
    made = replace(TICKET, **changes)
    assert made != TICKET
    assert msgspec.convert(msgspec.to_builtins(made), Ticket) == made


def test_too_many_pages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TICKET_PAGES", 5)
    assert replace(TICKET, pages=((1, 2, 3), (4, 5))) != TICKET
    with pytest.raises(TicketError, match="6 block ids; 5 are allowed"):
        replace(TICKET, pages=((1, 2, 3), (4, 5, 6)))


def payloads(
    ranks: int = 1,
    pages: tuple[int, int] = (8, 2),
    slots: int = 4,
    incarnation: int = 99,
    fields: slice = slice(None),
) -> list[RankPayload]:
    """Return the payloads of a producer with two groups, or some of their fields."""
    both = [heads(f"{i}", group=i, region=i, pages=count) for i, count in enumerate(pages)]
    made = layout(*both, groups=[paged(), paged()])
    table = Region(address=1 << 20, nbytes=8 * slots)
    changes = {"layout": replace(made, fields=made.fields[fields])}
    return [
        msgspec.structs.replace(
            payload(rank, incarnation=incarnation), slots=table, watermarks=table, **changes
        )
        for rank in range(ranks)
    ]


THREE = replace(TICKET, tp_size=3)


@pytest.mark.parametrize(
    ("one", "ranks", "complaint"),
    [
        (TICKET, payloads(), ""),
        (THREE, payloads(3), ""),
        (replace(TICKET, incarnation=98), payloads(), "another life of engine 'prefill'"),
        (THREE, [*payloads(3)[:2], *payloads(3, incarnation=98)[2:]], "now 98"),
        (TICKET, payloads(2), "tp_size 1, the handshake 2"),
        (TICKET, payloads(slots=3), "slot 3; the producer has 3"),
        (
            replace(TICKET, pages=((1,),), first_index=(0,)),
            payloads(),
            "1 groups; the producer has 2",
        ),
        (TICKET, payloads(pages=(7, 2)), "group 0 names block 7; the producer has 7"),
        (TICKET, payloads(pages=(8, 1)), "group 1 names block 1; the producer has 1"),
        # The rank with the fewest pages of a group counts; one without fields of it does not.
        (TICKET, payloads() + payloads(pages=(7, 2)), "names block 7"),
        (TICKET, payloads() + payloads(fields=slice(1, 2)), ""),
        (TICKET, payloads(fields=slice(1)), ""),
    ],
)
def test_a_ticket_that_contradicts_the_handshake_is_refused(
    one: Ticket, ranks: list[RankPayload], complaint: str
) -> None:
    limits = page_limits(ranks)
    if not complaint:
        check_against(one, ranks, limits)
        return
    with pytest.raises(TicketError, match=complaint):
        check_against(one, ranks, limits)
