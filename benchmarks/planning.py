"""Handshake and planning: what it takes a rank to know a peer, next to vLLM's own NIXL worker.

    python benchmarks/planning.py [--layers 80] [--blocks 20000] [--seconds 5] [--quick]
                                  [--json FILE]

The peer is vLLM's worker itself, in a process of its own, with NIXL's agent replaced by a stand-in
that costs nothing; the two take turns. "Built" is from what the peer's ranks publish to all that is
kept for it: decoded, checked, planned; in CPU time. "Handshake" is that and the question over a
real socket; by the clock.
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
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import common
import engines
import numpy as np
import rows
import vllm_worker
import worker_process
from engines import Shape

from kvferry.core import messages as wire
from kvferry.core.handshake import HandshakeServer, agree, engine_info, fetch
from kvferry.core.layout import Layout
from kvferry.core.lru_cache import LRUCache
from kvferry.core.planner.plan import Plan
from kvferry.core.planner.plan_cache import PlanCache

CASES = ((1, 1, 1.0), (1, 1, 0.9), (2, 1, 1.0), (4, 1, 1.0), (8, 1, 1.0), (1, 8, 1.0), (3, 2, 1.0))
"""Prefill ranks, decode ranks, and how many blocks prefill has for each of decode's."""
EQUAL, UNEQUAL, CONSTANT = "≥ 50", "≥ 1000", "≤ 1.05"
FEWER = 10
"""Memory is compared with so many times fewer blocks."""
IN_A_ROW, SHORT_SECONDS = 5, 0.5
MOST = 15
"""Rounds of a case; one, where that takes long."""
MS = 1e3
PAGE = 4096
"""Bytes; the kernel counts no less."""


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
        made: list[bytes] = engines.payloads(far)
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
    """vLLM's half: its worker of decode's rank 0, and what prefill's ranks publish."""

    def __init__(self) -> None:
        vllm_worker.quiet()
        self._made: dict[tuple[int, int, int], vllm_worker.Worker] = {}
        self._names = itertools.count(1)

    def ready(self) -> bool:
        """It was made."""
        return True

    def prepare(self, case: Case) -> None:
        """The engines of a case."""
        self._made.clear()
        self._case = case
        self._payload = self._start(case, case.prefill, case.far(case.blocks)).payload
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

    def _start(self, case: Case, tp: int, blocks: int) -> vllm_worker.Worker:
        return vllm_worker.start(tp=tp, layers=case.layers, blocks=blocks)

    def _forget(self, again: bool) -> None:
        if not again:
            self._worker.src_xfer_handles_by_tp_ratio.clear()

    def _name(self) -> str:
        return f"peer-{next(self._names)}"

    def _known(self) -> None:
        tp, name = self._case.prefill, self._name()
        for rank in self._worker.transfer_topo.handshake_target_ranks(tp, 1):
            metadata = vllm_worker.metadata(self._payload, name)
            agent = self._worker.add_remote_agent(metadata, rank, tp, 1)
            self._worker._remote_agents[name][0, rank] = agent


def main() -> None:
    options = _options()
    rows_found = list(_measured(options))
    rows.show(rows_found)
    rows.write(options.json, rows_found)


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--blocks", type=int, default=20_000, help="blocks of each engine")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each case, about")
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the blocks, and no targets"
    )
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
        theirs = (
            stack.enter_context(worker_process.WorkerProcess(Vllm))
            if vllm_worker.available()
            else None
        )
        say = stack.enter_context(rows.progress(len(cases) + 1))
        say("vLLM starts")
        if theirs is not None:
            theirs.ask("ready")
        found = []
        for case in cases:
            say(str(case))
            found += list(_case(case, ours, theirs, options.seconds))
        if options.quick:
            found = [replace(row, target=None, met=None) for row in found]
        yield from sorted(found, key=lambda row: ORDER.index(row.section))


FIRST = "built for the first peer of its shape"
FURTHER = "built for a further peer of that shape"
SHAKEN = "handshake with a further peer of that shape, over a socket"
MEMORY = "memory while a peer is built"
GROWTH = "memory with ten times the blocks"
ORDER = (FIRST, FURTHER, SHAKEN, MEMORY, GROWTH)


def _case(
    case: Case,
    ours: worker_process.WorkerProcess,
    theirs: worker_process.WorkerProcess | None,
    seconds: float,
) -> Iterator[rows.Row]:
    ours.ask("prepare", case)
    ours.ask("memory", case.blocks)
    peak, kept = ours.ask("memory", case.blocks)
    fewer, _ = ours.ask("memory", case.blocks // FEWER)
    yield _row(
        GROWTH,
        str(case),
        f"{kept / 1e3:,.0f} kept",
        "KB",
        np.array([peak / fewer]),
        f"{case.blocks:,} to {case.blocks // FEWER:,} blocks",
        CONSTANT,
    )
    if theirs is None or case.refused:
        took = np.array([ours.ask("built", False).seconds for _ in range(MOST)])
        why = "vLLM's worker refuses it" if theirs else "there is no vLLM here"
        yield _row(FIRST, str(case), _ms(took), "ms", took / np.median(took), f"itself: {why}")
        return
    theirs.ask("prepare", case)
    target = EQUAL if case.prefill == case.decode else UNEQUAL
    vllms = "vLLM's worker's time to ours"
    mine, other, grown = _turns(ours, theirs, "built", False, seconds)
    yield _row(FIRST, str(case), _ms(mine), "ms", other / mine, vllms, target)
    yield _row(
        MEMORY, str(case), f"{peak / 1e3:,.0f}", "KB", grown / peak, "vLLM's worker's peak to ours"
    )
    mine, other, _ = _turns(ours, theirs, "built", True, seconds / 2)
    again = EQUAL if case.prefill == case.decode else None
    yield _row(FURTHER, str(case), _ms(mine), "ms", other / mine, vllms, again)
    mine, other, _ = _turns(ours, theirs, "handshake", True, seconds / 2)
    yield _row(SHAKEN, str(case), _ms(mine), "ms", other / mine, vllms)


def _turns(
    ours: worker_process.WorkerProcess,
    theirs: worker_process.WorkerProcess,
    what: str,
    again: bool,
    seconds: float,
) -> tuple[common.Times, common.Times, common.Times]:
    """Seconds of both, round by round, and the bytes of theirs; each has run once before."""
    sides = (ours, theirs)
    for each in sides:
        each.ask(what, True)
    found: list[list[float]] = []
    end = time.monotonic() + seconds
    while len(found) < MOST and (not found or time.monotonic() < end):
        turn = len(found) % 2
        took = {each: _median(each, what, again) for each in (sides[turn], sides[1 - turn])}
        found.append([took[ours][0], *took[theirs]])
    mine, other, grown = np.array(found).T
    return mine, other, np.maximum(grown, PAGE)


def _median(one: worker_process.WorkerProcess, what: str, again: bool) -> tuple[float, float]:
    """Seconds and bytes of a few in a row, or of one that takes long.

    Building is work, and counted in CPU time; a handshake is waiting, too.
    """
    found: list[worker_process.Measurement] = []
    while len(found) < IN_A_ROW and sum(took.seconds for took in found) < SHORT_SECONDS:
        found.append(one.ask(what, again))
    seconds = [took.cpu if what == "built" else took.seconds for took in found]
    return float(np.median(seconds)), max(took.nbytes for took in found)


def _row(
    section: str,
    case: str,
    measured: str,
    unit: str,
    ratios: common.Times,
    of: str,
    target: str | None = None,
) -> rows.Row:
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


def _ms(seconds: common.Times) -> str:
    return f"{np.median(seconds) * MS:.2f}"


if __name__ == "__main__":
    main()
