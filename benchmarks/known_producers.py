"""What producers that a rank knows and does not use take of its endpoint's thread.

    python benchmarks/known_producers.py [--producers 1000] [--rounds 30] [--quick] [--json FILE]

A rank knows 1 or 1,000 producers of 8 ranks, with a connection to each rank, and all are idle.
While anything is under way, the endpoint's thread looks after them in every tick of 2 ms, and asks
in every pause whether a connection is being closed. Measured is the CPU time of that, with a
transport that does nothing. Somebody else asks and pings the producers, as a scheduler half does.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator

import channel
import common
import engines
import numpy as np
import posted
import rows
from engines import Shape

from kvferry.core.directory import EncodedReply, ProducerNews
from kvferry.core.endpoint import Load
from kvferry.core.endpoint.connections import BlockingCalls, Connections
from kvferry.core.endpoint.error_containment import ErrorContainment
from kvferry.core.endpoint.load_manager import TICK_SECONDS, LoadManager
from kvferry.core.endpoint.slot_reads import ScratchWords
from kvferry.core.endpoint.transfers import Transfers
from kvferry.core.lifecycle.holds import Hold, Incarnation, RequestId
from kvferry.core.lifecycle.ticket import PeerKey, Ticket
from kvferry.core.messages import decode_payload
from kvferry.core.metrics import Metrics
from kvferry.core.options import DEFAULTS
from kvferry.core.planner.build_copies import Pages
from kvferry.core.transport import PeerId

RANKS, BLOCKS = 8, 20_000
TICKS = 1_000
"""In a row; their mean is one measurement."""
AT_ONCE = 50
PATIENCE_SECONDS = 60.0
CPU_SHARE = 0.02
"""Of a core, that producers may take that nobody uses."""


class Transport(posted.NoTransport):  # type: ignore[misc]
    """A transport without cost, for which every address is another peer."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self._peers = itertools.count(1)

    def connect(self, address: bytes) -> PeerId:
        return PeerId(next(self._peers))


class Rank:
    """What a rank's endpoint does about producers, without its thread.

    Args:
        count: how many producers it knows.
    """

    def __init__(self, count: int) -> None:
        self._now = 0.0
        self._commands: deque[Callable[[], None]] = deque()
        transport, containment = Transport(), ErrorContainment()
        transfers = Transfers(transport, containment, self._clock)
        calls = BlockingCalls(threads=False, post=self._commands.append, clock=self._clock)
        self._connections = Connections(transport, transfers, calls, self._clock)
        [raw] = engines.payloads(engines.engine(Shape(), 1, BLOCKS), "decode")
        own = decode_payload(raw)
        self._loads = LoadManager(
            own=own,
            transport=transport,
            transfers=transfers,
            connections=self._connections,
            containment=containment,
            scratch=ScratchWords(),
            zero=lambda spans: None,
            options=DEFAULTS,
            post=self._commands.append,
            clock=self._clock,
            metrics=Metrics(driver=own.driver, rank="0"),
            reported=lambda *_: None,
        )
        self._loads.join([own])
        layouts = engines.engine(Shape(tp=RANKS), 1, BLOCKS)
        for number in range(count):
            name = f"prefill-{number}"
            self._meet(number, name, tuple(engines.payloads(layouts, name)))
            if number % AT_ONCE == AT_ONCE - 1:
                self._settle()
        self._settle()

    def ticks(self) -> list[float]:
        """CPU seconds of a tick."""
        began = time.thread_time()
        for _ in range(TICKS):
            self._tick()
        return [(time.thread_time() - began) / TICKS]

    def _clock(self) -> float:
        return self._now

    def _meet(self, number: int, name: str, ranks: tuple[bytes, ...]) -> None:
        """Hear what a producer has answered, and that nothing is to be loaded from it."""
        ticket = Ticket(
            engine=name,
            incarnation=Incarnation(5),
            request="request",
            host="127.0.0.1",
            port=1,
            hold=Hold(slot=0, generation=1),
            pages=((1,),),
            first_index=(0,),
            tokens=engines.BLOCK,
            digest=bytes(16),
            computed=True,
            tp_size=RANKS,
        )
        key = PeerKey.of(ticket)
        reply = EncodedReply(address=key, incarnation=Incarnation(5), ranks=ranks)
        self._loads.relay(ProducerNews(outcomes=((key, reply),)))
        self._loads.begin(
            Load(
                request=RequestId(name),
                ticket=ticket,
                ranges=(None,),
                local=(Pages(ids=np.empty(0, dtype=np.int64)),),
                report=False,
            )
        )

    def _settle(self) -> None:
        """Wait until all are connected."""
        end = time.monotonic() + PATIENCE_SECONDS
        while len(self._loads):
            if time.monotonic() > end:
                raise SystemExit("the producers were not all connected")
            while self._commands:
                self._commands.popleft()()
            self._loads.progress()
            time.sleep(0.001)

    def _tick(self) -> None:
        self._now += TICK_SECONDS
        self._loads.progress()
        if self._connections.closing:
            raise SystemExit("a producer was released")


def main() -> None:
    options = _options()
    channel.many_files()
    found = list(_measured(options.producers, options.rounds))
    rows.show(found)
    rows.write(options.json, found)


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--producers", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="50 producers, 4 rounds")
    options = parser.parse_args()
    if options.quick:
        options.producers, options.rounds = 50, 4
    return options


def _measured(producers: int, rounds: int) -> Iterator[rows.Row]:
    with rows.progress(2) as say:
        say(f"{producers:,} producers are connected")
        many, one = Rank(producers), Rank(1)
        say("ticks")
        ours, alone = common.by_turns(rounds, [many.ticks, one.ticks])[:, :, 0]
    section = f"a tick with {producers:,} idle producers of {RANKS} ranks"
    yield channel.row(
        section, "CPU of a tick", ours * 1e6, "µs", ours / alone, "the same with 1 producer"
    )
    share = ours / TICK_SECONDS
    of = f"{CPU_SHARE:.0%} of a core"
    yield channel.row(section, "a core's share", share * 1e2, "%", share / CPU_SHARE, of, "≤ 1")


if __name__ == "__main__":
    main()
