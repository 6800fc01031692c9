"""One request, from the worker's hearing of it until its copies are posted, in CPU time.

    python benchmarks/request.py [--layers 80] [--seconds 4] [--quick] [--newer FOLDER]
                                 [--json FILE]

Next to vLLM's own NIXL worker doing the same in a process of its own, the two taking turns; next to
that of the installed vLLM, and to that of another vLLM whose source ``--newer`` names. First
with transports that cost nothing on both sides; then, where nixl is installed, with NIXL itself,
whose call ``transfer`` is counted and not counted: over UCX on one host it moves the bytes.
NIXL's idle threads sleep on both sides, though vLLM leaves them spinning.
Ours is all that a load takes until the driver has it: the endpoint's thread, its state machine,
the check against the peer, the copies. All threads are counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common
import engines
import numpy as np
import planning
import rows
import vllm_worker
import worker_process
from engines import Shape
from posted import WORD, Clocks, NoTransport

from kvferry.core.directory import LocalDirectory
from kvferry.core.endpoint import Endpoint, EndpointOptions, Identity, Load
from kvferry.core.lifecycle.digest import DIGEST_BYTES
from kvferry.core.lifecycle.holds import Hold, Incarnation, RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import Region
from kvferry.core.messages import WORD_BYTES
from kvferry.core.planner.build_copies import Pages
from kvferry.core.side_channel import HandshakeServer
from kvferry.core.transport import PeerId, Transport

BLOCKS, NIXL_BLOCKS = 20_000, 2_048
NIXL_DIM = 32
"""Few elements of a head, where bytes are moved: what is measured goes by copies."""
COUNTS = (256, 2_048)
SCATTERED, IN_A_ROW = "≥ 1", "≥ 5"
US = 1e6
HOLD = Hold(slot=3, generation=WORD >> 1)
MOST = 60
OPTIONS = EndpointOptions(liveness_interval=0.0)
"""Rounds of a case."""


class Ferry:
    """kvferry's half: an endpoint, and a producer of which only the side channel is there."""

    def __init__(self, layers: int, *, nixl: bool = False) -> None:
        self.clocks = Clocks()
        self._numbers = iter(range(1, 1 << 30))
        shape = Shape(dim=NIXL_DIM) if nixl else Shape()
        near, far = self._memory(shape, layers, nixl)
        [mine] = engines.engine(shape, layers, self._blocks, base=near)
        [theirs] = engines.engine(shape, layers, self._blocks, base=far)
        transport = self._transports(nixl, theirs.regions[0])
        self._endpoint = Endpoint(
            identity=Identity(engine="decode", incarnation=Incarnation(9)),
            driver="nixl",
            transport=transport,
            layout=mine,
            slots=64,
            options=OPTIONS,
            zero=lambda spans: None,
        )
        self._server = HandshakeServer([self._published(theirs)], engine="prefill", incarnation=5)
        self._endpoint.join([self._endpoint.payload])
        self._directory = LocalDirectory(OPTIONS, [self._endpoint])
        self.post(4, True)

    def post(self, count: int, scattered: bool) -> tuple[float, float]:
        """A load; CPU seconds until it was posted, and those of them in NIXL's ``transfer``."""
        load = self._load(count, scattered)
        self.clocks.start()
        self._endpoint.load(load)
        self._directory.begin(load.request, load.ticket)
        while load.request not in (done := self._endpoint.results()).received:
            self._endpoint.wait(1.0)
        if error := done.failed.get(load.request):
            raise SystemExit(f"the load failed: {error}")
        return self.clocks.seconds, self.clocks.inside

    def _load(self, count: int, scattered: bool) -> Load:
        request = RequestId(f"request-{next(self._numbers)}")
        here, there = _lists(count, self._blocks, scattered)
        ticket = Ticket(
            engine="prefill",
            incarnation=5,
            request=request,
            host=self._server.host,
            port=self._server.port,
            hold=HOLD,
            pages=(tuple(there),),
            first_index=(0,),
            tokens=count * engines.BLOCK,
            digest=bytes(DIGEST_BYTES),
            computed=True,
        )
        pages = Pages(ids=np.array(here, dtype=np.int64))
        wanted = ((0, ticket.tokens),)
        return Load(request=request, ticket=ticket, ranges=wanted, local=(pages,))

    def _memory(self, shape: Shape, layers: int, nixl: bool) -> tuple[int, int]:
        """Where both engines' memory is: anywhere, if nobody touches it."""
        self._blocks = NIXL_BLOCKS + 1 if nixl else BLOCKS
        if not nixl:
            return 1 << 50, 1 << 55
        size = engines.engine(shape, layers, self._blocks)[0].regions[0].nbytes
        self._rooms = [vllm_worker.room(size) for _ in range(2)]
        near, far = (np.frombuffer(room, dtype=np.uint8).ctypes.data for room in self._rooms)
        return near, far

    def _transports(self, nixl: bool, far: Region) -> Transport:
        """The endpoint's, and the producer's."""
        if not nixl:
            made: Transport = NoTransport(self.clocks.posted)
            self._producer = made
            self._slots = Region(address=1 << 20, nbytes=1 << 10)
            return made
        from kvferry.drivers.nixl import NixlTransport

        _count_transfers(self.clocks)
        _end_at_fence(NixlTransport, self.clocks)
        self._words = np.full(64, WORD, np.uint64)
        self._slots = Region(address=self._words.ctypes.data, nbytes=self._words.nbytes)
        self._producer = NixlTransport()
        self._producer.register(far)
        self._producer.register(self._slots)
        return NixlTransport()

    def _published(self, layout: Any) -> bytes:
        address = self._producer.address()
        made: bytes = engines.payload(layout, address=address, slots=self._slots)
        return made


class Vllm:
    """vLLM's half, of the installed vLLM or of the one whose source is named."""

    def __init__(self, layers: int, *, source: Path | None = None, nixl: bool = False) -> None:
        vllm_worker.quiet()
        if source is not None:
            vllm_worker.use_source(source)
        self.clocks = Clocks()
        self._numbers = iter(range(1, 1 << 30))
        self._blocks = NIXL_BLOCKS + 1 if nixl else BLOCKS
        start = partial(vllm_worker.start, tp=1, layers=layers, blocks=self._blocks)
        if nixl:
            start = partial(start, api=_count_transfers(self.clocks), dim=NIXL_DIM)
        with vllm_worker.patient() if nixl else nullcontext():
            self._far, self._near = start(), start()
        self._worker = self._near.worker
        self._nixl = nixl
        metadata = vllm_worker.metadata(self._far.payload, "prefill")
        self._worker._remote_agents["prefill"][0, 0] = self._worker.add_remote_agent(metadata)
        self._worker._engine_by_address["127.0.0.1", 1] = "prefill"

    def name(self) -> str:
        """As rows name it."""
        found: str = vllm_worker.name()
        return found

    def post(self, count: int, scattered: bool) -> tuple[float, float]:
        """As ``Ferry.post``."""
        said, name = self._metadata(count, scattered)
        self.clocks.start()
        self._worker.start_load_kv(said)
        self.clocks.posted()
        while self._nixl and name not in self._worker.get_finished()[1]:
            time.sleep(1e-4)
        self._worker._recving_transfers.clear()
        self._worker._recving_metadata.clear()
        return self.clocks.seconds, self.clocks.inside

    def _metadata(self, count: int, scattered: bool) -> tuple[Any, str]:
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
        return said, name


def _lists(count: int, blocks: int, scattered: bool) -> tuple[list[int], list[int]]:
    near, far = (
        engines.block_ids(count, blocks, scattered=scattered, seed=seed) for seed in (0, 1)
    )
    return near, far if scattered else near


def _end_at_fence(transport: type[Transport], clocks: Clocks) -> None:
    """The first read is the pages; the next one, of the slot word, is not."""
    for method in ("read", "read_pages"):
        setattr(transport, method, _noted(getattr(transport, method), clocks))


def _noted(read: Callable[..., Any], clocks: Clocks) -> Callable[..., Any]:
    def noted(self: Transport, peer: PeerId, copies: Any, notify: bytes | None = None) -> Any:
        if copies.total == WORD_BYTES:
            clocks.over()
        found = read(self, peer, copies, notify)
        clocks.posted()
        return found

    return noted


def nixl_there() -> bool:
    """Whether NIXL can be measured; a script beside this one has its name."""
    return any(find_spec(name) for name in ("nixl_cu12", "nixl_cu13"))


def _count_transfers(clocks: Clocks) -> Any:
    """NIXL's agent, whose ``transfer`` is clocked."""
    from kvferry.drivers.nixl import library

    api = library.load().api
    api.nixl_agent.transfer = clocks.excluded(api.nixl_agent.transfer)
    return api


def main() -> None:
    options = _options()
    found = list(_measured(options))
    rows.show(found)
    rows.write(options.json, found)


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each case and vLLM, about")
    parser.add_argument("--quick", action="store_true", help="half a second for each case")
    common.newer(parser)
    options = parser.parse_args()
    if options.quick:
        options.seconds = 0.3
    return options


def _measured(options: argparse.Namespace) -> Iterator[rows.Row]:
    kinds = [False, True] if nixl_there() else [False]
    with rows.progress(6 * len(kinds)) as say:
        for nixl in kinds:
            yield from _kind(options, nixl, say)


def _kind(options: argparse.Namespace, nixl: bool, say: rows.Show) -> Iterator[rows.Row]:
    with ExitStack() as stack:
        say("vLLM and NIXL start" if nixl else "vLLM starts")
        ours = stack.enter_context(
            worker_process.WorkerProcess(partial(Ferry, options.layers, nixl=nixl))
        )
        workers = [
            stack.enter_context(
                worker_process.WorkerProcess(
                    partial(Vllm, options.layers, source=source, nixl=nixl)
                )
            )
            for source in planning.sources(options.newer)
        ]
        peers = {worker.ask("name"): worker for worker in workers}
        made: list[rows.Row] = []
        for count in COUNTS[:1] if nixl else COUNTS:
            for scattered in (True, False):
                case = f"{count:,} blocks {'scattered' if scattered else 'in a row'}"
                say(case)
                found = {
                    name: _turns(ours, peer, count, scattered, options.seconds)
                    for name, peer in (peers or {"no vLLM is here: our worker": ours}).items()
                }
                made += _rows(case, found, scattered, nixl)
        yield from sorted(made, key=lambda row: row.section)


def _turns(
    ours: worker_process.WorkerProcess,
    theirs: worker_process.WorkerProcess,
    count: int,
    scattered: bool,
    seconds: float,
) -> common.Times:
    """CPU seconds: (rounds, ours and theirs, until posted and inside ``transfer``)."""
    sides = [ours, theirs]
    for each in sides:
        each.ask("post", count, scattered)
    found: list[list[tuple[float, float]]] = []
    end = time.monotonic() + seconds
    while len(found) < MOST and (len(found) < 3 or time.monotonic() < end):
        turn = len(found) % 2
        took = {which: sides[which].ask("post", count, scattered) for which in (turn, 1 - turn)}
        found.append([took[0], took[1]])
    return np.array(found)


def _rows(
    case: str, found: Mapping[str, common.Times], scattered: bool, nixl: bool
) -> Iterator[rows.Row]:
    target = SCATTERED if scattered else IN_A_ROW
    until = {name: each[:, :, 0] for name, each in found.items()}
    without = {name: each[:, :, 0] - each[:, :, 1] for name, each in found.items()}
    if not nixl:
        yield from _compared(
            "a request until it is posted, by transports that cost nothing", case, until
        )
        return
    yield from _compared("a request until NIXL's transfer() has returned", case, until, target)
    yield from _compared("the same without the time in transfer()", case, without)


def _compared(
    section: str, case: str, found: Mapping[str, common.Times], target: str | None = None
) -> Iterator[rows.Row]:
    """A row for each vLLM; our figure is the median of all rounds."""
    ours = np.concatenate([seconds[:, 0] for seconds in found.values()])
    for name, seconds in found.items():
        yield rows.compared(
            common.ratio(seconds[:, 1], seconds[:, 0]),
            section=section,
            case=case,
            measured=f"{np.median(ours) * US:,.0f}",
            unit="µs CPU",
            of=f"{name}'s CPU time to ours",
            target=target,
        )


if __name__ == "__main__":
    main()
