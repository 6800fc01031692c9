"""One request handed from one engine of ranks to another, and every byte and report checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.core.endpoint import Load
from kvferry.core.layout import HOLE
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.planner.plan import make_plan
from kvferry.integrations.vllm.cache_groups import CacheGroup
from tests.vllm.geometry.engine_of_ranks import Engine
from tests.vllm.geometry.model import Bytes, Layer, Part
from tests.vllm.geometry.rank import Extent, Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """vLLM's list of a request's blocks in one group: page ids by position, 0 for none."""

    ids: tuple[int, ...]
    cached: int = 0  # so many at the front are in the prefix cache, or stand for no page

    def positions(self) -> list[tuple[int, int]]:
        """(position, page) of those that are not in the prefix cache."""
        return [(i, page) for i, page in enumerate(self.ids) if i >= self.cached and page != HOLE]


def lists(engine: Engine, tokens: int, rng: np.random.Generator, hits: int = 0) -> list[Listed]:
    """What vLLM lists after so many tokens, by its groups; pages are taken at random.

    Of ``hits`` tokens, all but states are in the prefix cache.
    """
    found = [Listed(ids=())] * len(engine.config.kv_cache_groups)
    for group in engine.groups:
        found[group.index] = _list(engine, group, tokens, rng, hits)
    return found


def _list(
    engine: Engine, group: CacheGroup, tokens: int, rng: np.random.Generator, hits: int
) -> Listed:
    if group.is_state:
        if not group.tokens:  # a ring
            return Listed(ids=tuple(engine.take(1, rng)))
        front = (tokens - 1) // group.tokens
        return Listed(ids=(HOLE,) * front + tuple(engine.take(1 + engine.shape.scratch, rng)))
    count = -(-tokens // group.tokens)
    # `remove_skipped_blocks`: pages whose tokens are all behind the window are given back.
    gone = min(_unseen(group, tokens) // group.tokens, count)
    ids = (HOLE,) * gone + tuple(engine.take(count - gone, rng))
    return Listed(ids=ids, cached=max(gone, min(hits, tokens - 1) // group.tokens))


def _unseen(group: CacheGroup, tokens: int) -> int:
    """How many of the first tokens the next one does not attend to."""
    if group.window:
        return max(0, tokens - group.window + 1)
    return tokens - tokens % group.chunk if group.chunk else 0


def fill(engine: Engine, request: str, tokens: int, pages: Sequence[Listed]) -> None:
    """What a prefill leaves in the pages of a request; behind its last token, anything of it."""
    for rank in engine.ranks:
        for group, extent in enumerate(rank.extents):
            listed = [(i, page) for i, page in enumerate(pages[group].ids) if page != HOLE]
            for part in extent.parts if listed else ():
                for places, values in _contents(extent, part, listed, tokens, request):
                    rank.memory[places] = values


def _contents(
    extent: Extent, part: Part, listed: Sequence[tuple[int, int]], tokens: int, request: str
) -> Iterator[tuple[np.ndarray, Bytes]]:
    """Places and values of what the pages hold."""
    positions, ids = (np.array(some, dtype=np.int64) for some in zip(*listed, strict=True))
    if part.per_entry == 0:
        yield part.places[ids[:1]][0], part.values(part.held(tokens), request)
        return
    steps = extent.steps(part, positions)
    values = part.values(steps.ravel(), request)
    yield part.places[ids], values.reshape(*steps.shape, *values.shape[1:])


def offer(engine: Engine, request: str, tokens: int, pages: Sequence[Listed]) -> Ticket:
    """Take a request on, compute it, and make its ticket."""
    if engine.local.scheduler_holds.take_on(RequestId(request)) is None:
        raise AssertionError("no hold")
    engine.hear(orders=engine.local.scheduler_holds.drain())
    fill(engine, request, tokens, pages)
    hold = engine.local.scheduler_holds.ticket(RequestId(request), 120.0)
    if hold is None:
        raise AssertionError("no ticket")
    engine.hear(orders=engine.local.scheduler_holds.drain())
    offered = [group.producer_pages(pages[group.index].ids, tokens) for group in engine.groups]
    pages_of = [ids for _, ids in offered]
    ticket = engine.local.make_ticket(request, hold, range(tokens), pages_of, computed=True)
    return replace(ticket, first_index=tuple(first for first, _ in offered))


def load(engine: Engine, request: str, ticket: Ticket, pages: Sequence[Listed]) -> Load:
    """What a consumer's scheduler half orders."""
    wanted = [
        group.consumer_pages(_blocks(pages[group.index]), ticket.tokens) for group in engine.groups
    ]
    return Load(
        request=RequestId(request),
        ticket=ticket,
        ranges=tuple(tokens for tokens, _ in wanted),
        local=tuple(ids for _, ids in wanted),
    )


def _blocks(listed: Listed) -> list[object]:
    """As vLLM's block pool has them."""
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    blocks: list[object] = []
    for position, page in enumerate(listed.ids):
        block = KVCacheBlock(block_id=page, is_null=page == HOLE)
        if page != HOLE and position < listed.cached:
            block.set_block_hash(b"hash")
        blocks.append(block)
    return blocks


def cross(producer: Engine, consumer: Engine, tokens: int, *, hits: int = 0, seed: int = 0) -> None:
    """Hand one request over; every byte, every report and every hold is checked."""
    rng = np.random.default_rng(seed)
    request = f"{producer.name} {next(producer.numbers)}"
    theirs, ours = lists(producer, tokens, rng), lists(consumer, tokens, rng, hits)
    ticket = offer(producer, request, tokens, theirs)
    expected = [Expected(rank, consumer, producer.layers) for rank in consumer.workers]
    order = load(consumer, f"{consumer.name} {next(consumer.numbers)}", ticket, ours)
    pull(producer, consumer, order, request)
    for each in expected:
        each.check(request, tokens, ours)
    released(producer, request)
    for engine, pages in ((producer, theirs), (consumer, ours)):
        for listed in pages:
            engine.free(listed.ids)


def pull(producer: Engine, consumer: Engine, order: Load, request: str) -> None:
    """Load on every rank but one, then on that one; what it reads stays held until it has."""
    consumer.local.directory.begin(order.request, order.ticket)
    *most, last = consumer.workers
    for rank in most:
        rank.hear(loads=(order,))
    for rank in most:
        rank.await_received(order.request)
    needed = _read_by(last, consumer, producer)
    for rank in producer.workers:
        rank.poll()
        if rank.position.rank in needed:
            assert request not in rank.sent, "sent before its last reader was done"
        else:
            rank.await_sent(request)
    last.hear(loads=(order,))
    last.await_received(order.request)
    for rank in consumer.workers:
        assert rank.received.count(order.request) == 1
        assert order.request not in rank.failed


def _read_by(last: Rank, consumer: Engine, producer: Engine) -> set[int]:
    """The producer ranks to which this one says that it is done."""
    local, remote = (
        [r.endpoint.payload.layout for r in sorted(e.workers, key=lambda r: r.position.rank)]  # type: ignore[union-attr]
        for e in (consumer, producer)
    )
    found = make_plan(local, remote, last.position.rank)
    return {source.remote for source in found.sources} | set(found.notified_ranks)


def released(producer: Engine, request: str) -> None:
    """Every rank of the producer says once that the request is sent, and holds nothing more."""
    for rank in producer.ranks:
        rank.await_sent(request)
    producer.local.scheduler_holds.sent(RequestId(request))
    for rank in producer.ranks:
        rank.poll()
        assert rank.sent.count(request) == 1
        assert rank.words == 0
        assert rank.endpoint is None or rank.endpoint.held == 0


class Expected:
    """What a consumer rank's memory must be after a load, seen from before it.

    ``theirs`` are the producer's layers, among which draft layers may be missing.
    """

    def __init__(self, rank: Rank, consumer: Engine, theirs: Sequence[Layer]) -> None:
        self._rank = rank
        self._groups = consumer.groups
        self._memory = rank.memory.copy()
        known = {layer.name for layer in theirs}
        self._absent = {layer.name for layer in consumer.layers if layer.name not in known}

    def check(self, request: str, tokens: int, pages: Sequence[Listed]) -> None:
        """Tokens that are needed are there, other bytes of listed pages are zero (or what the
        producer has there, where both have it in one piece), and nothing else has changed."""
        for group in self._groups:
            listed = self._given(group, tokens, pages[group.index])
            for part in self._rank.extents[group.index].parts if listed else ():
                self._expect(group, part, listed, request, tokens, pages[group.index])
        wrong = np.flatnonzero(self._memory != self._rank.memory)
        assert not len(wrong), self._report(wrong)

    def _given(self, group: CacheGroup, tokens: int, listed: Listed) -> list[tuple[int, int]]:
        if group.is_state:
            index = (tokens - 1) // group.tokens if group.tokens else 0
            return [(index, listed.ids[index])]
        return listed.positions()

    def _expect(
        self,
        group: CacheGroup,
        part: Part,
        listed: Sequence[tuple[int, int]],
        request: str,
        tokens: int,
        pages: Listed,
    ) -> None:
        extent = self._rank.extents[group.index]
        for places, values in _contents(extent, part, listed, tokens, request):
            if part.key.rpartition("/")[0] in self._absent:
                self._memory[places] = 0
                continue
            found = self._rank.memory[places]
            here = np.where(found == values, values, 0)  # in one piece with what is needed
            if group.is_state:
                needed = np.ones(1, dtype=bool)
            else:
                first = max(pages.cached * group.tokens, _unseen(group, tokens))
                steps = extent.steps(part, np.array([i for i, _ in listed])) * part.per_entry
                needed = (steps + part.per_entry > first) & (steps < tokens)
            self._memory[places] = np.where(needed[..., None, None], values, here)

    def _report(self, wrong: np.ndarray) -> str:
        place = int(wrong[0])
        found, wanted = self._rank.memory[place], self._memory[place]
        where = "in no tensor"
        for part in (part for extent in self._rank.extents for part in extent.parts):
            for at in np.argwhere(part.places == place)[:1]:
                where = f"(page, entry, shard, byte) {at.tolist()} of {part.key} {part.shards}"
        rank = self._rank.position.rank
        return f"rank {rank}: {len(wrong)} bytes differ, first {place}, {where}: {found}, {wanted}"
