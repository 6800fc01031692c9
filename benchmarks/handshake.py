"""A peer made known on NIXL's own calls: what a rank builds, and what NIXL loads and keeps.

    python benchmarks/handshake.py [--layers 80] [--blocks 20000] [--seconds 4] [--quick]
                                   [--newer FOLDER] [--json FILE]

As in ``planning.py``, but with NIXL itself on both sides. Ours is what the peer's ranks publish
decoded, checked and planned, and ``connect`` of the driver nixl for each of these ranks. vLLM's
worker loads them as well, and prepares NIXL's descriptor lists. NIXL forgets the peer after each
round, on both sides, so each connection is made anew. Few rounds are made: after some
thousand connections in a process, each one was seen to take ten times as long.
The first read of a slot word, which an endpoint of ours makes besides, is not counted.
What counts is the CPU time of the thread that does the work. NIXL's progress threads sleep while
they are idle, on both sides: vLLM leaves them spinning, which would take the cores from everyone.
Memory is what NIXL and numpy have allocated by then, for each of some further peers; small objects
of Python's are not counted (see ``planning.py``), nor the connection, which such peers share here.
TP a-b: a prefill ranks, each with an agent of its own, and b decode ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import planning
import rows
import vllm_worker
import worker_process
from planning import Case
from request import nixl_there

from kvferry.core.layout import Layout
from kvferry.core.memory import Region
from kvferry.core.planner.plan import Plan

CASES = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 8))
"""Prefill ranks and decode ranks."""
MOST_PEERS, ENOUGH = 64, 64 << 20
"""Memory is measured over so many peers, or until it has grown by so many bytes."""
THREADS = 4
"""NixlConnector's default for an agent."""
FIRST = "known to NIXL too, the first peer of its shape"
FURTHER = "known to NIXL too, a further peer of that shape"
KEPT = "memory that NIXL and numpy keep for a further peer"
ORDER = (FIRST, FURTHER, KEPT)


class Ferry(planning.Ferry):  # type: ignore[misc]
    """kvferry's half: the driver nixl, and a transport for each rank of the peer."""

    def prepare(self, case: Case) -> None:
        """The engines of a case."""
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

    def built(self, again: bool) -> worker_process.Measurement:
        """All that is built for another peer, which NIXL does not know."""
        found = super().built(again)
        for peer in self._peers:
            self._near.disconnect(peer)
        # What is left is NIXL's connection, which the driver would use again.
        self._near._idle.clear()
        return found

    def kept(self) -> float:
        """Bytes that stay for another peer."""
        kept: list[object] = [self._built(self._peer(True))]
        before = worker_process.heap()
        while len(kept) <= MOST_PEERS and worker_process.heap() - before < ENOUGH:
            kept.append(self._built(self._peer(True)))
        grown: int = worker_process.heap() - before
        return grown / (len(kept) - 1)

    def _published(self, layout: Layout, rank: int) -> bytes:
        made: bytes = planning.engines.payload(layout, rank, address=self._addresses[rank])
        return made

    def _planned(self, info: Any) -> tuple[Plan, object]:
        found: tuple[Plan, object] = super()._planned(info)
        self._peers = [self._near.connect(payload.address) for payload in info.ranks]
        return found


class Vllm(planning.Vllm):  # type: ignore[misc]
    """vLLM's half: its worker, and an agent for each rank of the peer."""

    def __init__(self, source: Path | None = None) -> None:
        from kvferry.drivers.nixl import library

        super().__init__(source)
        self._library = library.load()
        self._started: list[object] = []

    def prepare(self, case: Case) -> None:
        """The engines of a case."""
        super().prepare(case)
        mine = vllm_worker.metadata(self._payload, "prefill").agent_metadata
        self._agents = [mine, *(self._another() for _ in range(1, case.prefill))]

    def built(self, again: bool) -> worker_process.Measurement:
        """All that is built for another peer, which NIXL does not know."""
        self._forget(again)
        names: list[str] = []
        found = worker_process.timed(lambda: names.append(self._known()))
        self._end(names)
        return found

    def kept(self) -> float:
        """Bytes that stay for another peer."""
        names, before = [self._known()], worker_process.heap()
        while len(names) <= MOST_PEERS and worker_process.heap() - before < ENOUGH:
            names.append(self._known())
        grown: int = worker_process.heap() - before
        self._end(names)
        return grown / (len(names) - 1)

    def _end(self, names: list[str]) -> None:
        """Release all of these peers, which have the same agents."""
        for name in names[1:]:
            self._worker._remote_agents[name].clear()
        for name in reversed(names):
            self._worker._cleanup_remote_engine(name, log_eviction=False)

    def _metadata(self, name: str, rank: int) -> Any:
        found = super()._metadata(name, rank)
        found.agent_metadata = self._agents[rank]
        return found

    def _start(self, case: Case, tp: int, blocks: int) -> vllm_worker.Worker:
        with vllm_worker.patient():
            made = vllm_worker.start(
                tp=tp, layers=case.layers, blocks=blocks, api=self._library.api
            )
        # NIXL's agents live as long as the process: some crash when they end.
        self._started.append(made)
        return made

    def _another(self) -> bytes:
        """The metadata of an agent with the memory of the peer's first rank."""
        api = self._library.api
        config = api.nixl_agent_config(num_threads=THREADS, capture_telemetry=True)
        with vllm_worker.patient():
            agent = api.nixl_agent(f"prefill-{len(self._started)}", config)
        self._started.append(agent)
        for descs in self._far.worker._registered_descs:
            agent.register_memory(descs, backends=self._far.worker.nixl_backends)
        made: bytes = agent.get_agent_metadata()
        return made


def main() -> None:
    options = planning.options_of(__doc__, seconds=4.0)
    found = list(_measured(options))
    rows.show(found)
    rows.write(options.json, found)


def _measured(options: argparse.Namespace) -> Iterator[rows.Row]:
    if not nixl_there():
        rows.nothing("NIXL is not installed: nothing was measured")
    sources = planning.sources(options.newer)
    if not sources:
        rows.nothing("there is no vLLM: nothing was measured")
    with ExitStack() as stack:
        ours = stack.enter_context(worker_process.WorkerProcess(Ferry))
        workers = [
            stack.enter_context(worker_process.WorkerProcess(partial(Vllm, source)))
            for source in sources
        ]
        say = stack.enter_context(rows.progress(len(CASES) + 1))
        say("vLLM starts")
        peers = {worker.ask("name"): worker for worker in workers}
        found: list[rows.Row] = []
        for prefill, decode in CASES:
            case = Case(
                prefill=prefill,
                decode=decode,
                layers=options.layers,
                blocks=options.blocks,
                share=1.0,
            )
            say(str(case))
            found += _case(case, ours, peers, options.seconds)
        if options.quick:
            found = [replace(row, target=None, met=None) for row in found]
        yield from sorted(found, key=lambda row: ORDER.index(row.section))


def _case(
    case: Case, ours: worker_process.WorkerProcess, peers: planning.Peers, seconds: float
) -> Iterator[rows.Row]:
    for each in (ours, *peers.values()):
        each.ask("prepare", case)
    for section, again in ((FIRST, False), (FURTHER, True)):
        took = {
            name: planning.turns(ours, peer, "built", again, seconds, in_a_row=1)
            for name, peer in peers.items()
        }
        yield from planning.compared(section, case, took, (None, planning.NEWER))
    yield from _memory(case, ours.ask("kept"), {n: each.ask("kept") for n, each in peers.items()})


def _memory(case: Case, ours: float, theirs: Mapping[str, float]) -> Iterator[rows.Row]:
    measured = f"{ours / 1e3:,.0f}"
    for name, grown in theirs.items():
        ratio = np.array([max(grown, 1) / max(ours, 1)])
        yield planning.row(KEPT, str(case), measured, "KB", ratio, f"{name}'s memory to ours")


if __name__ == "__main__":
    main()
