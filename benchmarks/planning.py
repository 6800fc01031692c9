"""Handshake and planning: what it takes a rank to know a peer, next to vLLM's own NIXL worker.

    python -m benchmarks.planning [--nixl] [--layers 80] [--blocks 20000] [--seconds 6] [--quick]
                                  [--newer FOLDER] [--json FILE]

Each is in a process of its own, with NIXL's agent replaced by a stand-in that costs nothing; they
take turns. ``--newer`` names the source of another vLLM, whose worker is measured in rounds of its
own. What is measured is all from what the peer's ranks publish to what is kept for it: decoded,
checked, planned; in CPU time of the thread. A peer is the first of its shape, or one that differs
from an earlier one only in where its memory lies, as the engines of one deployment do: vLLM's
worker too has tables then that it uses again. TP a-b: a prefill ranks, b decode ranks; all is done
by decode's rank 0, which knows its own engine's layouts.

``--nixl`` does it with NIXL itself: ours also connects the driver nixl to each rank, and vLLM's
worker loads them and prepares NIXL's descriptor lists. NIXL forgets the peer after each round, and
few rounds are made: after some thousand connections in a process, each one was seen to take ten
times as long.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from benchmarks import engines, harness, nixl_api, vllm_worker
from benchmarks.engines import Shape
from benchmarks.harness import Row, WorkerProcess, row
from kvferry.core import messages as wire
from kvferry.core.layout import Layout
from kvferry.core.lru_cache import LRUCache
from kvferry.core.memory import Region
from kvferry.core.planner.plan import PlanCache
from kvferry.core.side_channel.compatibility import agree, engine_info

CASES = ((1, 1, 1.0), (1, 1, 0.9), (2, 1, 1.0), (4, 1, 1.0), (8, 1, 1.0), (1, 8, 1.0), (3, 2, 1.0))
"""Prefill ranks, decode ranks, and how many blocks prefill has for each of decode's."""
EQUAL, UNEQUAL, NEWER = "≥ 50", "≥ 1000", "≥ 1"
"""Targets: the last beside a worker that has a row for each layer, where 0.32's has one for each of
its blocks, and with NIXL."""
FEWER = 10  # memory is compared with so many times fewer blocks
IN_A_ROW, SHORT_SECONDS, ROUNDS = 5, 0.5, 15
FIRST, FURTHER = "built for the first peer of its shape", "built for a further peer of that shape"
GROWTH = "memory with ten times the blocks"
REFUSED = "vLLM's worker refuses it"
NIXL_FIRST = "known to NIXL too, the first peer of its shape"
NIXL_FURTHER = "known to NIXL too, a further peer of that shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Two engines: the ranks of each, layers and blocks of decode, and prefill's blocks."""

    prefill: int
    decode: int
    layers: int
    blocks: int
    share: float

    def __str__(self) -> str:
        return f"TP {self.prefill}-{self.decode}{'' if self.share == 1 else ', unlike blocks'}"

    def far(self, blocks: int) -> int:
        """Prefill's blocks, where decode has so many."""
        return int(blocks * self.share)

    @property
    def refused(self) -> bool:
        """vLLM's worker wants sizes that divide."""
        most, fewest = max(self.prefill, self.decode), min(self.prefill, self.decode)
        return bool(most % fewest or engines.HEADS % self.prefill)


class Side:
    """Measures building: the median of a few in a row, or of one that takes long."""

    in_a_row = IN_A_ROW

    def _median(self, once: Callable[[], Callable[[], object]]) -> list[float]:
        found: list[float] = []
        end = time.monotonic() + SHORT_SECONDS
        while len(found) < self.in_a_row and (not found or time.monotonic() < end):
            call = once()
            gc.collect(0)
            start = time.thread_time()
            call()
            found.append(time.thread_time() - start)
            self._over()
        return [float(np.median(found))]

    def _over(self) -> None:
        """Forget what was built, where that is not by itself."""


class Ferry(Side):
    """kvferry's half."""

    def __init__(self) -> None:
        self._starts = itertools.count(1)

    def prepare(self, case: Case) -> None:
        """The engines of a case."""
        self._case = case
        shape = Shape(tp=case.decode)
        self._own = engines.engine(shape, case.layers, case.blocks, base=1 << 55)
        self._forget(self._own)

    def built(self, again: bool) -> list[float]:
        """All that is built for another peer."""
        return self._median(lambda: partial(self._built, self._peer(again)))

    def memory(self, blocks: int) -> tuple[int, int]:
        """Bytes while it is built, at most, and bytes that stay."""
        case = self._case
        far = engines.engine(Shape(tp=case.prefill), case.layers, case.far(blocks))
        own = engines.engine(Shape(tp=case.decode), case.layers, blocks, base=1 << 55)
        raw = engines.payloads(far)
        self._forget(own)
        tracemalloc.start()
        kept = self._built(raw)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        del kept
        return peak, held

    def _peer(self, again: bool) -> list[bytes]:
        """What another peer publishes, whose memory lies elsewhere."""
        case, start = self._case, next(self._starts)
        if not again:
            self._forget(self._own)
        shape, blocks = Shape(tp=case.prefill), case.far(case.blocks)
        far = engines.engine(shape, case.layers, blocks, base=start << 43)
        return [self._published(layout, rank) for rank, layout in enumerate(far)]

    def _published(self, layout: Layout, rank: int) -> bytes:
        return engines.payload(layout, rank)

    def _forget(self, own: list[Layout]) -> None:
        """Every shape but this engine's own, which each of its ranks is told first."""
        wire._layouts = LRUCache(wire.MAX_CACHED_LAYOUTS)
        told = [wire.decode_payload(raw) for raw in engines.payloads(own, name="decode")]
        self._mine = told[0]
        self._planner = PlanCache([each.layout for each in told], 0)

    def _built(self, raw: list[bytes]) -> Any:
        info = engine_info(raw)
        for theirs in info.ranks:
            agree(self._mine, theirs)
        return self._planner.plan([payload.layout for payload in info.ranks]), info


class NixlFerry(Ferry):
    """The same with the driver nixl, and a transport for each rank of the peer."""

    in_a_row = 1

    def prepare(self, case: Case) -> None:
        from kvferry.drivers.nixl import NixlTransport

        super().prepare(case)
        page = self._own[0].regions[0].nbytes * case.decode // case.prefill
        self._rooms = [vllm_worker.room(page) for _ in range(case.prefill)]
        self._far = [NixlTransport() for _ in self._rooms]
        for transport, room in zip(self._far, self._rooms, strict=True):
            address = np.frombuffer(room, dtype=np.uint8).ctypes.data
            transport.register(Region(address=address, nbytes=page))
        self._addresses = [transport.address() for transport in self._far]
        self._near = NixlTransport()

    def _over(self) -> None:
        for peer in self._peers:
            self._near.disconnect(peer)
        # What is left is NIXL's connection, which the driver would use again.
        self._near._idle.clear()

    def _published(self, layout: Layout, rank: int) -> bytes:
        return engines.payload(layout, rank, address=self._addresses[rank])

    def _built(self, raw: list[bytes]) -> Any:
        found = super()._built(raw)
        self._peers = [self._near.connect(payload.address) for payload in found[1].ranks]
        return found


class Vllm(Side):
    """vLLM's half: its worker of decode's rank 0, and what prefill's ranks publish.

    Of the vLLM in ``source``, or of the installed one.
    """

    api: Any = None

    def __init__(self, source: Path | None = None) -> None:
        vllm_worker.quiet()
        if source is not None:
            vllm_worker.use_source(source)
        self._names = itertools.count(1)

    def name(self) -> str:
        """As rows name it."""
        return vllm_worker.name()

    def prepare(self, case: Case) -> None:
        """The engines of a case."""
        self._case = case
        self._far = self._start(case.prefill, case.far(case.blocks))
        self._worker = self._start(case.decode, case.blocks).worker

    def built(self, again: bool) -> list[float]:
        """All that is built for another peer."""

        def once() -> Callable[[], object]:
            self._forget(again)
            return self._known

        return self._median(once)

    def _start(self, tp: int, blocks: int) -> vllm_worker.Worker:
        return vllm_worker.start(tp=tp, layers=self._case.layers, blocks=blocks, api=self.api)

    def _forget(self, again: bool) -> None:
        if again:
            return
        for handles in self._worker.src_xfer_handles_by_tp_ratio.values():
            for handle in handles:
                self._worker.nixl_wrapper.release_dlist_handle(handle)
        self._worker.src_xfer_handles_by_tp_ratio.clear()

    def _name(self) -> str:
        return f"peer-{next(self._names)}"

    def _known(self) -> str:
        tp, name = self._case.prefill, self._name()
        for rank in self._worker.transfer_topo.handshake_target_ranks(tp, 1):
            agent = self._worker.add_remote_agent(self._metadata(name, rank), rank, tp, 1)
            self._worker._remote_agents[name][0, rank] = agent
        return name

    def _metadata(self, name: str, rank: int) -> Any:
        return vllm_worker.metadata(self._far.payload, name)


class NixlVllm(Vllm):
    """The same with NIXL, and an agent for each rank of the peer."""

    in_a_row = 1

    def __init__(self, source: Path | None = None) -> None:
        from kvferry.drivers.nixl import library

        super().__init__(source)
        self.api = library.load().api
        # NIXL's agents live as long as the process: some crash when they end.
        self._started: list[object] = []
        self._known_names: list[str] = []

    def prepare(self, case: Case) -> None:
        super().prepare(case)
        mine = vllm_worker.metadata(self._far.payload, "prefill").agent_metadata
        self._agents = [mine, *(self._another() for _ in range(1, case.prefill))]

    def _over(self) -> None:
        """Release all peers, which have the same agents."""
        for name in self._known_names[1:]:
            self._worker._remote_agents[name].clear()
        for name in reversed(self._known_names):
            self._worker._cleanup_remote_engine(name, log_eviction=False)
        self._known_names.clear()

    def _known(self) -> str:
        self._known_names.append(super()._known())
        return self._known_names[-1]

    def _metadata(self, name: str, rank: int) -> Any:
        found = super()._metadata(name, rank)
        found.agent_metadata = self._agents[rank]
        return found

    def _start(self, tp: int, blocks: int) -> vllm_worker.Worker:
        with nixl_api.patient():
            made = super()._start(tp, blocks)
        self._started.append(made)
        return made

    def _another(self) -> bytes:
        """The metadata of an agent with the memory of the peer's first rank."""
        config = self.api.nixl_agent_config(num_threads=4, capture_telemetry=True)
        with nixl_api.patient():
            agent = self.api.nixl_agent(f"prefill-{len(self._started)}", config)
        self._started.append(agent)
        for descs in self._far.worker._registered_descs:
            agent.register_memory(descs, backends=self._far.worker.nixl_backends)
        made: bytes = agent.get_agent_metadata()
        return made


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All cases, beside each vLLM."""
    ours_type, theirs_type = (NixlFerry, NixlVllm) if options.nixl else (Ferry, Vllm)
    blocks, seconds = options.blocks, options.seconds
    if options.quick:
        blocks, seconds = blocks // 10, 0.2
    sources = vllm_worker.sources(options.newer)
    if options.nixl and not (sources and "nixl" in harness.working_drivers()):
        harness.nothing("NIXL or vLLM is not here: nothing was measured")
    with ExitStack() as stack:
        ours = stack.enter_context(WorkerProcess(ours_type))
        workers = [
            stack.enter_context(WorkerProcess(partial(theirs_type, source))) for source in sources
        ]
        peers = {worker.ask("name"): worker for worker in workers}
        for a, b, share in CASES:
            case = Case(prefill=a, decode=b, layers=options.layers, blocks=blocks, share=share)
            if options.nixl and (case.refused or share != 1):
                continue
            harness.say(str(case))
            one_case = _nixl_case if options.nixl else _case
            for each in one_case(case, ours, peers, seconds):
                # Fewer blocks are another task: its targets do not hold.
                yield structs.replace(each, target=None) if options.quick else each


def _case(
    case: Case, ours: WorkerProcess, peers: dict[str, WorkerProcess], seconds: float
) -> Iterator[Row]:
    ours.ask("prepare", case)
    ours.ask("memory", case.blocks)
    peak, kept = ours.ask("memory", case.blocks)
    fewer, _ = ours.ask("memory", case.blocks // FEWER)
    of, stays = f"{case.blocks:,} to {case.blocks // FEWER:,} blocks", f"{kept / 1e3:,.0f} kept"
    yield row(GROWTH, str(case), of, peak, fewer, unit="KB", measured=stays, target="≤ 1.05")
    if not peers or case.refused:
        took = np.array([ours.ask("built", False)[0] for _ in range(ROUNDS)])
        of = f"itself: {REFUSED if peers else 'there is no vLLM here'}"
        yield row(FIRST, str(case), of, took, float(np.median(took)), unit="ms")
        return
    for peer in peers.values():
        peer.ask("prepare", case)
    equal = case.prefill == case.decode
    first, further = (EQUAL if equal else UNEQUAL, NEWER), (EQUAL if equal else None, NEWER)
    yield from _beside(FIRST, case, ours, peers, ("built", False), seconds, first)
    yield from _beside(FURTHER, case, ours, peers, ("built", True), seconds / 2, further)


def _nixl_case(
    case: Case, ours: WorkerProcess, peers: dict[str, WorkerProcess], seconds: float
) -> Iterator[Row]:
    for each in (ours, *peers.values()):
        each.ask("prepare", case)
    for section, again in ((NIXL_FIRST, False), (NIXL_FURTHER, True)):
        yield from _beside(section, case, ours, peers, ("built", again), seconds, (None, NEWER))


def _beside(
    section: str,
    case: Case,
    ours: WorkerProcess,
    peers: dict[str, WorkerProcess],
    what: tuple[Any, ...],
    seconds: float,
    targets: tuple[str | None, ...] = (None, None),
) -> Iterator[Row]:
    """A row for each vLLM, with its target."""
    for (name, peer), target in zip(peers.items(), targets, strict=False):
        ways = [ours.way(*what), peer.way(*what)]
        mine, other = harness.by_turns(ways, ROUNDS, seconds, fewest=1)[:, :, 0]
        figure = float(np.median(mine))
        of = f"{name}'s time to ours"
        yield row(section, str(case), of, other, mine, unit="ms", measured=figure, target=target)


if __name__ == "__main__":
    harness.main(
        measure,
        __doc__,
        ("--nixl", {"action": "store_true", "help": "with NIXL itself"}),
        ("--layers", {"type": int, "default": 80}),
        ("--blocks", {"type": int, "default": 20_000, "help": "of each engine"}),
        ("--seconds", {"type": float, "default": 6.0, "help": "for each case and vLLM, about"}),
        vllm_worker.NEWER,
    )
