"""What the fence costs: one small read for each producer rank and request.

    python benchmarks/fence.py [--driver NAME]... [--blocks 256] [--rounds 200] [--quick]
                               [--json FILE]

Two processes of one host, each with an endpoint for each of its ranks. Decode loads a request of
256 blocks of 64 KiB, again and again, from a producer of one rank and from one of two. The share is
that of the fence in the time of its own load, as the endpoint counts it: from when the data is
final until the slot word is there, with "done" on its way. The median of all loads, and the
interval of 95 % of that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import common
import drivers
import numpy as np
import rows

from kvferry.core.endpoint import Endpoint, EndpointOptions, Identity, Load
from kvferry.core.handshake import HandshakeServer
from kvferry.core.layout import Field, Group, GroupKind, Layout, axis
from kvferry.core.lifecycle.holds import Hold, Incarnation, RequestId, random_incarnation
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import region_of
from kvferry.core.messages import Coordinates
from kvferry.core.metrics import LoadRecord
from kvferry.core.planner.build_copies import Pages
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport.registry import create

KIB = 1 << 10
BLOCK = 64 * KIB
TOKENS, HEADS = 16, 2
UNIT = BLOCK // TOKENS // HEADS
"""A token's bytes of one head; heads first, so that a rank's part of a block is in one piece."""
MOST_OF_A_LOAD = 0.1
"""The target."""
RANKS = (1, 2)
OPTIONS = EndpointOptions(lease=600.0)
PATIENCE = 60.0


def layout(blocks: int, rank: int, ranks: int) -> tuple[Layout, Any]:
    """Of one rank, and its memory: one region, one layer; block 0 is nobody's."""
    heads = HEADS // ranks
    page = heads * TOKENS * UNIT
    memory = np.ones((blocks + 1) * page, dtype=np.uint8)
    field = Field(
        key="layer0",
        group=0,
        region=0,
        offset=0,
        page_stride=page,
        pages=blocks + 1,
        dtype="uint8",
        unit=UNIT,
        tokens=axis((TOKENS, UNIT)),
        shard=axis((heads, TOKENS * UNIT)),
        shard_range=(rank * heads, (rank + 1) * heads),
    )
    group = Group(kind=GroupKind.PAGED, block_tokens=TOKENS)
    return Layout(regions=(region_of(memory),), groups=(group,), fields=(field,)), memory


@contextlib.contextmanager
def engine(
    name: str, driver: str, blocks: int, ranks: int, incarnation: Incarnation
) -> Iterator[list[Endpoint]]:
    """The endpoints of all ranks, in this process."""
    memories, endpoints = [], []
    with contextlib.ExitStack() as stack:
        for rank in range(ranks):
            described, memory = layout(blocks, rank, ranks)
            memories.append(memory)
            identity = Identity(
                engine=name, incarnation=incarnation, rank=rank, coordinates=Coordinates(tp=rank)
            )
            made = Endpoint(
                identity=identity,
                driver=driver,
                transport=create(driver),
                layout=described,
                slots=blocks,
                options=OPTIONS,
            )
            endpoints.append(stack.enter_context(made))
        payloads = [endpoint.payload for endpoint in endpoints]
        for endpoint in endpoints:
            endpoint.join(payloads)
        yield endpoints


# The producer.


def serve(driver: str, blocks: int, ranks: int) -> None:
    """In the other process: a ticket for each line."""
    incarnation = random_incarnation()
    ledger = SchedulerHolds(blocks)
    with engine("prefill", driver, blocks, ranks, incarnation) as endpoints:
        payloads = [encode(endpoint.payload) for endpoint in endpoints]
        with HandshakeServer(payloads, engine="prefill", incarnation=incarnation) as server:
            print(json.dumps([incarnation, server.port]), flush=True)
            for line in sys.stdin:
                print(json.dumps(_hold(ledger, endpoints, line.strip())), flush=True)


def _hold(ledger: SchedulerHolds, endpoints: list[Endpoint], request: str) -> list[int]:
    for endpoint in endpoints:
        for sent in endpoint.results().sent:
            ledger.sent(sent)
    name = RequestId(request)
    ledger.take_on(name)
    _apply(ledger, endpoints)
    hold = ledger.ticket(name, OPTIONS.lease)
    if hold is None:
        raise SystemExit("no slot is free: requests are not given back")
    _apply(ledger, endpoints)
    return [hold.slot, hold.generation]


def _apply(ledger: SchedulerHolds, endpoints: list[Endpoint]) -> None:
    orders = ledger.drain()
    for endpoint in endpoints:
        endpoint.apply(orders)


class Producer:
    """The other process."""

    def __init__(self, driver: str, blocks: int, ranks: int) -> None:
        arguments = [f"--driver={driver}", f"--blocks={blocks}", f"--ranks={ranks}"]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._blocks, self._ranks = blocks, ranks
        self._incarnation, self._port = self._answer()

    def ticket(self, request: str) -> Ticket:
        """For a request that has all blocks."""
        slot, generation = self._ask(request)
        return Ticket(
            engine="prefill",
            incarnation=self._incarnation,
            request=request,
            host="127.0.0.1",
            port=self._port,
            hold=Hold(slot=slot, generation=generation),
            pages=(tuple(range(1, self._blocks + 1)),),
            first_index=(0,),
            tokens=self._blocks * TOKENS,
            digest=bytes(16),
            computed=True,
            tp_size=self._ranks,
        )

    def close(self) -> None:
        """End it."""
        self._process.communicate("")

    def _ask(self, line: str) -> Any:
        if self._process.stdin is not None:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise SystemExit("the second process has ended; what it says is above")
        return json.loads(line)


# The consumer.


def measured(driver: str, blocks: int, ranks: int, rounds: int) -> rows.Row:
    """What the fence of a driver costs a load."""
    with (
        contextlib.closing(Producer(driver, blocks, ranks)) as producer,
        engine("decode", driver, blocks, 1, random_incarnation()) as [decode],
    ):
        records = [_load(decode, producer, blocks, number) for number in range(rounds + 1)]
    return _row(driver, ranks, records[1:])  # the first one shakes hands


def _load(decode: Endpoint, producer: Producer, blocks: int, number: int) -> LoadRecord:
    ticket = producer.ticket(f"p-{number}")
    pages = Pages(ids=np.arange(1, blocks + 1, dtype=np.int64))
    request = RequestId(f"d-{number}")
    decode.load(Load(request=request, ticket=ticket, ranges=((0, ticket.tokens),), local=(pages,)))
    if not decode.wait(PATIENCE):
        raise SystemExit(f"a load is not over after {PATIENCE:.0f} s")
    results = decode.results()
    if results.failed:
        raise SystemExit(f"a load failed: {results.failed[request]}")
    return results.loads[0]


def _row(driver: str, ranks: int, records: list[LoadRecord]) -> rows.Row:
    fences = np.array([record.fence_seconds for record in records])
    loads = np.array([record.seconds for record in records])
    share = common.ratio(fences, loads)
    return rows.compared(
        share,
        section="the fence",
        case=f"{driver}, {ranks} producer rank{'s' * (ranks > 1)}",
        measured=float(f"{np.median(fences) * 1e6:.3g}"),
        unit=f"µs of {np.median(loads) * 1e3:.3g} ms",
        of="time of its load",
        target=rows.goal(MOST_OF_A_LOAD, at_least=False),
    )


def main() -> None:
    options = _options()
    if options.serve:
        serve(options.driver[0], options.blocks, options.ranks[0])
        common.leave()
    names = options.driver or drivers.working()
    with rows.progress(len(names) * len(options.ranks)) as show:
        found = []
        for name in names:
            for ranks in options.ranks:
                show(f"{name}, {ranks} ranks")
                found.append(measured(name, options.blocks, ranks, options.rounds))
    rows.show(found)
    rows.write(options.json, found)
    common.leave()


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--driver", action="append", help="default: each that works here")
    parser.add_argument("--blocks", type=int, default=256, help="of 64 KiB, in a request")
    parser.add_argument("--ranks", type=int, action="append", help="of the producer; default 1, 2")
    parser.add_argument("--rounds", type=int, help="default 200")
    parser.add_argument("--quick", action="store_true", help="to see that it runs: a few seconds")
    found = parser.parse_args()
    found.rounds = found.rounds or (4 if found.quick else 200)
    found.ranks = found.ranks or RANKS
    return found


if __name__ == "__main__":
    main()
