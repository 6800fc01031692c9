"""An engine without a model, for tests of drivers, connectors and routers.

Everything but the model is real: endpoints, side channel, tickets, holds and the driver. Each rank
has its cache in a numpy array. "Computing" a request writes values that depend on the token, the
layer, the head and the element, so that every byte that another engine loads can be checked::

    two_ranks = CacheShape(tp=2)
    with ModelFreeEngine("prefill", two_ranks) as prefill, ModelFreeEngine("decode") as decode:
        ticket = prefill.serve("p-1", pages=[1, 2, 3], tokens=10)
        decode.pull("d-1", ticket, pages=[7, 4, 5])
        assert not decode.outcome("d-1").failed
        assert decode.wrong_bytes([7, 4, 5], tokens=10) == 0
        prefill.released("p-1")  # both ranks may use the pages for another request

This module needs nothing but what kvferry itself needs.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.core.endpoint import Endpoint, EndpointOptions, Identity, Load, PageCopies, Results
from kvferry.core.errors import KVFerryError
from kvferry.core.layout import Layout
from kvferry.core.layout.paged_layout import paged_layout
from kvferry.core.lifecycle.holds import EndedHold, Hold, RequestId, random_incarnation
from kvferry.core.lifecycle.rooms import Rooms
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.local_engine import LocalEngine
from kvferry.core.memory import CPU
from kvferry.core.messages import Coordinates
from kvferry.core.metrics import LoadRecord
from kvferry.core.options import DEFAULTS
from kvferry.core.planner.build_copies import Pages
from kvferry.core.security import Proof, TicketKey
from kvferry.core.security.ticket_proof import content_of
from kvferry.core.transport import Transport
from kvferry.core.transport.registry import create

POISON = 255
"""A byte that makes a NaN of every float, and -1 of every signed integer."""
LEASE_SECONDS = 30.0
PATIENCE_SECONDS = 20.0
"""Seconds that an engine waits for an outcome by default."""
_WAIT_SECONDS = 0.05
_TOKEN_LIMIT = 1 << 32
_SCATTER = np.uint64(0x9E37_79B9_7F4A_7C15)

Elements = npt.NDArray[Any]
"""An array of a cache's elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """How an engine keeps the cache of its model, which differs between engines of one model.

    Two engines can exchange pages if ``layers``, ``model_heads``, ``dim`` and ``dtype`` are equal.

    Attributes:
        tp: Number of tensor-parallel ranks, which share out the heads.
        block: Tokens of a page.
        heads_first: Whether a page is (head, token, element) rather than (token, head, element).
        pages: Pages of a rank, among them page 0, whose id stands for none.
        replicated: Whether each rank has all heads.
        windowed: Whether the last layer is a group of its own, like one with a sliding window.
        memory: The kind of memory that the layout claims; the cache is a numpy array anyway.
        dim: Elements of one head of one token.
        dtype: Type of an element, which both numpy and ``kvferry.Field`` know by this name.
    """

    tp: int = 1
    block: int = 4
    heads_first: bool = True
    pages: int = 16
    replicated: bool = False
    windowed: bool = False
    memory: str = CPU
    layers: int = 2
    model_heads: int = 4
    dim: int = 8
    dtype: str = "float32"

    def heads(self, rank: int) -> range:
        """Return the heads that a rank has."""
        if self.replicated:
            return range(self.model_heads)
        bounds = (self.model_heads * each // self.tp for each in (rank, rank + 1))
        return range(*bounds)

    def new_cache(self, rank: int) -> Elements:
        """Return a rank's cache, as (layer, page, ...), in which every byte is ``POISON``."""
        heads = len(self.heads(rank))
        inner = (heads, self.block) if self.heads_first else (self.block, heads)
        cache = np.empty((self.layers, self.pages, *inner, self.dim), dtype=self.dtype)
        cache.view(np.uint8).fill(POISON)
        return cache

    def layout(self, rank: int, cache: Elements) -> Layout:
        """Return the layout of a rank's cache: one field per layer, in one region."""
        heads = self.heads(rank)
        inner = ("head", "token") if self.heads_first else ("token", "head")
        made = paged_layout(
            {f"layer.{layer}": cache[layer] for layer in range(self.layers)},
            ("page", *inner, "element"),
            heads=(heads.start, heads.stop),
        )
        fields, groups = list(made.fields), made.groups
        if self.windowed:
            fields[-1], groups = msgspec.structs.replace(fields[-1], group=1), groups * 2
        region = dataclasses.replace(made.regions[0], kind=self.memory)
        return Layout(regions=(region,), groups=groups, fields=tuple(fields))

    def values(self, layer: int, tokens: range, heads: range) -> Elements:
        """Return what the model computes: a value for each layer, token, head and element.

        In elements of eight bytes, no two values are equal, and all bytes are used.
        """
        token, head, element = np.ix_(
            np.arange(tokens.start, tokens.stop, dtype=np.uint64),
            np.arange(heads.start, heads.stop, dtype=np.uint64),
            np.arange(self.dim, dtype=np.uint64),
        )
        row = (np.uint64(layer * _TOKEN_LIMIT) + token) * np.uint64(self.model_heads) + head
        # The factor is odd, so different numbers stay different.
        word = (row * np.uint64(self.dim) + element + np.uint64(1)) * _SCATTER
        kind = np.dtype(self.dtype)
        bits = np.finfo(self.dtype).nmant if kind.kind == "f" else 8 * kind.itemsize
        scattered: Elements = (word >> np.uint64(64 - bits)).astype(kind)
        return scattered


SMALL = CacheShape()
"""One rank with 16 pages of 4 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRank:
    """One rank: its cache, and the endpoint that serves and fills the cache.

    Attributes:
        cache: The cache, as (layer, page, head, token, element) or, unless ``shape.heads_first``,
            (layer, page, token, head, element).
    """

    shape: CacheShape
    index: int
    cache: Elements
    endpoint: Endpoint

    @property
    def heads(self) -> range:
        """The heads that the rank has."""
        return self.shape.heads(self.index)

    def read(self, layer: int, pages: list[int]) -> Elements:
        """Return pages of a layer as (token, head, element), whatever their order in memory."""
        blocks = self.cache[layer, pages]
        if self.shape.heads_first:
            blocks = blocks.swapaxes(1, 2)
        return blocks.reshape(-1, *blocks.shape[2:])

    def write(self, layer: int, pages: list[int], values: Elements) -> None:
        """Write (token, head, element) into pages of a layer, and zeros after the last token."""
        rows = np.zeros((len(pages) * self.shape.block, *values.shape[1:]), dtype=values.dtype)
        rows[: len(values)] = values
        blocks = rows.reshape(len(pages), self.shape.block, *values.shape[1:])
        self.cache[layer, pages] = blocks.swapaxes(1, 2) if self.shape.heads_first else blocks

    def values(self, layer: int, tokens: int, first_token: int = 0) -> Elements:
        """Return what the pages of tokens from ``first_token`` on must hold; see ``read``."""
        return self.shape.values(layer, range(first_token, first_token + tokens), self.heads)

    def compute(self, pages: list[int], tokens: int, first_token: int = 0) -> None:
        """Write a request's values into its pages, as a prefill would; see ``values``."""
        for layer in range(self.shape.layers):
            self.write(layer, pages, self.values(layer, tokens, first_token))

    def wrong_bytes(self, pages: list[int], tokens: int, first_token: int = 0) -> int:
        """Return how many bytes are wrong in a request's pages; after the last token, all are 0."""
        wrong = 0
        for layer in range(self.shape.layers):
            found = np.ascontiguousarray(self.read(layer, pages))
            right = np.zeros_like(found)
            right[:tokens] = self.values(layer, tokens, first_token)
            wrong += int(np.count_nonzero(found.view(np.uint8) != right.view(np.uint8)))
        return wrong


class ModelFreeEngine(LocalEngine):
    """All ranks of an engine, its scheduler's holds and its side channel, in this process.

    Args:
        transport: Makes the transport of each rank; by default, the driver's with its defaults.
        agreement: What must be equal on engines that exchange pages; see ``kvferry.Identity``.
        ticket_key: Proves the engine's tickets; without one, they have no proofs.
        clock: Seconds, for all that is due or late.
        copies: Makes, of a rank's cache, what copies between the device and the cache, whose pages
            are host pages then.
        **endpoint: What else ``kvferry.Endpoint`` takes, such as ``zero``.

    Attributes:
        rooms: The requests that other engines may follow; see ``kvferry.core.lifecycle.rooms``.
    """

    def __init__(
        self,
        name: str,
        shape: CacheShape = SMALL,
        *,
        driver: str = "loopback",
        transport: Callable[[], Transport] | None = None,
        options: EndpointOptions = DEFAULTS,
        agreement: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        ticket_key: TicketKey | None = None,
        clock: Callable[[], float] = time.monotonic,
        copies: Callable[[Elements], PageCopies | None] | None = None,
        **endpoint: Any,  # noqa: ANN401 - as many types as arguments
    ) -> None:
        self.shape, self.ticket_key, self.rooms = shape, ticket_key, Rooms(clock)
        self.ranks: list[EngineRank] = []
        self._failed: dict[str, KVFerryError | None] = {}
        self._ended: dict[str, EndedHold] = {}
        self._records = defaultdict[str, list[LoadRecord]](list)
        incarnation = random_incarnation()
        with ExitStack() as stack:
            for index in range(shape.tp):
                cache = shape.new_cache(index)
                identity = Identity(
                    engine=name,
                    incarnation=incarnation,
                    rank=index,
                    coordinates=Coordinates(tp=index),
                    agreement=agreement or {},
                )
                own = Endpoint(
                    identity=identity,
                    driver=driver,
                    transport=create(driver) if transport is None else transport(),
                    layout=shape.layout(index, cache),
                    slots=shape.pages,
                    options=options,
                    copies=None if copies is None else copies(cache),
                    clock=clock,
                    **endpoint,
                )
                stack.enter_context(own)
                self.ranks.append(EngineRank(shape=shape, index=index, cache=cache, endpoint=own))
            stack.pop_all()
        super().__init__(
            [rank.endpoint for rank in self.ranks],
            host=host,
            port=port,
            options=options,
            ticket_key=b"" if ticket_key is None else ticket_key.public,
            rooms=self.rooms,
            clock=clock,
        )

    def take_on(self, request: str) -> None:
        """Take a request on, whose pages the caller writes.

        Raises:
            ValueError: No hold is free, or the request was taken on already.
        """
        if not self.begin_prefill(request):
            raise ValueError(f"no hold is free for {request!r}, or it was taken on already")

    def compute(self, request: str, pages: list[int], tokens: int) -> None:
        """Take a request on, as ``take_on``, and compute its pages on every rank."""
        self.take_on(request)
        for rank in self.ranks:
            rank.compute(pages, tokens)

    def finish(
        self,
        request: str,
        pages: list[int],
        tokens: int,
        *,
        computed: bool = True,
        lease: float = LEASE_SECONDS,
        order: bool = True,
    ) -> Ticket:
        """Make the ticket of a request that was taken on, from when on its pages are held.

        The ticket says that they are complete, unless ``computed`` is False: then consumers wait
        until the ranks have passed the order, which ``order`` sends at once, or the next ``step``.
        """
        hold = self.scheduler_holds.ticket(RequestId(request), lease, frozenset(pages))
        if hold is None:
            raise ValueError(f"{request!r} was not taken on, or has its ticket already")
        if order:
            self.step()
        return self.ticket(request, hold, pages, tokens, computed=computed)

    def ticket(
        self, request: str, hold: Hold, pages: list[int], tokens: int, *, computed: bool
    ) -> Ticket:
        """Return a ticket, or one part of an early ticket, for these pages."""
        ticket = self.make_ticket(request, hold, range(tokens), [pages], computed=computed)
        return proved(ticket, self.ticket_key) if self.ticket_key is not None else ticket

    def serve(self, request: str, pages: list[int], tokens: int) -> Ticket:
        """Compute and finish a request; return its ticket."""
        self.compute(request, pages, tokens)
        return self.finish(request, pages, tokens)

    def pull(
        self,
        request: str,
        ticket: Ticket,
        pages: list[int],
        *,
        first: int = 0,
        first_index: int = 0,
        nothing: bool = False,
        shared: bool = False,
        early: int = 0,
        passed: Callable[[], bool] | None = None,
    ) -> None:
        """Start to load a request on every rank; ``outcome`` waits for its end.

        Args:
            request: The request's id on this engine.
            ticket: The producer's ticket.
            pages: The ids of the pages to fill.
            first: Position of the first token to load.
            first_index: Position of the first of ``pages`` among the pages of the request.
            nothing: Load nothing, and only tell the producer that its pages are not needed.
            shared: Whether other requests use the ticket, too.
            early: If not 0, the load is an early one of this number of tokens, and ``ticket`` is
                its first part.
            passed: Tells whether earlier work of the device on the pages is done; see
                ``kvferry.Endpoint.load``.
        """
        load = Load(
            request=RequestId(request),
            ticket=ticket,
            ranges=(None if nothing else (first, early or ticket.tokens),),
            local=(Pages(ids=np.array(pages, dtype=np.int64), first_index=first_index),),
            report=not nothing,
            shared=shared,
            is_early=bool(early),
        )
        self.load_on_all(load, passed)

    def extend(self, request: str, part: Ticket, *, is_last: bool = False) -> None:
        """Tell every rank of a newer part of an early load."""
        for rank in self.ranks:
            rank.endpoint.extend(RequestId(request), part, is_last=is_last)

    def prepare(self, ticket: Ticket) -> None:
        """Tell every rank that a request with this ticket waits for pages here."""
        for rank in self.ranks:
            rank.endpoint.prepare(ticket)
        self.directory.begin(ticket.request, ticket)

    def outcome(self, request: str, seconds: float = PATIENCE_SECONDS) -> Results:
        """Wait until every rank has reported a load; in ``failed`` is the error of any rank."""
        name = RequestId(request)
        self._wait(request, self._failed, seconds)
        error = self._failed.pop(name)
        return Results(
            received=frozenset({name}),
            failed={} if error is None else {name: error},
            loads=tuple(self._records.pop(name, ())),
        )

    def released(self, request: str, seconds: float = PATIENCE_SECONDS) -> EndedHold:
        """Wait until every rank has released a request's pages, which may be used again then."""
        self._wait(request, self._ended, seconds)
        return self._ended.pop(request)

    def wrong_bytes(self, pages: list[int], tokens: int) -> int:
        """Return how many bytes of a request's pages are wrong, on all ranks together."""
        return sum(rank.wrong_bytes(pages, tokens) for rank in self.ranks)

    def _wait(self, request: str, reported: Container[str], seconds: float) -> None:
        """Take results until a request is in ``_failed`` or ``_ended``."""
        deadline = time.monotonic() + seconds
        pause = 0.0
        while True:
            results = self.results(pause)
            self._failed.update({each: results.failed.get(each) for each in results.received})
            self._ended.update({each.request: each for each in results.ended})
            for record in results.loads:
                self._records[record.request].append(record)
            if request in reported:
                return
            pause = min(deadline - time.monotonic(), _WAIT_SECONDS)
            if pause <= 0:
                raise TimeoutError(f"no report of {request!r} on every rank in {seconds:g} s")


def proved(ticket: Ticket, key: TicketKey) -> Ticket:
    """Return the ticket with a proof by this key."""
    said = msgspec.to_builtins(ticket) | {"proof": None, "routed": None}
    proof = Proof(key=key.public, content=content_of(said), signature=key.sign(said))
    return dataclasses.replace(ticket, proof=proof)
