"""One request, from the worker's hearing of it until its copies are posted, in CPU time.

    python -m benchmarks.request [--layers 80] [--seconds 4] [--newer FOLDER] [--quick]
                                 [--json FILE]

Next to vLLM's own NIXL worker doing the same in a process of its own, the two taking turns; that of
the installed vLLM, and that of another one whose source ``--newer`` names. Both use NIXL, whose
idle threads sleep on both sides, though vLLM leaves them spinning. Ours is all that a load takes
until the driver has it: the endpoint's thread, its state machine, the check against the peer, the
copies. All threads are counted, and NIXL's ``transfer``, which over UCX on one host moves the
bytes.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import engines, harness, nixl_api, vllm_worker
from benchmarks.engines import Shape
from benchmarks.harness import Row, WorkerProcess, row
from benchmarks.no_transport import WORD
from kvferry.core.directory import LocalDirectory
from kvferry.core.endpoint import Endpoint, EndpointOptions, Identity, Load
from kvferry.core.lifecycle.holds import Hold, Incarnation, RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import Region
from kvferry.core.messages import WORD_BYTES
from kvferry.core.planner.build_copies import Pages
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.transport import PeerId, Transport

BLOCKS, COUNT = 2_049, 256  # of each engine, and of a request
SHAPE = Shape(dim=32)
"""Few elements of a head: the bytes are moved, and what is measured goes by copies."""
TARGETS = {True: "≥ 1", False: "≥ 5"}  # of scattered blocks, and of those in a row
OPTIONS = EndpointOptions(liveness_interval=0.0)


class Clocks:
    """Counts the CPU seconds of the threads that work for a request, until it was posted.

    The ``transfer`` of NIXL's module of agents is counted also afterwards: a driver may post late.
    """

    def __init__(self) -> None:
        from kvferry.drivers.nixl import library

        self.seconds = 0.0
        self.api: Any = library.load().api
        self.api.nixl_agent.transfer = self._counted(self.api.nixl_agent.transfer)
        self._threads: list[int] = []
        self._is_posted = self._is_over = False

    def start(self) -> None:
        """Start counting, until ``posted``."""
        idents = [thread.ident for thread in threading.enumerate()]
        self._threads = [time.pthread_getcpuclockid(ident) for ident in idents if ident]
        self._is_posted = self._is_over = False
        self.seconds = -self._now()

    def posted(self) -> None:
        """Stop counting: the call that posts has returned."""
        if not self._is_posted:
            self.seconds += self._now()
            self._is_posted = True

    def noted(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """A driver's read: the first one is the pages, and the next, of the slot word, is not."""

        def noted(of: Transport, peer: PeerId, copies: Any, notify: bytes | None = None) -> Any:
            self._is_over |= copies.total == WORD_BYTES
            found = read(of, peer, copies, notify)
            self.posted()
            return found

        return noted

    def _counted(self, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object) -> object:
            before = time.thread_time()
            found = call(*arguments)
            if self._is_posted and not self._is_over:
                self.seconds += time.thread_time() - before
            return found

        return counted

    def _now(self) -> float:
        return sum(map(time.clock_gettime, self._threads))


class Ferry:
    """kvferry's half: an endpoint, and a producer of which only the side channel is there."""

    def __init__(self, layers: int) -> None:
        from kvferry.drivers.nixl import NixlTransport

        self._clocks = Clocks()
        for method in ("read", "read_pages"):
            setattr(NixlTransport, method, self._clocks.noted(getattr(NixlTransport, method)))
        self._numbers = itertools.count()
        size = engines.engine(SHAPE, layers, BLOCKS)[0].regions[0].nbytes
        self._rooms = [vllm_worker.room(size) for _ in range(2)]
        mine, theirs = (
            engines.engine(SHAPE, layers, BLOCKS, base=np.frombuffer(room, np.uint8).ctypes.data)[0]
            for room in self._rooms
        )
        self._words = np.full(64, WORD, np.uint64)
        slots = Region(address=self._words.ctypes.data, nbytes=self._words.nbytes)
        self._producer = NixlTransport()
        self._producer.register(theirs.regions[0])
        self._producer.register(slots)
        self._endpoint = Endpoint(
            identity=Identity(engine="decode", incarnation=Incarnation(9)),
            driver="nixl",
            transport=NixlTransport(),
            layout=mine,
            slots=64,
            options=OPTIONS,
            zero=lambda spans: None,
        )
        published = engines.payload(theirs, address=self._producer.address(), slots=slots)
        self._server = HandshakeServer([published], engine="prefill", incarnation=5)
        self._endpoint.join([self._endpoint.payload])
        self._directory = LocalDirectory(OPTIONS, [self._endpoint])

    def post(self, scattered: bool) -> list[float]:
        """A load; CPU seconds until it was posted."""
        request, hold = f"request-{next(self._numbers)}", Hold(slot=3, generation=WORD >> 1)
        here, there = _lists(scattered)
        ticket = Ticket(**engines.ticket_fields("prefill", request, self._server.port, there, hold))
        load = Load(
            request=RequestId(request),
            ticket=ticket,
            ranges=((0, ticket.tokens),),
            local=(Pages(ids=np.array(here, dtype=np.int64)),),
        )
        self._clocks.start()
        self._endpoint.load(load)
        self._directory.begin(load.request, load.ticket)
        while load.request not in (done := self._endpoint.results()).received:
            self._endpoint.wait(1.0)
        if error := done.failed.get(load.request):
            raise SystemExit(f"the load failed: {error}")
        return [self._clocks.seconds]


class Vllm:
    """vLLM's half, of the installed vLLM or of the one whose source is named."""

    def __init__(self, layers: int, source: Path | None) -> None:
        vllm_worker.quiet()
        if source is not None:
            vllm_worker.use_source(source)
        self._clocks, self._numbers = Clocks(), itertools.count()
        with nixl_api.patient():
            self._far, self._near = (
                vllm_worker.start(
                    tp=1, layers=layers, blocks=BLOCKS, api=self._clocks.api, dim=SHAPE.dim
                )
                for _ in range(2)
            )
        self._worker = self._near.worker
        metadata = vllm_worker.metadata(self._far.payload, "prefill")
        self._worker._remote_agents["prefill"][0, 0] = self._worker.add_remote_agent(metadata)
        self._worker._engine_by_address["127.0.0.1", 1] = "prefill"

    def name(self) -> str:
        """As rows name it."""
        return vllm_worker.name()

    def post(self, scattered: bool) -> list[float]:
        """As ``Ferry.post``."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnectorMetadata
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta, ReqMeta

        name = f"request-{next(self._numbers)}"
        here, there = _lists(scattered)
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
        self._clocks.start()
        self._worker.start_load_kv(said)
        self._clocks.posted()
        while name not in self._worker.get_finished()[1]:
            time.sleep(1e-4)
        self._worker._recving_transfers.clear()
        self._worker._recving_metadata.clear()
        return [self._clocks.seconds]


def _lists(scattered: bool) -> tuple[list[int], list[int]]:
    near, far = (
        engines.block_ids(COUNT, BLOCKS, scattered=scattered, seed=seed) for seed in (0, 1)
    )
    return near, far if scattered else near


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Beside each vLLM."""
    sources = vllm_worker.sources(options.newer)
    if not sources or "nixl" not in harness.working_drivers():
        harness.nothing("NIXL or vLLM is not here: nothing was measured")
    with ExitStack() as stack:
        makes: list[Callable[[], object]] = [partial(Ferry, options.layers)]
        makes += [partial(Vllm, options.layers, source) for source in sources]
        ours, *peers = [stack.enter_context(WorkerProcess(make)) for make in makes]
        for peer in peers:
            name = peer.ask("name")
            for scattered in (True, False):
                harness.say(f"beside {name}")
                ways = [each.way("post", scattered) for each in (ours, peer)]
                seconds = 0.3 if options.quick else options.seconds
                mine, theirs = harness.by_turns(ways, 60, seconds)[:, :, 0]
                yield row(
                    "a request until NIXL's transfer() has returned",
                    f"{COUNT:,} blocks {'scattered' if scattered else 'in a row'}",
                    f"{name}'s CPU time to ours",
                    theirs,
                    mine,
                    unit="µs CPU",
                    measured=float(np.median(mine)),
                    target=TARGETS[scattered],
                )


if __name__ == "__main__":
    harness.main(
        measure,
        __doc__,
        ("--layers", {"type": int, "default": 80}),
        ("--seconds", {"type": float, "default": 4.0, "help": "for each case and vLLM, about"}),
        vllm_worker.NEWER,
    )
