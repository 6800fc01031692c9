"""What replies of hostile engines do to a decode engine: its memory, and its other threads."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import zmq

from benchmarks import engines, harness
from benchmarks.harness import Row, WorkerProcess, row
from kvferry.core.directory import LocalDirectory
from kvferry.core.directory.directory import MAX_HANDSHAKES
from kvferry.core.endpoint import Endpoint, EndpointOptions, Identity, Load
from kvferry.core.layout import Field, Group, GroupKind, Layout, axis
from kvferry.core.lifecycle.holds import Hold, Incarnation, RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import Region, region_of
from kvferry.core.messages import RankPayload
from kvferry.core.planner.build_copies import Pages
from kvferry.core.side_channel_messages import Payloads, decode_request, encode
from kvferry.core.transport import PeerId
from kvferry.drivers.loopback import LoopbackTransport

NAME = "engine-{:08}"
FIRST = NAME.format(0)
CHANNELS, KEYS, INNER = 100, 2, 8192  # what the decode engine holds: a plan for it can be made long
STRIDE = 1 << 20
FIELDS_PER_RANK = 5_000
"""Some 370 kB, as much as a short reply may have; in 3 ranks as many as an engine may have."""
RUNS = 700  # two fields of so many runs, squared, take most of the work that is allowed
JUNK_BYTES = (8 << 20) - (1 << 12)
TICK_SECONDS, PATIENCE_SECONDS, MUTE_SECONDS = 0.001, 100.0, 3.0
MOST_BYTES, MOST_SECONDS = 256 << 20, 0.05


def one(key: str, **changes: Any) -> Field:
    """A field of one byte, but for the changes."""
    plain = {"group": 0, "region": 0, "offset": 0, "page_stride": 1, "pages": 1, "unit": 1}
    return Field(key=key, **({"dtype": "int8"} | plain | changes))


def state(*fields: Field, region: Region | None = None) -> Layout:
    """A layout of states."""
    region = region or Region(address=1 << 40, nbytes=1 << 41)
    group = Group(kind=GroupKind.STATE, block_tokens=0)
    return Layout(regions=(region,), groups=(group,), fields=fields)


def held(
    start: int, stop: int, digits: list[tuple[int, int]], region: Region | None = None
) -> Layout:
    """Some channels of what decode holds."""
    shape: dict[str, Any] = {"shard": axis((stop - start, INNER)), "shard_range": (start, stop)}
    shape |= {"pages": 2, "page_stride": STRIDE, "inner": (axis(*digits),)}
    fields = [one(f"m{key}", offset=2 * key * STRIDE, **shape) for key in range(KEYS)]
    return state(*fields, region=region)


def many_fields(ranks: int) -> list[Layout]:
    """As many fields as there may be, which take most memory and time to decode."""
    return [
        state(one(FIRST), *(one(f"{rank:x}.{i:x}", offset=i) for i in range(1, FIELDS_PER_RANK)))
        for rank in range(ranks)
    ]


def much_to_check() -> list[Layout]:
    """Two fields of which only enumerating tells that they do not meet."""
    shape: dict[str, Any] = {"shard": axis((RUNS, 2)), "shard_range": (0, RUNS)}
    shape["page_stride"] = STRIDE
    return [state(one(FIRST, pages=RUNS, **shape), one("b", pages=RUNS - 1, offset=1, **shape))]


def much_to_plan() -> list[Layout]:
    """A byte of everything from many ranks."""
    return [held(rank, rank + 1, [(64, 1), (128, 64)]) for rank in range(CHANNELS)]


KINDS: dict[str, Callable[[], list[Layout]]] = {
    "15,000 fields in 3 ranks": partial(many_fields, 3),
    "5,000 fields in one rank": partial(many_fields, 1),
    "a layout that is long to check": much_to_check,
    "layouts that are long to plan": much_to_plan,
}
JUNK, MUTE = "8 MB that say nothing", "nobody answers"


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

    def answer(self, kind: str) -> None:
        """Answer like this from now on."""
        if kind == MUTE:
            self._reply = b""
        elif kind == JUNK:
            ranks = [encode(self._published(0, much_to_check()[0]))]
            junk = [None] * (JUNK_BYTES - len(ranks[0]))
            reply = {"type": "payloads", "ranks": ranks, "more": junk}
            self._reply = msgspec.msgpack.encode(reply)
        else:
            published = itertools.starmap(self._published, enumerate(KINDS[kind]()))
            self._reply = encode(Payloads(ranks=[_short(each) for each in published]))

    def _published(self, rank: int, layout: Layout) -> RankPayload:
        return engines.published(
            layout,
            rank,
            engine=FIRST,
            agreement={},
            driver="loopback",
            address=self._transport.address() + bytes([rank]),
            slots=region_of(self._words),
            watermarks=region_of(self._words),
        )

    def _answer(self) -> None:
        mine = FIRST.encode()
        while True:
            routing_id, *_, message = self._socket.recv_multipart()
            reply, name = self._reply, decode_request(message).engine.encode()
            if reply and len(name) == len(mine):
                self._socket.send_multipart([routing_id, reply.replace(mine, name)])


def _short(payload: RankPayload) -> bytes:
    """A payload in as few bytes as there can be: what fields have by default is left out."""
    tree = msgspec.msgpack.decode(encode(payload))
    defaults = {f.name: f.default for f in msgspec.structs.fields(Field)}
    tree["layout"]["fields"] = [
        {k: v for k, v in each.items() if (tuple(v) if isinstance(v, list) else v) != defaults[k]}
        for each in tree["layout"]["fields"]
    ]
    return msgspec.msgpack.encode(tree)


class Anywhere(LoopbackTransport):
    """A driver for which every address is another peer, as engines of many hosts would be."""

    def __init__(self) -> None:
        super().__init__()
        self._peer_ids = itertools.count(1)

    def connect(self, address: bytes) -> PeerId:
        return PeerId(next(self._peer_ids))

    def disconnect(self, peer: PeerId) -> None:
        """Do nothing."""


class Decode:
    """A decode engine, and a thread beside it that wants to do something every millisecond."""

    def __init__(self) -> None:
        logging.disable()
        self._memory = np.zeros(2 * KEYS * STRIDE, np.uint8)
        self._numbers = itertools.count(1)
        options = EndpointOptions(load_timeout=PATIENCE_SECONDS)
        self._endpoint = Endpoint(
            identity=Identity(engine="decode", incarnation=Incarnation(9)),
            driver="loopback",
            transport=Anywhere(),
            layout=held(0, CHANNELS, [(INNER, 1)], region_of(self._memory)),
            slots=64,
            options=options,
            zero=lambda spans: None,
        )
        self._endpoint.join([self._endpoint.payload])
        self._directory = LocalDirectory(EndpointOptions(), [self._endpoint])
        self._stop = threading.Event()
        self._late = 0.0
        self._base = harness.peak(reset=True)

    def ask(self, port: int, count: int, seconds: float) -> tuple[float, float, float]:
        """Load from so many engines at once: by how many seconds the thread was late at most, bytes
        of memory, and seconds in all. It waits no longer than ``seconds``."""
        loads = [self._load(port) for _ in range(count)]
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
        return self._late, float(harness.peak() - self._base), took

    def _tick(self) -> None:
        while not self._stop.is_set():
            before = time.perf_counter()
            time.sleep(TICK_SECONDS)
            self._late = max(self._late, time.perf_counter() - before - TICK_SECONDS)

    def _load(self, port: int) -> Load:
        number, hold = next(self._numbers), Hold(slot=3, generation=7)
        ticket = Ticket(
            **engines.ticket_fields(NAME.format(number), f"r-{number}", port, [1], hold, tokens=1)
        )
        return Load(
            request=RequestId(ticket.request),
            ticket=ticket,
            ranges=((0, 1),),
            local=(Pages(ids=np.array([1], dtype=np.int64)),),
        )


def replies(quick: bool) -> Iterator[Row]:
    """As many handshakes at once as may be, each with an engine that answers with its worst.

    How late the thread is in the worst round is how long it was stopped. Memory is the most that
    the process had since before the first handshake.
    """
    kinds = [MUTE, *KINDS, JUNK]
    found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    with WorkerProcess(Hostile) as hostile:
        port = hostile.ask("port")
        for _ in range(1 if quick else 2):
            with WorkerProcess(Decode) as decode:
                for kind in kinds:
                    harness.say(f"{MAX_HANDSHAKES} engines, {kind}")
                    hostile.ask("answer", kind)
                    limit = MUTE_SECONDS if kind == MUTE else PATIENCE_SECONDS
                    found[kind].append(decode.ask("ask", port, MAX_HANDSHAKES, limit))
    section = "hostile replies, as many at once as may be"
    for kind, figures in found.items():
        late, nbytes, took = np.array(figures).T
        for what, own, limit, of, unit in (
            ("another thread stopped, at most", late, MOST_SECONDS, "50 ms", "ms"),
            ("memory, at most", nbytes, MOST_BYTES, "256 MiB", "MiB"),
        ):
            worst, case = float(own.max()), f"{what}, {kind}"
            yield row(section, case, of, own, limit, unit=unit, target="≤ 1", measured=worst)
        yield row(section, f"all of it, {kind}", "itself", took, took, unit="s")
