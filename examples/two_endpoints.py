"""A hand-over without any engine: two endpoints, one cache each, and everything between them.

    python examples/two_endpoints.py

What an integration does for an inference engine, in its order, on two numpy arrays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.core.endpoint import Endpoint, Identity, Load, Results
from kvferry.core.handshake import HandshakeServer
from kvferry.core.layout import Field, Group, GroupKind, Layout, axis
from kvferry.core.lifecycle.digest import digest
from kvferry.core.lifecycle.holds import RequestId, random_incarnation
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import region_of
from kvferry.core.messages import encode
from kvferry.core.planner.build_copies import Pages
from kvferry.core.transport import registry

PAGES, HEADS, DIM = 32, 4, 64
PROMPT = list(range(100))

Cache = npt.NDArray[np.float32]


def describe(cache: Cache, tokens_first: bool) -> Layout:
    """One field: pages of (tokens, heads, DIM) or of (heads, tokens, DIM)."""
    page, outer, inner, row = cache.strides
    block, heads = (cache.shape[1], cache.shape[2]) if tokens_first else cache.shape[2:0:-1]
    tokens, shard = (outer, inner) if tokens_first else (inner, outer)
    field = Field(
        key="the only layer",
        group=0,
        region=0,
        offset=0,
        page_stride=page,
        pages=len(cache),
        dtype="float32",
        unit=row * DIM,
        tokens=axis((block, tokens)),
        shard=axis((heads, shard)),
        shard_range=(0, heads),
    )
    group = Group(kind=GroupKind.PAGED, block_tokens=block)
    return Layout(regions=(region_of(cache),), groups=(group,), fields=(field,))


def start(engine: str, cache: Cache, *, tokens_first: bool) -> Endpoint:
    """An engine of one rank."""
    endpoint = Endpoint(
        identity=Identity(engine=engine, incarnation=random_incarnation()),
        driver="loopback",
        transport=registry.create("loopback"),
        layout=describe(cache, tokens_first),
        slots=PAGES,
    )
    endpoint.join([endpoint.payload])
    return endpoint


def prefill(
    endpoint: Endpoint, cache: Cache, ledger: SchedulerHolds, server: HandshakeServer
) -> Ticket:
    """Take a request on, compute it, and say where its pages are."""
    request = RequestId("prefill-1")
    ledger.take_on(request)
    endpoint.apply(ledger.drain())  # the slot word says "computing" from here on
    pages = list(range(1, 8))
    cache[pages] = np.random.default_rng(0).random(cache[pages].shape)  # what an engine computes
    hold = ledger.ticket(request, lease=30.0)
    endpoint.apply(ledger.drain())  # and now "ready"
    if hold is None:
        raise SystemExit("the request was not taken on")
    return Ticket(
        engine=endpoint.payload.engine,
        incarnation=endpoint.payload.incarnation,
        request=request,
        host=server.host,
        port=server.port,
        hold=hold,
        pages=(tuple(pages),),
        first_index=(0,),
        tokens=len(PROMPT),
        digest=digest(PROMPT),
        computed=True,
    )


def pull(endpoint: Endpoint, ticket: Ticket, pages: list[int]) -> Results:
    """Load all tokens of the ticket into these pages; returns when they are there, or not."""
    endpoint.load(
        Load(
            request=RequestId("decode-1"),
            ticket=ticket,
            ranges=((0, ticket.tokens),),
            local=(Pages(ids=np.array(pages, dtype=np.int64)),),
        )
    )
    while not (results := endpoint.results()).received:
        endpoint.wait(1.0)
    return results


def main() -> None:
    """Sixteen tokens a page and heads first on one side, 32 and tokens first on the other."""
    there: Cache = np.zeros((PAGES, HEADS, 16, DIM), dtype=np.float32)
    here: Cache = np.full((PAGES, 32, HEADS, DIM), np.nan, dtype=np.float32)
    with (
        start("prefill", there, tokens_first=False) as producer,
        start("decode", here, tokens_first=True) as consumer,
        HandshakeServer(
            [encode(producer.payload)],
            engine=producer.payload.engine,
            incarnation=producer.payload.incarnation,
        ) as server,
    ):
        ledger = SchedulerHolds(PAGES)
        ticket = prefill(producer, there, ledger, server)
        [record] = pull(consumer, ticket, pages=[5, 3, 8, 1]).loads
        wanted = there[1:8].swapaxes(1, 2).reshape(-1, HEADS, DIM)[: len(PROMPT)]
        found = here[[5, 3, 8, 1]].reshape(-1, HEADS, DIM)[: len(PROMPT)]
        print(f"{record.nbytes} bytes in {record.copies} copies, {record.seconds * 1e3:.1f} ms")
        print("equal" if np.array_equal(wanted, found) else "NOT EQUAL")
        while not (sent := producer.results().sent):
            producer.wait(1.0)
        print(f"pages that may be given back now: those of {', '.join(sent)}")
        [why] = pull(consumer, ticket, pages=[5, 3, 8, 1]).failed.values()
        print(f"the ticket once more: {why}")


if __name__ == "__main__":
    main()
