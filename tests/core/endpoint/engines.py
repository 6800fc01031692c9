"""Small engines without a model: numpy caches, real endpoints and side channels, loopback."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.core.endpoint import (
    Endpoint,
    EndpointOptions,
    HandshakeRelay,
    Identity,
    Load,
    PageCopies,
    Results,
)
from kvferry.core.errors import EndpointClosedError, KVFerryError
from kvferry.core.handshake import HandshakeServer
from kvferry.core.layout import Field, Group, GroupKind, Layout, axis
from kvferry.core.lifecycle.digest import digest
from kvferry.core.lifecycle.holds import EndedHold, Hold, RequestId, random_incarnation
from kvferry.core.lifecycle.rooms import Rooms
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import CPU, region_of
from kvferry.core.messages import Coordinates, Note, decode_notes
from kvferry.core.planner.build_copies import Pages, Spans
from kvferry.core.planner.zeroing import zero_cpu
from kvferry.core.security import TicketKey
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport import (
    EnterThread,
    Notification,
    PeerId,
    Transport,
    enter_nothing,
)
from kvferry.drivers.loopback import LoopbackTransport
from tests.core.ticket_proofs import proved

LAYERS, HEADS, DIM, PAGES = 2, 4, 8, 16
POISON = np.float32("nan")
N = TypeVar("N", bound=Note)


@dataclass(kw_only=True)
class Shape:
    """Shape of an engine's cache: pages of [heads, tokens, dim] or [tokens, heads, dim].

    ``memory`` is the kind of memory that the layout claims; the cache is a numpy array always.
    With ``windowed``, the last layer is a group of its own, as one with a sliding window is.
    """

    tp: int = 1
    block: int = 4
    heads_first: bool = True
    pages: int = PAGES
    replicated: bool = False
    memory: str = CPU
    windowed: bool = False

    @property
    def heads(self) -> int:
        return HEADS if self.replicated else HEADS // self.tp

    def first_head(self, rank: int) -> int:
        return 0 if self.replicated else rank * self.heads


@dataclass(kw_only=True)
class Rank:
    """One rank: its cache as (layer, page, ...), and its endpoint."""

    cache: npt.NDArray[np.float32]
    endpoint: Endpoint
    heads_first: bool
    first_head: int

    def tokens(self, pages: list[int], layer: int) -> npt.NDArray[np.float32]:
        """Return these pages as (token, head, dim), whatever their order in memory."""
        blocks = self.cache[layer, pages]
        if self.heads_first:
            blocks = blocks.swapaxes(1, 2)
        return blocks.reshape(-1, *blocks.shape[2:])


class Steps:
    """Relays handshakes to all ranks of an engine, as its scheduler half does in its steps."""

    def __init__(
        self, ranks: list[Rank], options: EndpointOptions, clock: Callable[[], float]
    ) -> None:
        self._ranks = ranks
        self._relay = HandshakeRelay(options, clock)
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self.may_step = threading.Event()
        self.may_step.set()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def begin(self, request: str, ticket: Ticket) -> None:
        """A request came with a ticket; its load is started when this method has returned."""
        with self._lock:
            self._relay.begin(request, ticket)
            self._step()

    def end(self, request: str, *, loaded: bool | None) -> None:
        """A request's load is over."""
        with self._lock:
            self._relay.end(request, loaded=loaded)

    def close(self) -> None:
        """Make no more steps."""
        self._is_over.set()
        self.may_step.set()
        self._thread.join()
        self._relay.close()

    def _run(self) -> None:
        while not self._is_over.wait(0.002):
            self.may_step.wait()
            with self._lock:
                self._step()

    def _step(self) -> None:
        news = self._relay.take()
        for rank in self._ranks:
            with contextlib.suppress(EndpointClosedError):
                rank.endpoint.relay(news)


@dataclass(kw_only=True)
class Engine:
    """All ranks of an engine, its scheduler's holds and its side channel."""

    name: str
    shape: Shape
    ranks: list[Rank]
    server: HandshakeServer
    scheduler_holds: SchedulerHolds
    incarnation: int
    ticket_key: TicketKey | None = None
    rooms: Rooms = field(default_factory=Rooms)
    ids: Iterator[int] = field(default_factory=itertools.count)
    sent: list[list[RequestId]] = field(default_factory=list)
    steps: Steps | None = None

    def step(self, passed: Callable[[], bool] | None = None) -> None:
        """Do one engine step: send the orders to every rank."""
        orders = self.scheduler_holds.drain()
        for rank in self.ranks:
            rank.endpoint.apply(orders, passed)

    def compute(self, request: str, pages: list[int], tokens: int) -> None:
        """Take a request on and fill its pages with values that are unique to its tokens."""
        assert self.scheduler_holds.take_on(RequestId(request)) is not None
        self.step()
        for rank in self.ranks:
            fill(self.shape, rank, pages, tokens)

    def finish(
        self,
        request: str,
        pages: list[int],
        tokens: int,
        *,
        computed: bool = True,
        lease: float = 30.0,
        order: bool = True,
    ) -> Ticket:
        """Make the ticket and, with ``order``, send the workers the order that goes with it."""
        hold = self.scheduler_holds.ticket(RequestId(request), lease, frozenset(pages))
        assert hold is not None
        if order:
            self.step()
        return self.ticket(request, hold, pages, tokens, computed=computed)

    def ticket(
        self, request: str, hold: Hold, pages: list[int], tokens: int, *, computed: bool
    ) -> Ticket:
        """Return a ticket, or a part, for these pages."""
        ticket = Ticket(
            engine=self.name,
            incarnation=self.incarnation,
            request=request,
            host=self.server.host,
            port=self.server.port,
            hold=hold,
            pages=(tuple(pages),),
            first_index=(0,),
            tokens=tokens,
            digest=digest(range(tokens)),
            computed=computed,
            tp_size=self.shape.tp,
        )
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
        """Start a load on every rank; with ``early``, one of so many tokens that has a part."""
        load = Load(
            request=RequestId(request),
            ticket=ticket,
            ranges=(None if nothing else (first, early or ticket.tokens),),
            local=(Pages(ids=np.array(pages, dtype=np.int64), first_index=first_index),),
            report=not nothing,
            shared=shared,
            is_early=bool(early),
        )
        if self.steps is not None:
            self.steps.begin(request, ticket)
        for rank in self.ranks:
            rank.endpoint.load(load, passed)

    def extend(self, request: str, part: Ticket, *, is_last: bool = False) -> None:
        """Tell every rank of a newer part of an early load."""
        for rank in self.ranks:
            rank.endpoint.extend(RequestId(request), part, is_last=is_last)

    def prepare(self, ticket: Ticket) -> None:
        """Tell every rank that a request with this ticket waits for local pages."""
        if self.steps is not None:
            self.steps.begin(ticket.request, ticket)
        for rank in self.ranks:
            rank.endpoint.prepare(ticket)

    def outcome(self, request: str) -> Results:
        """Wait until every rank has reported the request; return the failures of all ranks."""
        failed: dict[RequestId, KVFerryError] = {}
        for rank in self.ranks:
            results = until(rank.endpoint, lambda r: RequestId(request) in r.received)
            failed.update(results.failed)
        if self.steps is not None:
            self.steps.end(request, loaded=not failed)
        return Results(received=frozenset({RequestId(request)}), failed=failed)

    def released(self, request: str) -> list[EndedHold]:
        """Wait until every rank has reported the request sent; tell the scheduler's holds.

        Returns how its hold ended on each rank.
        """
        ended: list[EndedHold] = []
        for rank in self.ranks:
            results = until(rank.endpoint, lambda r: RequestId(request) in r.sent)
            ended += [each for each in results.ended if each.request == request]
        self.scheduler_holds.sent(RequestId(request))
        return ended


class Clock:
    """The real clock, which tests can move forward."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead

    def skip(self, seconds: float) -> None:
        """Move the clock forward."""
        self._ahead += seconds


def eventually(holds: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Wait until ``holds()`` is true; fail with ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.002)


class RecordingTransport(LoopbackTransport):
    """A transport that records notifications, connections and disconnections."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[Notification] = []
        self.connected: set[PeerId] = set()
        self.disconnected: set[PeerId] = set()

    def notifications(self) -> list[Notification]:
        arrived = super().notifications()
        self.received += arrived
        return arrived

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        self.connected.add(peer)
        return peer

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        self.disconnected.add(peer)

    def notes(self, kind: type[N]) -> list[N]:
        """Return all notes of a kind that have arrived, in their order."""
        arrived = (note for each in self.received for note in decode_notes(each.payload))
        return [note for note in arrived if isinstance(note, kind)]

    @property
    def open_connections(self) -> int:
        """Return how many connections are open."""
        return len(self.connected - self.disconnected)


def until(endpoint: Endpoint, holds: Callable[[Results], bool], seconds: float = 20.0) -> Results:
    """Return the first results for which ``holds`` is true; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        endpoint.wait(0.05)
        results = endpoint.results()
        if holds(results):
            return results
    raise AssertionError("the endpoint never reported what was waited for")


def expected(shape: Shape, tokens: int, layer: int, first_head: int) -> npt.NDArray[np.float32]:
    """Return (token, head, dim): each value is unique to its layer, token, head and element."""
    token = np.arange(tokens)[:, None, None]
    head = first_head + np.arange(shape.heads)[None, :, None]
    element = np.arange(DIM)[None, None, :]
    values: npt.NDArray[np.int64] = ((layer * 1000 + token) * HEADS + head) * DIM + element
    return values.astype(np.float32)


def fill(shape: Shape, rank: Rank, pages: list[int], tokens: int) -> None:
    """Write these tokens into the pages as a prefill would, with zeros after the last token."""
    for layer in range(LAYERS):
        values = np.zeros((len(pages) * shape.block, shape.heads, DIM), dtype=np.float32)
        values[:tokens] = expected(shape, tokens, layer, rank.first_head)
        blocks = values.reshape(len(pages), shape.block, shape.heads, DIM)
        rank.cache[layer, pages] = blocks.swapaxes(1, 2) if shape.heads_first else blocks


def layout_of(shape: Shape, cache: npt.NDArray[np.float32], rank: int) -> Layout:
    """Return the layout of a rank's cache: one field per layer."""
    row, page = DIM * 4, shape.heads * shape.block * DIM * 4
    token, head = (row, shape.block * row) if shape.heads_first else (shape.heads * row, row)
    fields = tuple(
        Field(
            key=f"layer{layer}",
            group=int(shape.windowed and layer == LAYERS - 1),
            region=0,
            offset=layer * shape.pages * page,
            page_stride=page,
            pages=shape.pages,
            dtype="float32",
            unit=row,
            tokens=axis((shape.block, token)),
            shard=axis((shape.heads, head)),
            shard_range=(shape.first_head(rank), shape.first_head(rank) + shape.heads),
        )
        for layer in range(LAYERS)
    )
    group = Group(kind=GroupKind.PAGED, block_tokens=shape.block)
    region = dataclasses.replace(region_of(cache), kind=shape.memory)
    groups = (group, group) if shape.windowed else (group,)
    return Layout(regions=(region,), groups=groups, fields=fields)


@contextlib.contextmanager
def engine(
    name: str,
    shape: Shape | None = None,
    *,
    options: EndpointOptions | None = None,
    transport: Callable[[], Transport] = LoopbackTransport,
    agreement: dict[str, str] | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    clock: Callable[[], float] = time.monotonic,
    ticket_key: TicketKey | None = None,
    enter: EnterThread = enter_nothing,
    zero: Callable[[Spans], None] = zero_cpu,
    relays: bool = False,
    copies: Callable[[npt.NDArray[np.float32]], PageCopies] | None = None,
) -> Iterator[Engine]:
    """Run an engine until the block ends; without a ticket key, as older builds do.

    With ``relays``, its ranks do not ask producers themselves (``HandshakeRelay``). With
    ``copies``, it is staged: its caches are host pages, for each of which that is called.
    """
    shape = shape or Shape()
    incarnation = random_incarnation()
    with contextlib.ExitStack() as stack:
        ranks = []
        for index in range(shape.tp):
            inner = (shape.heads, shape.block) if shape.heads_first else (shape.block, shape.heads)
            cache = np.full((LAYERS, shape.pages, *inner, DIM), POISON, dtype=np.float32)
            identity = Identity(
                engine=name,
                incarnation=incarnation,
                rank=index,
                coordinates=Coordinates(tp=index),
                agreement=agreement or {},
            )
            endpoint = Endpoint(
                identity=identity,
                driver="loopback",
                transport=transport(),
                layout=layout_of(shape, cache, index),
                slots=shape.pages,
                options=options or EndpointOptions(),
                clock=clock,
                enter=enter,
                zero=zero,
                copies=None if copies is None else copies(cache),
            )
            stack.enter_context(endpoint)
            ranks.append(
                Rank(
                    cache=cache,
                    endpoint=endpoint,
                    heads_first=shape.heads_first,
                    first_head=shape.first_head(index),
                )
            )
        payloads = [rank.endpoint.payload for rank in ranks]
        rooms = Rooms(clock)
        server = HandshakeServer(
            [encode(payload) for payload in payloads],
            engine=name,
            incarnation=incarnation,
            host=host,
            port=port,
            ticket_key=ticket_key.public if ticket_key is not None else b"",
            rooms=rooms,
        )
        stack.enter_context(server)
        for rank in ranks:
            rank.endpoint.join(payloads)
            if ticket_key is not None:
                rank.endpoint.prove(ticket_key.public)
        steps = Steps(ranks, options or EndpointOptions(), clock) if relays else None
        if steps is not None:
            stack.callback(steps.close)
        yield Engine(
            name=name,
            shape=shape,
            ranks=ranks,
            server=server,
            scheduler_holds=SchedulerHolds(shape.pages),
            incarnation=incarnation,
            ticket_key=ticket_key,
            rooms=rooms,
            steps=steps,
        )
