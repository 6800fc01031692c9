"""What replies of hostile engines do to a decode engine: its memory, and its other threads.

    python benchmarks/replies.py [--engines 64] [--rounds 3] [--quick] [--json FILE]

As many handshakes at once as an endpoint may have under way, each with another engine, and every
engine answers with the worst of its kind that a peer may say. Decode is a real endpoint in a
process of its own, with a thread beside it that wants to do something every millisecond: how late
it does is how long it was stopped, by the interpreter's lock, the garbage collector or the machine;
the worst round counts. The engines are in another process. Memory is the most that the decode
process had since before the first handshake, so it also has what is left of the kinds before.
"nobody answers" is the same requests for engines that take the
connection and say nothing.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import common
import msgspec
import numpy as np
import rows
import worker_process
import zmq

from kvferry.core.directory import LocalDirectory
from kvferry.core.directory.handshake_queue import MAX_HANDSHAKES
from kvferry.core.endpoint import Endpoint, EndpointOptions, Identity, Load
from kvferry.core.layout import Field, Group, GroupKind, Layout, axis
from kvferry.core.lifecycle.digest import DIGEST_BYTES
from kvferry.core.lifecycle.holds import Hold, Incarnation, RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import Region, region_of
from kvferry.core.messages import Coordinates, RankPayload
from kvferry.core.planner.build_copies import Pages
from kvferry.core.side_channel_messages import (
    NEWEST_PROTOCOL,
    OLDEST_PROTOCOL,
    Payloads,
    decode_request,
    encode,
)
from kvferry.core.transport import PeerId
from kvferry.drivers.loopback import LoopbackTransport

STATE = Group(kind=GroupKind.STATE, block_tokens=0)
NAME = "engine-{:08}"
CHANNELS, KEYS, INNER = 100, 2, 8192
"""What the decode engine holds: a plan for it can be made long."""
STRIDE = 1 << 20
FIELDS_PER_RANK, RANKS = 5_000, 3
"""Some 370 kB, as much as a short reply may have, and all ranks as many as an engine may have."""
RUNS = 700
"""Two fields of so many runs, squared, take most of the work that is allowed."""
JUNK_BYTES = (8 << 20) - (1 << 12)
TICK_SECONDS = 0.001
PATIENCE_SECONDS = 100.0
MUTE_SECONDS = 3.0
MIB = float(1 << 20)
MOST_BYTES, MOST_SECONDS = 256 * MIB, 0.05


def one(key: str, **changes: Any) -> Field:
    """A field of one byte, but for the changes."""
    plain: dict[str, Any] = {"group": 0, "region": 0, "offset": 0, "page_stride": 1}
    plain |= {"pages": 1, "dtype": "int8", "unit": 1}
    return Field(key=key, **(plain | changes))


def state(*fields: Field, region: Region | None = None) -> Layout:
    """A layout of states."""
    region = region or Region(address=1 << 40, nbytes=1 << 41)
    return Layout(regions=(region,), groups=(STATE,), fields=fields)


def held(
    start: int, stop: int, digits: list[tuple[int, int]], region: Region | None = None
) -> Layout:
    """Some channels of what decode holds."""
    return state(
        *(
            one(
                f"m{key}",
                offset=2 * key * STRIDE,
                pages=2,
                page_stride=STRIDE,
                shard=axis((stop - start, INNER)),
                shard_range=(start, stop),
                inner=(axis(*digits),),
            )
            for key in range(KEYS)
        ),
        region=region,
    )


def many_fields(ranks: int) -> list[Layout]:
    """As many fields as there may be, which take most memory and time to decode."""
    return [
        state(
            one(NAME.format(0)),
            *(one(f"{rank:x}.{i:x}", offset=i) for i in range(1, FIELDS_PER_RANK)),
        )
        for rank in range(ranks)
    ]


def much_to_check() -> list[Layout]:
    """Two fields of which only enumerating tells that they do not meet."""
    shape: dict[str, Any] = {"shard": axis((RUNS, 2)), "shard_range": (0, RUNS)}
    shape["page_stride"] = 1 << 20
    name = NAME.format(0)
    return [state(one(name, pages=RUNS, **shape), one("b", pages=RUNS - 1, offset=1, **shape))]


def much_to_plan() -> list[Layout]:
    """A byte of everything from many ranks."""
    return [held(rank, rank + 1, [(64, 1), (128, 64)]) for rank in range(CHANNELS)]


def short(payload: RankPayload) -> bytes:
    """A payload in as few bytes as there can be: what fields have by default is left out."""
    tree = msgspec.msgpack.decode(encode(payload))
    defaults = {f.name: f.default for f in msgspec.structs.fields(Field)}
    tree["layout"]["fields"] = [
        {name: value for name, value in each.items() if _plain(value) != defaults[name]}
        for each in tree["layout"]["fields"]
    ]
    return msgspec.msgpack.encode(tree)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


KINDS: dict[str, Callable[[], list[Layout]]] = {
    "15,000 fields in 3 ranks": partial(many_fields, RANKS),
    "5,000 fields in one rank": partial(many_fields, 1),
    "a layout that is long to check": much_to_check,
    "layouts that are long to plan": much_to_plan,
}
JUNK = "8 MB that say nothing"
MUTE = "nobody answers"


class Hostile:
    """All hostile engines: one socket, which answers for whatever name it is asked."""

    def __init__(self) -> None:
        self._transport = LoopbackTransport()
        self._words = np.zeros(64, np.uint64)
        self._transport.register(region_of(self._words))
        self._socket = zmq.Context().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 1)
        self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._reply = b""
        threading.Thread(target=self._answer, daemon=True).start()

    def port(self) -> int:
        """Where it listens."""
        return int(self._port)

    def answer(self, kind: str) -> int:
        """Answer like this from now on; bytes of an answer."""
        self._reply = b"" if kind == MUTE else self._made(kind)
        return len(self._reply)

    def _made(self, kind: str) -> bytes:
        if kind == JUNK:
            ranks = [encode(self._published(0, much_to_check()[0]))]
            junk = [None] * (JUNK_BYTES - len(ranks[0]))
            return msgspec.msgpack.encode({"type": "payloads", "ranks": ranks, "more": junk})
        layouts = KINDS[kind]()
        ranks = [short(self._published(rank, layout)) for rank, layout in enumerate(layouts)]
        return encode(Payloads(ranks=ranks))

    def _published(self, rank: int, layout: Layout) -> RankPayload:
        return RankPayload(
            oldest=OLDEST_PROTOCOL,
            newest=NEWEST_PROTOCOL,
            engine=NAME.format(0),
            incarnation=5,
            rank=rank,
            coordinates=Coordinates(tp=rank),
            agreement={},
            layout=layout,
            driver="loopback",
            address=self._transport.address() + bytes([rank]),
            slots=region_of(self._words),
        )

    def _answer(self) -> None:
        mine = NAME.format(0).encode()
        while True:
            routing_id, *_, message = self._socket.recv_multipart()
            reply, name = self._reply, decode_request(message).engine.encode()
            if reply and len(name) == len(mine):
                self._socket.send_multipart([routing_id, reply.replace(mine, name)])


class Anywhere(LoopbackTransport):
    """A driver for which every address is another peer, as engines of many hosts would be."""

    def __init__(self) -> None:
        super().__init__()
        self._ids = itertools.count(1)

    def connect(self, address: bytes) -> PeerId:
        del address
        return PeerId(next(self._ids))

    def disconnect(self, peer: PeerId) -> None:
        del peer


class Decode:
    """A decode engine, and a thread beside it."""

    def __init__(self) -> None:
        logging.disable()
        self._memory = np.zeros(2 * KEYS * STRIDE, np.uint8)
        region = region_of(self._memory)
        self._numbers = iter(range(1, 1 << 30))
        self._endpoint = Endpoint(
            identity=Identity(engine="decode", incarnation=Incarnation(9)),
            driver="loopback",
            transport=Anywhere(),
            layout=held(0, CHANNELS, [(INNER, 1)], region),
            slots=64,
            options=EndpointOptions(load_timeout=PATIENCE_SECONDS),
            zero=lambda spans: None,
        )
        self._endpoint.join([self._endpoint.payload])
        self._directory = LocalDirectory(EndpointOptions(), [self._endpoint])
        self._stop = threading.Event()
        self._late = 0.0
        self._base = worker_process.peak(reset=True)

    def ready(self) -> bool:
        """It is made."""
        return True

    def ask(self, port: int, engines: int, seconds: float) -> tuple[float, float, float]:
        """Load from so many engines at once: by how many seconds the thread was late at most, bytes
        of memory, and seconds in all. It waits no longer than ``seconds``."""
        loads = [self._load(port) for _ in range(engines)]
        waiting = {load.request for load in loads}
        ticking = threading.Thread(target=self._tick)
        self._stop.clear()
        self._late = 0.0
        ticking.start()
        begun = time.monotonic()
        for load in loads:
            self._endpoint.load(load)
            self._directory.begin(load.request, load.ticket)
        while waiting and time.monotonic() < begun + seconds:
            self._endpoint.wait(0.1)
            waiting -= self._endpoint.results().received
        took = time.monotonic() - begun
        self._stop.set()
        ticking.join()
        for request in waiting:
            self._endpoint.abort(request)
        return self._late, float(worker_process.peak() - self._base), took

    def _tick(self) -> None:
        while not self._stop.is_set():
            before = time.perf_counter()
            time.sleep(TICK_SECONDS)
            self._late = max(self._late, time.perf_counter() - before - TICK_SECONDS)

    def _load(self, port: int) -> Load:
        number = next(self._numbers)
        ticket = Ticket(
            engine=NAME.format(number),
            incarnation=5,
            request=f"request-{number}",
            host="127.0.0.1",
            port=port,
            hold=Hold(slot=3, generation=7),
            pages=((1,),),
            first_index=(0,),
            tokens=1,
            digest=bytes(DIGEST_BYTES),
            computed=True,
        )
        return Load(
            request=RequestId(ticket.request),
            ticket=ticket,
            ranges=((0, 1),),
            local=(Pages(ids=np.array([1], dtype=np.int64)),),
        )


def main() -> None:
    options = _options()
    found = list(_measured(options))
    rows.show(found)
    rows.write(options.json, found)


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--engines", type=int, default=MAX_HANDSHAKES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    return options


def _measured(options: argparse.Namespace) -> Iterator[rows.Row]:
    with ExitStack() as stack:
        kinds = [MUTE, *KINDS, JUNK]
        say = stack.enter_context(rows.progress(options.rounds * len(kinds)))
        hostile = stack.enter_context(worker_process.WorkerProcess(Hostile))
        port = hostile.ask("port")
        found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds):
            with worker_process.WorkerProcess(Decode) as decode:
                decode.ask("ready")
                for kind in kinds:
                    nbytes = hostile.ask("answer", kind)
                    say(f"{options.engines} engines, {kind} ({nbytes:,} bytes)")
                    limit = MUTE_SECONDS if kind == MUTE else PATIENCE_SECONDS
                    found[kind].append(decode.ask("ask", port, options.engines, limit))
        for kind in kinds:
            yield from _rows(kind, np.array(found[kind]).T)


def _rows(kind: str, found: common.Times) -> Iterator[rows.Row]:
    late, nbytes, took = found
    for what, figures, unit, ratios, of, target in (
        (
            "another thread stopped, at most",
            late * 1e3,
            "ms",
            late / MOST_SECONDS,
            "50 ms",
            "≤ 1",
        ),
        ("memory, at most", nbytes / MIB, "MiB", nbytes / MOST_BYTES, "256 MiB", "≤ 1"),
        ("all of it", took, "s", np.ones(len(took)), "itself", None),
    ):
        yield rows.compared(
            common.ratio(ratios, np.ones(len(ratios))),
            section="hostile replies, as many at once as may be",
            case=f"{what}, {kind}",
            measured=f"{np.max(figures):,.3g}",
            unit=unit,
            of=of,
            target=target,
        )


if __name__ == "__main__":
    main()
