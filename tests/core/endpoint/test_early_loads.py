"""Loads that begin while the producer computes the rest of the request."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from kvferry.core.endpoint import Load, LoadRecord
from kvferry.core.errors import KVFerryError, TicketError
from kvferry.core.lifecycle.holds import Hold, HoldEnd, RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.planner.build_copies import Pages
from kvferry.core.security import TicketKey
from kvferry.testing.engines import SMALL, CacheShape
from tests.core.endpoint.engines import (
    DIM,
    HEADS,
    LAYERS,
    Engine,
    eventually,
)
from tests.core.messages import altered

CHUNK = 8
"""Tokens of a chunk; two pages of prefill."""
TOKENS = 3 * CHUNK
TO = [8, 9, 10, 11, 12, 13]


class Prompt:
    """A request that the prefill engine computes chunk by chunk."""

    def __init__(self, prefill: Engine) -> None:
        self.prefill, self.port = prefill, prefill.server.port
        self.pages = list(range(1, TOKENS // prefill.shape.block + 1))
        prefill.take_on("p")

    def compute(self, chunks: int) -> None:
        """Compute so many chunks in all."""
        for rank in self.prefill.ranks:
            rank.compute(self._first(chunks * CHUNK), chunks * CHUNK)

    def part(self, chunks: int, tokens: int = 0) -> Ticket:
        """Order the watermark for so many chunks, or tokens, and return the part for them."""
        tokens = tokens or chunks * CHUNK
        hold = self.prefill.scheduler_holds.mark(RequestId("p"), tokens)
        assert hold is not None
        self.prefill.step()
        pages = self._first(chunks * CHUNK)
        part = self.prefill.ticket("p", hold, pages, tokens, computed=False)
        return replace(part, port=self.port)

    def finish(self, *, computed: bool = True, order: bool = True) -> Ticket:
        self.compute(3)
        ticket = self.prefill.finish("p", self.pages, TOKENS, computed=computed, order=order)
        return replace(ticket, port=self.port)

    def _first(self, tokens: int) -> list[int]:
        return self.pages[: tokens // self.prefill.shape.block]


@contextmanager
def both(
    prefill: CacheShape = SMALL, decode: CacheShape = SMALL, ticket_key: TicketKey | None = None
) -> Iterator[tuple[Prompt, Engine]]:
    """Run two engines, and take on a prompt."""
    with (
        Engine("prefill", prefill, ticket_key=ticket_key) as one,
        Engine("decode", decode) as other,
    ):
        yield Prompt(one), other


@pytest.fixture
def prompt(prefill: Engine) -> Prompt:
    return Prompt(prefill)


def has_tokens(decode: Engine, tokens: int) -> bool:
    return all(
        np.array_equal(rank.read(layer, TO)[:tokens], rank.values(layer, tokens))
        for rank in decode.ranks
        for layer in range(LAYERS)
    )


def wait_for(decode: Engine, tokens: int) -> None:
    eventually(lambda: has_tokens(decode, tokens), f"{tokens} tokens were read early")


def records(decode: Engine) -> list[LoadRecord]:
    """Wait until every rank has reported the load; return its figures, which all succeeded."""
    results = decode.outcome("d")
    assert not results.failed
    return list(results.loads)


def begin(prompt: Prompt, decode: Engine, request: str = "d") -> None:
    """Start an early load, and wait until the first chunk is read."""
    prompt.compute(1)
    decode.pull(request, prompt.part(1), TO, early=TOKENS)
    wait_for(decode, CHUNK)


def finish(prompt: Prompt, decode: Engine, *, computed: bool = True) -> LoadRecord:
    decode.extend("d", prompt.finish(computed=computed), is_last=True)
    record, *_ = records(decode)
    assert has_tokens(decode, TOKENS)
    return record


@pytest.mark.parametrize(
    ("of_prefill", "of_decode"),
    [
        (CacheShape(tp=2), CacheShape()),
        (CacheShape(block=2, pages=32), CacheShape(block=4, tp=2)),
    ],
)
def test_finished_chunks_are_read_while_the_rest_is_computed(
    of_prefill: CacheShape, of_decode: CacheShape
) -> None:
    with both(of_prefill, of_decode) as (prompt, decode):
        begin(prompt, decode)
        prompt.compute(2)
        decode.extend("d", prompt.part(2))
        wait_for(decode, 2 * CHUNK)
        decode.extend("d", prompt.finish(), is_last=True)
        for record in records(decode):
            assert record.early_nbytes * 3 == record.nbytes * 2
        assert has_tokens(decode, TOKENS)
        assert prompt.prefill.released("p").end is HoldEnd.READ


def windowed(ticket: Ticket, window: int | None = None) -> Ticket:
    """Return a ticket, or a part without ``window``, with a second group, from that page on."""
    [pages] = ticket.pages
    of_window = () if window is None else pages[window:]
    return replace(ticket, pages=(pages, of_window), first_index=(0, window or 0))


def test_windows_are_read_with_the_last_part() -> None:
    shape = CacheShape(windowed=True)
    with both(shape, shape) as (prompt, decode):
        prompt.compute(2)
        local = [Pages(ids=np.array(TO[first:]), first_index=first) for first in (0, 2)]
        load = Load(
            request=RequestId("d"),
            ticket=windowed(prompt.part(1)),
            ranges=((0, TOKENS), (CHUNK, TOKENS)),
            local=tuple(local),
            is_early=True,
        )
        [rank] = decode.ranks
        rank.endpoint.load(load)
        decode.directory.begin("d", load.ticket)
        decode.extend("d", windowed(prompt.part(2)))
        early = rank.values(0, 2 * CHUNK)
        eventually(
            lambda: np.array_equal(rank.read(0, TO)[: 2 * CHUNK], early), "full attention is read"
        )
        assert np.isnan(rank.read(1, TO[2:])).all(), "the window is not read"
        decode.extend("d", windowed(prompt.finish(), 2), is_last=True)
        [record] = records(decode)
        assert record.early_nbytes == CHUNK_NBYTES, "two chunks of one of two layers"
        assert record.nbytes == CHUNK_NBYTES * 5 // 2
        assert np.array_equal(rank.read(0, TO), rank.values(0, TOKENS))
        assert np.array_equal(rank.read(1, TO[2:]), rank.values(1, TOKENS)[CHUNK:])


def without_pages(part: Ticket) -> Ticket:
    """Return a part on which the check itself fails."""
    broken = copy.copy(part)
    object.__setattr__(broken, "pages", None)
    return broken


HOSTILE: dict[str, Callable[[Ticket], Ticket]] = {
    "another hold": lambda part: altered(part, hold=Hold(slot=0, generation=5)),
    "other pages": lambda part: altered(part, pages=((6, 5, 4, 3),)),
    "no proof": lambda part: replace(part, proof=None),
    "another engine": lambda part: replace(part, engine="another"),
    "another incarnation": lambda part: replace(part, incarnation=part.incarnation ^ 1 or 2),
    "pages out of range": lambda part: altered(part, pages=((1, 2, 3, 1 << 20),)),
    "no pages": without_pages,
}
CHUNK_NBYTES = LAYERS * CHUNK * HEADS * DIM * 4


@pytest.mark.parametrize(
    ("what", "is_last"),
    [*((what, False) for what in HOSTILE), ("another hold", True), ("no pages", True)],
)
def test_a_part_that_was_altered_fails_the_load(what: str, is_last: bool) -> None:
    with both(ticket_key=TicketKey()) as (prompt, decode):
        begin(prompt, decode)
        part = prompt.finish() if is_last else prompt.part(2)
        decode.extend("d", HOSTILE[what](part), is_last=is_last)
        assert isinstance(decode.error("d"), KVFerryError if what == "no pages" else TicketError)


def test_parts_for_a_request_without_an_early_load_are_ignored(
    prompt: Prompt, decode: Engine
) -> None:
    part = prompt.part(1)
    decode.extend("d", part)
    decode.pull("d", prompt.finish(), TO)
    decode.extend("d", part, is_last=True)
    records(decode)
    assert has_tokens(decode, TOKENS)
