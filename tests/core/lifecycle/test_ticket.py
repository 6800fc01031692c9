"""``Ticket``: the bounds of its values, and the check against the handshake."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvferry.core.errors import TicketError
from kvferry.core.lifecycle import ticket as module
from kvferry.core.lifecycle.prompt_digest import MAX_BLOCK_DIGESTS, BlockDigests
from kvferry.core.lifecycle.ticket import Ticket, check_against, page_limits
from kvferry.core.memory import Region
from kvferry.core.messages import RankPayload
from kvferry.core.side_channel_messages import GENERATION_LIMIT
from tests.core.layouts import heads, layout, paged
from tests.core.messages import payload, ticket

TICKET = ticket(
    port=5600, incarnation=99, pages=((0, 0, 4, 7), (1,)), first_index=(0, 5), tokens=50
)


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
        ({"tokens": module.MAX_TOKENS + 1}, "tokens"),
        ({"digest": bytes(15)}, "digest of 15 bytes"),
        ({"tp_size": 0}, "tp_size 0"),
        ({"tp_size": (1 << 16) + 1}, "tp_size 65537"),
        ({"key": bytes(31)}, "key of 31 bytes; it has 32"),
        ({"pages": ((),) * 257, "first_index": (0,) * 257}, "257 groups; 256 are allowed"),
        ({"first_index": (0,)}, "1 first indices for 2 groups"),
        ({"first_index": (0, -1)}, "first index of -1"),
        ({"first_index": (module.MAX_TOKENS + 1, 0)}, "first index of"),
        ({"missing": (1,)}, "missing tokens of 1 groups; there are 2"),
        ({"missing": (0, -1)}, "-1 missing tokens"),
        ({"missing": (module.MAX_TOKENS + 1, 0)}, "missing tokens are not in"),
        ({"pages": ((1, -2), (1,))}, "group 0 names block -2"),
        ({"pages": ((1, module.MAX_PAGE + 1), (1,))}, f"block {module.MAX_PAGE + 1}"),
        ({"pages": ((1,), (3, 4, 3))}, "group 1 names block 3 more than once"),
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
        {"tokens": module.MAX_TOKENS},
        {"tp_size": 1 << 16},
        {"key": bytes(32)},
        {"first_index": (module.MAX_TOKENS, 0)},
        {"missing": (module.MAX_TOKENS, 0)},
        {"pages": ((0, 0, 0), ())},
        {"pages": ((5,), (5,))},
        {"pages": ((module.MAX_PAGE,), (0,))},
    ],
)
def test_values_at_the_bounds_are_allowed(changes: dict[str, Any]) -> None:
    assert replace(TICKET, **changes) != TICKET


def blocks(tokens: int = 16, salt: int = 16, digests: int = 3 * 16) -> BlockDigests:
    """Return digests of blocks of ``tokens``, with that many bytes of salt and digests."""
    return BlockDigests(tokens=tokens, salt=bytes(salt), digests=bytes(digests))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokens": 0}, "blocks of 0 tokens"),
        ({"tokens": -16}, "blocks of -16 tokens"),
        ({"tokens": module.MAX_TOKENS + 1}, "blocks of"),
        ({"salt": 0}, "a salt of 0 bytes; it has 16"),
        ({"salt": 15}, "a salt of 15 bytes"),
        ({"salt": 17}, "a salt of 17 bytes"),
        ({"digests": 47}, "digests of 47 bytes; each has 16"),
        ({"digests": 4 * 16}, "4 digests of blocks of 16 for 50 tokens"),
        ({"tokens": 17}, "3 digests of blocks of 17 for 50 tokens"),
        ({"tokens": 51, "digests": 16}, "1 digests of blocks of 51 for 50 tokens"),
    ],
)
def test_digests_out_of_bounds_are_refused(changes: dict[str, int], complaint: str) -> None:
    with pytest.raises(TicketError, match=complaint):
        replace(TICKET, blocks=blocks(**changes))


def test_more_digests_than_allowed_are_refused() -> None:
    most = replace(TICKET, tokens=module.MAX_TOKENS, blocks=blocks(1, 16, MAX_BLOCK_DIGESTS * 16))
    with pytest.raises(TicketError, match="513 digests of blocks; 512 are allowed"):
        replace(most, blocks=blocks(1, 16, (MAX_BLOCK_DIGESTS + 1) * 16))


@pytest.mark.parametrize(
    "changes", [{}, {"tokens": module.MAX_TOKENS, "digests": 0}, {"tokens": 1}, {"digests": 16}]
)
def test_digests_at_the_bounds_are_allowed(changes: dict[str, int]) -> None:
    """A ticket may have fewer digests than blocks: with states, there are none."""
    made = replace(TICKET, blocks=blocks(**changes))
    assert made.blocks is not None
    assert msgspec.convert(msgspec.to_builtins(made), Ticket) == made


def test_too_many_pages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TICKET_PAGES", 5)
    assert replace(TICKET, pages=((1, 2, 3), (4, 5))) != TICKET
    with pytest.raises(TicketError, match="6 block ids; 5 are allowed"):
        replace(TICKET, pages=((1, 2, 3), (4, 5, 6)))


def test_a_ticket_survives_msgspec() -> None:
    assert msgspec.convert(msgspec.to_builtins(TICKET), Ticket) == TICKET


def payloads(ranks: int = 1, pages: tuple[int, int] = (8, 2), slots: int = 4) -> list[RankPayload]:
    """Return the payloads of a producer with two groups."""
    fields = [heads(f"{i}", group=i, region=i, pages=count) for i, count in enumerate(pages)]
    changes = {"layout": layout(*fields, groups=[paged(), paged()])}
    table = Region(address=1 << 20, nbytes=8 * slots)
    return [
        msgspec.structs.replace(
            payload(rank, incarnation=99), slots=table, watermarks=table, **changes
        )
        for rank in range(ranks)
    ]


def check(one: Ticket, ranks: list[RankPayload]) -> None:
    check_against(one, ranks, page_limits(ranks))


def test_a_ticket_that_fits_the_handshake_is_accepted() -> None:
    check(TICKET, payloads())
    check(replace(TICKET, tp_size=3), payloads(ranks=3))


@pytest.mark.parametrize(
    ("changes", "shape", "complaint"),
    [
        ({"incarnation": 98}, {}, "another life of engine 'prefill'"),
        ({}, {"ranks": 2}, "tp_size 1, the handshake 2"),
        ({}, {"slots": 3}, "slot 3; the producer has 3"),
        ({"pages": ((1,),), "first_index": (0,)}, {}, "1 groups; the producer has 2"),
        ({}, {"pages": (7, 2)}, "group 0 names block 7; the producer has 7"),
        ({}, {"pages": (8, 1)}, "group 1 names block 1; the producer has 1"),
    ],
)
def test_a_ticket_that_contradicts_the_handshake_is_refused(
    changes: dict[str, Any], shape: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(TicketError, match=complaint):
        check(replace(TICKET, **changes), payloads(**shape))


def test_one_rank_of_another_incarnation_is_enough_to_refuse() -> None:
    ranks = payloads(ranks=2)
    ranks[1] = msgspec.structs.replace(ranks[1], incarnation=98)
    with pytest.raises(TicketError, match="now 98"):
        check(replace(TICKET, tp_size=2), ranks)


def test_the_rank_with_the_fewest_pages_of_a_group_bounds_block_ids() -> None:
    small, large = payloads(pages=(7, 2))[0], payloads(pages=(8, 2))[0]
    with pytest.raises(TicketError, match="names block 7"):
        check(TICKET, [large, small])
    without_group = replace(large.layout, fields=large.layout.fields[1:])
    check(TICKET, [large, msgspec.structs.replace(large, layout=without_group)])


def test_block_ids_of_a_group_without_fields_are_not_bounded() -> None:
    one = payloads()[0]
    without = replace(one.layout, fields=one.layout.fields[:1])
    check(TICKET, [msgspec.structs.replace(one, layout=without)])
