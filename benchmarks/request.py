"""One request, from the worker's hearing of it until its copies are posted, in CPU time.

    python -m benchmarks.request [--layers 80] [--seconds 4] [--newer FOLDER] [--quick]
                                 [--json FILE]

Next to vLLM's own NIXL worker doing the same in a process of its own, the two taking turns; that of
the installed vLLM, and that of another one whose source ``--newer`` names. First with transports
that cost nothing on both sides; then, where nixl is installed, with NIXL itself, whose call
``transfer`` is counted and not counted: over UCX on one host it moves the bytes. NIXL's idle
threads sleep on both sides, though vLLM leaves them spinning. Ours is all that a load takes until
the driver has it: the endpoint's thread, its state machine, the check against the peer, the copies.
All threads are counted.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import engines, harness, vllm_worker
from benchmarks.engines import Shape
from benchmarks.harness import Row, WorkerProcess, row
from benchmarks.no_transport import WORD, NoTransport
from kvferry.core.directory import LocalDirectory
from kvferry.core.endpoint import Endpoint, EndpointOptions, Identity, Load
from kvferry.core.lifecycle.holds import Hold, Incarnation, RequestId
from kvferry.core.memory import Region
from kvferry.core.messages import WORD_BYTES
from kvferry.core.planner.build_copies import Pages
from kvferry.core.side_channel import HandshakeServer
from kvferry.core.transport import PeerId, Transport

BLOCKS, NIXL_BLOCKS = 20_000, 2_049
NIXL_DIM = 32
"""Few elements of a head, where bytes are moved: what is measured goes by copies."""
COUNTS = (256, 2_048)
TARGETS = {True: "≥ 1", False: "≥ 5"}
"""Of scattered blocks, and of those in a row."""
OPTIONS = EndpointOptions(liveness_interval=0.0)


class Clocks:
    """CPU seconds of the threads that work for a request, until it was posted.

    Attributes:
        seconds: of all; and ``inside``: of these, those within ``excluded`` calls.
    """

    def __init__(self) -> None:
        self.seconds = self.inside = 0.0
        self._threads: list[int] = []
        self._is_posted = self._is_over = False

    def start(self) -> None:
        """Start counting, until ``posted``."""
        idents = [thread.ident for thread in threading.enumerate()]
        self._threads = [time.pthread_getcpuclockid(ident) for ident in idents if ident]
        self.inside, self._is_posted, self._is_over = 0.0, False, False
        self.seconds = -self._now()

    def posted(self) -> None:
        """Stop counting: the call that posts has returned. A driver may post the rest later."""
        if not self._is_posted:
            self.seconds += self._now()
            self._is_posted = True

    def over(self) -> None:
        """End the request: nothing of it is posted any more."""
        self._is_over = True

    def excluded(self, call: Callable[..., object]) -> Callable[..., object]:
        """Return the call with its CPU time counted as ``inside``, also after ``posted``."""

        def counted(*arguments: object) -> object:
            before = time.thread_time()
            found = call(*arguments)
            took = time.thread_time() - before
            if not self._is_over:
                self.inside += took
                self.seconds += took if self._is_posted else 0.0
            return found

        return counted

    def of_nixl(self) -> Any:
        """NIXL's module of agents, whose ``transfer`` is clocked."""
        from kvferry.drivers.nixl import library

        api = library.load().api
        api.nixl_agent.transfer = self.excluded(api.nixl_agent.transfer)
        return api

    def _now(self) -> float:
        return sum(map(time.clock_gettime, self._threads))


class Ferry:
    """kvferry's half: an endpoint, and a producer of which only the side channel is there."""

    def __init__(self, layers: int, *, nixl: bool = False) -> None:
        self.clocks = Clocks()
        self._numbers = itertools.count()
        self._blocks = NIXL_BLOCKS if nixl else BLOCKS
        shape = Shape(dim=NIXL_DIM) if nixl else Shape()
        near, far = self._memory(shape, layers) if nixl else (1 << 50, 1 << 55)
        [mine] = engines.engine(shape, layers, self._blocks, base=near)
        [theirs] = engines.engine(shape, layers, self._blocks, base=far)
        self._slots = engines.SLOTS
        transport: Transport = NoTransport(self.clocks.posted)
        self._producer = transport
        if nixl:
            transport = self._nixl(theirs.regions[0])
        self._endpoint = Endpoint(
            identity=Identity(engine="decode", incarnation=Incarnation(9)),
            driver="nixl",
            transport=transport,
            layout=mine,
            slots=64,
            options=OPTIONS,
            zero=lambda spans: None,
        )
        published = engines.payload(theirs, address=self._producer.address(), slots=self._slots)
        self._server = HandshakeServer([published], engine="prefill", incarnation=5)
        self._endpoint.join([self._endpoint.payload])
        self._directory = LocalDirectory(OPTIONS, [self._endpoint])
        self.post(4, True)

    def post(self, count: int, scattered: bool) -> tuple[float, float]:
        """A load; CPU seconds until it was posted, and those of them in NIXL's ``transfer``."""
        request, hold = f"request-{next(self._numbers)}", Hold(slot=3, generation=WORD >> 1)
        here, there = _lists(count, self._blocks, scattered)
        ticket = engines.ticket("prefill", request, self._server.port, there, hold)
        load = Load(
            request=RequestId(request),
            ticket=ticket,
            ranges=((0, ticket.tokens),),
            local=(Pages(ids=np.array(here, dtype=np.int64)),),
        )
        self.clocks.start()
        self._endpoint.load(load)
        self._directory.begin(load.request, load.ticket)
        while load.request not in (done := self._endpoint.results()).received:
            self._endpoint.wait(1.0)
        if error := done.failed.get(load.request):
            raise SystemExit(f"the load failed: {error}")
        return self.clocks.seconds, self.clocks.inside

    def _memory(self, shape: Shape, layers: int) -> list[int]:
        """Address space for both engines, which is touched here."""
        size = engines.engine(shape, layers, self._blocks)[0].regions[0].nbytes
        self._rooms = [vllm_worker.room(size) for _ in range(2)]
        return [np.frombuffer(room, dtype=np.uint8).ctypes.data for room in self._rooms]

    def _nixl(self, far: Region) -> Transport:
        """The endpoint's transport; and that of the producer, with its slot words."""
        from kvferry.drivers.nixl import NixlTransport

        self.clocks.of_nixl()
        for method in ("read", "read_pages"):
            setattr(NixlTransport, method, _noted(getattr(NixlTransport, method), self.clocks))
        self._words = np.full(64, WORD, np.uint64)
        self._slots = Region(address=self._words.ctypes.data, nbytes=self._words.nbytes)
        self._producer = NixlTransport()
        self._producer.register(far)
        self._producer.register(self._slots)
        return NixlTransport()


class Vllm:
    """vLLM's half, of the installed vLLM or of the one whose source is named."""

    def __init__(self, layers: int, *, source: Path | None = None, nixl: bool = False) -> None:
        vllm_worker.quiet()
        if source is not None:
            vllm_worker.use_source(source)
        self.clocks = Clocks()
        self._numbers = itertools.count()
        self._blocks, self._nixl = NIXL_BLOCKS if nixl else BLOCKS, nixl
        start = partial(vllm_worker.start, tp=1, layers=layers, blocks=self._blocks)
        if nixl:
            start = partial(start, api=self.clocks.of_nixl(), dim=NIXL_DIM)
        with vllm_worker.patient() if nixl else nullcontext():
            self._far, self._near = start(), start()
        self._worker = self._near.worker
        metadata = vllm_worker.metadata(self._far.payload, "prefill")
        self._worker._remote_agents["prefill"][0, 0] = self._worker.add_remote_agent(metadata)
        self._worker._engine_by_address["127.0.0.1", 1] = "prefill"

    def name(self) -> str:
        """As rows name it."""
        return vllm_worker.name()

    def post(self, count: int, scattered: bool) -> tuple[float, float]:
        """As ``Ferry.post``."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnectorMetadata
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta, ReqMeta

        name = f"request-{next(self._numbers)}"
        here, there = _lists(count, self._blocks, scattered)
        remote = RemoteMeta(
            block_ids=(there,), host="127.0.0.1", port=1, engine_id="prefill", request_id=name
        )
        said = NixlConnectorMetadata()
        said.reqs_to_recv[name] = ReqMeta(
            local_block_ids=(here,),
            local_physical_block_ids=(here,),
            tp_size=1,
            remote=remote,
            awaiting_kvs=True,
        )
        self.clocks.start()
        self._worker.start_load_kv(said)
        self.clocks.posted()
        while self._nixl and name not in self._worker.get_finished()[1]:
            time.sleep(1e-4)
        self._worker._recving_transfers.clear()
        self._worker._recving_metadata.clear()
        return self.clocks.seconds, self.clocks.inside


def _lists(count: int, blocks: int, scattered: bool) -> tuple[list[int], list[int]]:
    near, far = (
        engines.block_ids(count, blocks, scattered=scattered, seed=seed) for seed in (0, 1)
    )
    return near, far if scattered else near


def _noted(read: Callable[..., Any], clocks: Clocks) -> Callable[..., Any]:
    """The first read is the pages; the next one, of the slot word, is not."""

    def noted(self: Transport, peer: PeerId, copies: Any, notify: bytes | None = None) -> Any:
        if copies.total == WORD_BYTES:
            clocks.over()
        found = read(self, peer, copies, notify)
        clocks.posted()
        return found

    return noted


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Without NIXL, and with it."""
    for nixl in [False, True] if "nixl" in harness.working_drivers() else [False]:
        with ExitStack() as stack:
            ours = stack.enter_context(WorkerProcess(partial(Ferry, options.layers, nixl=nixl)))
            workers = [
                stack.enter_context(
                    WorkerProcess(partial(Vllm, options.layers, source=source, nixl=nixl))
                )
                for source in vllm_worker.sources(options.newer)
            ]
            peers = {worker.ask("name"): worker for worker in workers}
            for count in COUNTS[:1] if nixl else COUNTS:
                for scattered in (True, False):
                    seconds = 0.3 if options.quick else options.seconds
                    for name, peer in peers.items() or [("no vLLM is here: our worker", ours)]:
                        ways = [each.way("post", count, scattered) for each in (ours, peer)]
                        found = harness.by_turns(ways, 60, seconds)
                        yield from _rows(name, count, scattered, nixl, found)


def _rows(
    name: str, count: int, scattered: bool, nixl: bool, found: harness.Times
) -> Iterator[Row]:
    case = f"{count:,} blocks {'scattered' if scattered else 'in a row'}"
    harness.say(f"{case}, beside {name}")
    until, inside = found[:, :, 0], found[:, :, 1]
    sections: list[tuple[str, harness.Times, str | None]] = [
        ("a request until it is posted, by transports that cost nothing", until, None)
    ]
    if nixl:
        sections = [
            ("a request until NIXL's transfer() has returned", until, TARGETS[scattered]),
            ("the same without the time in transfer()", until - inside, None),
        ]
    for section, (ours, theirs), target in sections:
        yield row(
            section,
            case,
            f"{name}'s CPU time to ours",
            theirs,
            ours,
            unit="µs CPU",
            measured=float(np.median(ours)) * 1e6,
            target=target,
        )


if __name__ == "__main__":
    harness.main(
        measure,
        __doc__,
        ("--layers", {"type": int, "default": 80}),
        ("--seconds", {"type": float, "default": 4.0, "help": "for each case and vLLM, about"}),
        vllm_worker.NEWER,
    )
