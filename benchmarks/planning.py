"""Handshake and planning: what it takes a rank to know a peer, next to vLLM's own NIXL worker.

    python benchmarks/planning.py [--layers 80] [--blocks 20000] [--seconds 6] [--quick]
                                  [--newer FOLDER] [--json FILE]

The peer is vLLM's worker itself, in a process of its own, with NIXL's agent replaced by a stand-in
that costs nothing; the two take turns. ``--newer`` names the source of another vLLM, whose worker
is measured besides that of the installed vLLM, in rounds of its own.
"Built" is from what the peer's ranks publish to all that is kept for it: decoded, checked, planned;
in CPU time. "Handshake" is that and the question over a real socket; by the clock.
A peer is the first of its shape, or one that differs from an earlier one only in where its memory
lies, as the engines of one deployment do: vLLM's worker too has tables then that it uses again.
TP a-b: a prefill ranks, b decode ranks; all is done by decode's rank 0, which knows its own
engine's layouts from its start, and with them the fields of a peer that is laid out alike; not of
one with another number of ranks or blocks.
"""

from __future__ import annotations

import argparse
import itertools
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import engines
import numpy as np
import rows
import vllm_worker
import worker_process
from engines import Shape

from kvferry.core import messages as wire
from kvferry.core.layout import Layout
from kvferry.core.lru_cache import LRUCache
from kvferry.core.planner.plan import Plan
from kvferry.core.planner.plan_cache import PlanCache
from kvferry.core.side_channel import HandshakeServer, agree, engine_info, fetch

CASES = ((1, 1, 1.0), (1, 1, 0.9), (2, 1, 1.0), (4, 1, 1.0), (8, 1, 1.0), (1, 8, 1.0), (3, 2, 1.0))
"""Prefill ranks, decode ranks, and how many blocks prefill has for each of decode's."""
EQUAL, UNEQUAL, CONSTANT = "≥ 50", "≥ 1000", "≤ 1.05"
NEWER = "≥ 1"
"""Beside a worker that has a row for each layer, where vLLM 0.32's has one for each block of it."""
FEWER = 10
"""Memory is compared with so many times fewer blocks."""
IN_A_ROW, SHORT_SECONDS = 5, 0.5
MOST = 15
"""Rounds of a case; one, where that takes long."""
MS = 1e3


Peers = Mapping[str, worker_process.WorkerProcess]
"""Workers of vLLM, by the name that rows have for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Round by round: seconds of ours and of theirs."""

    ours: common.Times
    theirs: common.Times


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Two engines, by how many ranks each has.

    Attributes:
        prefill, decode: their ranks.
        layers, blocks: of decode; prefill has ``share`` times as many blocks.
    """

    prefill: int
    decode: int
    layers: int
    blocks: int
    share: float

    def __str__(self) -> str:
        unlike = "" if self.share == 1 else ", unlike blocks"
        return f"TP {self.prefill}-{self.decode}{unlike}"

    def far(self, blocks: int) -> int:
        """Prefill's blocks, where decode has so many."""
        return int(blocks * self.share)

    @property
    def refused(self) -> bool:
        """vLLM's worker wants sizes that divide."""
        return bool(
            max(self.prefill, self.decode) % min(self.prefill, self.decode)
            or engines.HEADS % self.prefill
        )


class Ferry:
    """kvferry's half."""

    def __init__(self) -> None:
        self._starts = itertools.count(1)

    def prepare(self, case: Case) -> None:
        """The engines of a case."""
        self._case = case
        shape = Shape(tp=case.decode)
        self._own = engines.engine(shape, case.layers, case.blocks, base=1 << 55)
        self._forget(self._own)

    def built(self, again: bool) -> worker_process.Measurement:
        """All that is built for another peer."""
        raw = self._peer(again)
        return worker_process.timed(lambda: self._built(raw))

    def handshake(self, again: bool) -> worker_process.Measurement:
        """Ask a peer and build."""
        raw = self._peer(again)
        with HandshakeServer(raw, engine="prefill", incarnation=5) as server:
            return worker_process.timed(lambda: self._asked(server))

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
        made: bytes = engines.payload(layout, rank)
        return made

    def _forget(self, own: list[Layout]) -> None:
        """Every shape but this engine's own, which each of its ranks is told first."""
        wire._layouts = LRUCache(wire.MAX_CACHED_LAYOUTS)
        told = [wire.decode_payload(raw) for raw in engines.payloads(own, name="decode")]
        self._mine = told[0]
        self._planner = PlanCache([each.layout for each in told], 0)

    def _built(self, raw: list[bytes]) -> tuple[Plan, object]:
        return self._planned(engine_info(raw))

    def _asked(self, server: HandshakeServer) -> tuple[Plan, object]:
        return self._planned(fetch(server.host, server.port, "prefill", timeout=10.0))

    def _planned(self, info: Any) -> tuple[Plan, object]:
        for theirs in info.ranks:
            agree(self._mine, theirs)
        layouts: list[Layout] = [payload.layout for payload in info.ranks]
        return self._planner.plan(layouts), info


class Vllm:
    """vLLM's half: its worker of decode's rank 0, and what prefill's ranks publish.

    Args:
        source: the source of a vLLM; by default, the installed one is measured.
    """

    def __init__(self, source: Path | None = None) -> None:
        vllm_worker.quiet()
        if source is not None:
            vllm_worker.use_source(source)
        self._made: dict[tuple[int, int, int], vllm_worker.Worker] = {}
        self._names = itertools.count(1)

    def name(self) -> str:
        """As rows name it."""
        found: str = vllm_worker.name()
        return found

    def prepare(self, case: Case) -> None:
        """The engines of a case."""
        self._made.clear()
        self._case = case
        self._far = self._start(case, case.prefill, case.far(case.blocks))
        self._payload = self._far.payload
        self._worker = self._start(case, case.decode, case.blocks).worker

    def built(self, again: bool) -> worker_process.Measurement:
        """All that is built for another peer."""
        self._forget(again)
        return worker_process.timed(self._known)

    def handshake(self, again: bool) -> worker_process.Measurement:
        """Ask a peer and build."""
        self._forget(again)
        name = self._name()
        with vllm_worker.listening(self._payload, name, self._case.prefill) as (host, port):
            return worker_process.timed(
                lambda: self._worker._nixl_handshake(host, port, self._case.prefill, name)
            )

    def memory(self) -> int:
        """Bytes while a first peer is built, at most."""
        self._forget(False)
        tracemalloc.start()
        self._known()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    def _start(self, case: Case, tp: int, blocks: int) -> vllm_worker.Worker:
        return vllm_worker.start(tp=tp, layers=case.layers, blocks=blocks)

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
        return vllm_worker.metadata(self._payload, name)


def main() -> None:
    options = options_of(__doc__, seconds=6.0)
    rows_found = list(_measured(options))
    rows.show(rows_found)
    rows.write(options.json, rows_found)


def options_of(description: str | None, *, seconds: float) -> argparse.Namespace:
    """The options of a benchmark that measures how engines are made known to each other.

    Args:
        description: The docstring of the benchmark's module.
        seconds: For each case and vLLM, unless the command line says otherwise.
    """
    parser: argparse.ArgumentParser = common.parser(description)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--blocks", type=int, default=20_000, help="blocks of each engine")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="for each case and vLLM, about"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the blocks, and no targets"
    )
    common.newer(parser)
    options = parser.parse_args()
    if options.quick:
        options.blocks, options.seconds = options.blocks // 10, 0.2
    return options


def _measured(options: argparse.Namespace) -> Iterator[rows.Row]:
    cases = [
        Case(prefill=a, decode=b, layers=options.layers, blocks=options.blocks, share=share)
        for a, b, share in CASES
    ]
    with ExitStack() as stack:
        ours = stack.enter_context(worker_process.WorkerProcess(Ferry))
        workers = [
            stack.enter_context(worker_process.WorkerProcess(partial(Vllm, source)))
            for source in sources(options.newer)
        ]
        say = stack.enter_context(rows.progress(len(cases) + 1))
        say("vLLM starts")
        peers = {worker.ask("name"): worker for worker in workers}
        found = []
        for case in cases:
            say(str(case))
            found += list(_case(case, ours, peers, options.seconds))
        if options.quick:
            found = [replace(row, target=None, met=None) for row in found]
        yield from sorted(found, key=lambda row: ORDER.index(row.section))


def sources(newer: Path | None) -> list[Path | None]:
    """The vLLMs to measure against: the installed one (``None``) first, if there is one."""
    installed: list[Path | None] = [None] if vllm_worker.available() else []
    return installed + ([newer] if newer else [])


FIRST = "built for the first peer of its shape"
FURTHER = "built for a further peer of that shape"
SHAKEN = "handshake with a further peer of that shape, over a socket"
MEMORY = "memory while a peer is built"
GROWTH = "memory with ten times the blocks"
ORDER = (FIRST, FURTHER, SHAKEN, MEMORY, GROWTH)


def _case(
    case: Case,
    ours: worker_process.WorkerProcess,
    peers: Peers,
    seconds: float,
) -> Iterator[rows.Row]:
    ours.ask("prepare", case)
    ours.ask("memory", case.blocks)
    peak, kept = ours.ask("memory", case.blocks)
    fewer, _ = ours.ask("memory", case.blocks // FEWER)
    yield row(
        GROWTH,
        str(case),
        f"{kept / 1e3:,.0f} kept",
        "KB",
        np.array([peak / fewer]),
        f"{case.blocks:,} to {case.blocks // FEWER:,} blocks",
        CONSTANT,
    )
    if not peers or case.refused:
        took = np.array([ours.ask("built", False).seconds for _ in range(MOST)])
        why = "vLLM's worker refuses it" if peers else "there is no vLLM here"
        yield row(FIRST, str(case), ms(took), "ms", took / np.median(took), f"itself: {why}")
        return
    for peer in peers.values():
        peer.ask("prepare", case)
    equal = case.prefill == case.decode
    first = {name: turns(ours, peer, "built", False, seconds) for name, peer in peers.items()}
    further = {name: turns(ours, peer, "built", True, seconds / 2) for name, peer in peers.items()}
    yield from compared(FIRST, case, first, (EQUAL if equal else UNEQUAL, NEWER))
    for name, peer in peers.items():
        ratio = np.array([peer.ask("memory") / peak])
        of = f"{name}'s peak to ours"
        yield row(MEMORY, str(case), f"{peak / 1e3:,.0f}", "KB", ratio, of)
    yield from compared(FURTHER, case, further, (EQUAL if equal else None, NEWER))
    yield from compared(
        SHAKEN,
        case,
        {name: turns(ours, peer, "handshake", True, seconds / 2) for name, peer in peers.items()},
    )


def compared(
    section: str,
    case: Case,
    found: Mapping[str, Turns],
    targets: tuple[str | None, str | None] = (None, None),
) -> Iterator[rows.Row]:
    """A row for each vLLM; our figure is the median of all rounds.

    Args:
        targets: for the ratio to the installed vLLM's worker, and to a newer one's.
    """
    measured = ms(np.concatenate([each.ours for each in found.values()]))
    for (name, each), target in zip(found.items(), targets, strict=False):
        of = f"{name}'s time to ours"
        yield row(section, str(case), measured, "ms", each.theirs / each.ours, of, target)


def turns(
    ours: worker_process.WorkerProcess,
    theirs: worker_process.WorkerProcess,
    what: str,
    again: bool,
    seconds: float,
    in_a_row: int = IN_A_ROW,
) -> Turns:
    """Seconds of both, round by round; each has run once before."""
    sides = (ours, theirs)
    for each in sides:
        each.ask(what, True)
    found: list[list[float]] = []
    end = time.monotonic() + seconds
    while len(found) < MOST and (not found or time.monotonic() < end):
        turn = len(found) % 2
        took = {
            each: _median(each, what, again, in_a_row) for each in (sides[turn], sides[1 - turn])
        }
        found.append([took[ours], took[theirs]])
    mine, other = np.array(found).T
    return Turns(ours=mine, theirs=other)


def _median(one: worker_process.WorkerProcess, what: str, again: bool, in_a_row: int) -> float:
    """Seconds of a few in a row, or of one that takes long.

    Building is work, and counted in CPU time; a handshake is waiting, too.
    """
    found: list[worker_process.Measurement] = []
    while len(found) < in_a_row and sum(took.seconds for took in found) < SHORT_SECONDS:
        found.append(one.ask(what, again))
    seconds = [took.thread if what == "built" else took.seconds for took in found]
    return float(np.median(seconds))


def row(
    section: str,
    case: str,
    measured: str,
    unit: str,
    ratios: common.Times,
    of: str,
    target: str | None = None,
) -> rows.Row:
    """A row of ratios, one for each round."""
    found = common.ratio(ratios, np.ones(len(ratios)))
    return rows.compared(
        found,
        section=section,
        case=case,
        measured=measured,
        unit=unit,
        of=of,
        target=target,
    )


def ms(seconds: common.Times) -> str:
    """The median, in milliseconds."""
    return f"{np.median(seconds) * MS:.2f}"


if __name__ == "__main__":
    main()
