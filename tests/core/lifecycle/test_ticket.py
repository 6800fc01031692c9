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
        ({"engine": ""}, "characters of engine is 0; 1 to 256 are allowed"),
        ({"request": "r" * 257}, "characters of request is 257"),
        ({"host": "h" * 257}, "characters of host is 257"),
        ({"port": 0}, "port is 0; 1 to 65535 are allowed"),
        ({"port": 65536}, "port is 65536"),
        ({"incarnation": 0}, "incarnation is 0"),
        ({"incarnation": GENERATION_LIMIT}, f"incarnation is {GENERATION_LIMIT}"),
        ({"tokens": 0}, "tokens is 0"),
        ({"tokens": MAX_TOKENS + 1}, f"tokens is {MAX_TOKENS + 1}"),
        ({"digest": bytes(15)}, "the digest is 15; 16 to 16 are allowed"),
        ({"tp_size": 0}, "tp_size is 0"),
        ({"tp_size": (1 << 16) + 1}, "tp_size is 65537"),
        ({"key": bytes(31)}, "the key is 31; 32 to 32 are allowed"),
        (
            {"pages": ((),) * 257, "first_index": (0,) * 257},
            "number of groups is 257; 0 to 256 are allowed",
        ),
        ({"first_index": (0,)}, "first indices is 1; 2 to 2 are allowed"),
        ({"first_index": (0, -1)}, "first index is -1"),
        ({"first_index": (MAX_TOKENS + 1, 0)}, f"first index is {MAX_TOKENS + 1}"),
        ({"missing": (1,)}, "groups with missing tokens is 1; 2 to 2 are allowed"),
        ({"missing": (0, -1)}, "missing tokens is -1"),
        ({"missing": (MAX_TOKENS + 1, 0)}, "missing tokens is"),
        ({"pages": ((1, -2), (1,))}, "block of group 0 is -2"),
        ({"pages": ((1, MAX_PAGE + 1), (1,))}, f"block of group 0 is {MAX_PAGE + 1}"),
        ({"pages": ((1,), (3, 4, 3))}, "group 1 names block 3 more than once"),
        (blocks(0), "tokens of a block is 0"),
        (blocks(-16), "tokens of a block is -16"),
        (blocks(MAX_TOKENS + 1), "tokens of a block is"),
        (blocks(salt=0), "the salt is 0; 16 to 16 are allowed"),
        (blocks(salt=15), "the salt is 15"),
        (blocks(salt=17), "the salt is 17"),
        ({"blocks": UNEVEN}, "rest of the bytes of digests is 15"),
        (blocks(digests=4), "digests of blocks is 4; 0 to 3 are allowed"),
        (blocks(17), "digests of blocks is 3; 0 to 2 are allowed"),
        (blocks(51, digests=1), "digests of blocks is 1; 0 to 0 are allowed"),
        (
            {"tokens": MAX_TOKENS, **blocks(1, digests=MAX_BLOCK_DIGESTS + 1)},
            "digests of blocks is 513; 0 to 512 are allowed",
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
    with pytest.raises(TicketError, match="block ids is 6; 0 to 5 are allowed"):
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
        (TICKET, payloads() + payloads(slots=3), "slot 3; the producer has 3"),
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
