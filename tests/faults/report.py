"""Make the tables of docs/reliability.md: ``python -m tests.faults.report RUN.jsonl...``

The lines of the given runs are merged into benchmarks/results/faults.jsonl, where a later line
replaces an earlier one of the same cell or figure. The tables show that file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.core.transport import Quiescence
from kvferry.testing import Fault
from tests.faults.cells import (
    CELLS,
    COMPUTING,
    DRIVER_FAULTS,
    DRIVERS,
    FAULTS,
    FAULTY_DRIVER,
    NETWORKS,
    SIDES,
    STAGES,
    VLLM,
    WAITING,
    Key,
)

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/faults.jsonl"
PAGE = ROOT / "docs/reliability.md"
BEGIN, END = "<!-- made by tests.faults.report -->\n", "<!-- to here -->\n"

ERROR_WORDS = {
    "StaleError": "stale",
    "PeerLostError": "peer lost",
    "TicketError": "refused",
    "ConnectError": "not connected",
    "HandshakeError": "no handshake",
    "TransportError": "transport error",
    "TransferCancelledError": "cancelled",
}
"""The words for the errors of loads in the tables."""

Line = dict[str, Any]


class Run(NamedTuple):
    """The lines of cells, and those of figures by their texts."""

    cells: dict[Key, Line]
    figures: dict[tuple[str, ...], Line]

    def add(self, line: Line) -> None:
        if "figure" not in line:
            self.cells[Key(*(line[name] for name in Key._fields))] = line
        else:
            about = (str(value) for value in line.values() if isinstance(value, str))
            self.figures[tuple(about)] = line

    def lines(self) -> Iterator[Line]:
        yield from (self.cells[key] for key in sorted(CELLS & self.cells.keys()))
        yield from (self.figures[key] for key in sorted(self.figures))

    def cell(self, key: Key) -> str:
        if key not in self.cells:
            return ""
        line = self.cells[key]
        error, comma, more = line["outcome"].partition(",")
        return f"{ERROR_WORDS.get(error, error)}{comma}{more}, {line['seconds']:.2f} s"


def read(paths: Iterable[Path]) -> Run:
    run = Run({}, {})
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            run.add(json.loads(line))
    return run


def tables(run: Run) -> str:
    return "\n".join(part for make in SECTIONS for part in make(run))


def current_tables(page: str) -> str:
    return page.split(BEGIN)[1].split(END)[0]


# The sections of the page.


def _sides(run: Run) -> Iterator[str]:
    for side in SIDES:
        pestered = ["pestered"] * (side == "producer")
        yield f"### The {side}\n"
        yield _table(
            [side, *STAGES],
            [
                [fault, *(run.cell(Key(side, fault, stage)) for stage in STAGES)]
                for fault in [*FAULTS, *pestered]
            ],
        )


def _over_drivers(run: Run) -> Iterator[str]:
    for driver in DRIVERS:
        yield f"### Over {driver}\n"
        rows = [
            [f"{side} {fault}", *(run.cell(Key(side, fault, stage, driver)) for stage in STAGES)]
            for side, faults in DRIVER_FAULTS.items()
            for fault in faults
        ]
        yield _table(["what", *STAGES], rows)


def _networks(run: Run) -> Iterator[str]:
    yield "### Between two networks, over UCX\n"
    rows = [[key.fault, *(run.cell(key) for key in NETWORKS)] for key in NETWORKS[:1]]
    yield _table(["producer", *STAGES], rows)


def _waiting(run: Run) -> Iterator[str]:
    yield "### While a request waits\n"
    rows = [[f"{key.side} {key.fault}", key.stage, run.cell(key)] for key in [*COMPUTING, *WAITING]]
    yield _table(["what", "the request is", "outcome"], rows)


def _driver(run: Run) -> Iterator[str]:
    yield "### The driver\n"
    columns = [(stage, kind) for stage in ("reading", "fencing") for kind in Quiescence]
    faults = [
        fault.value for fault in Fault if Key("driver", fault.value, *_first()) in FAULTY_DRIVER
    ]
    yield _table(
        ["driver", *(f"{stage}, quiet {kind.value.replace('_', ' ')}" for stage, kind in columns)],
        [
            [fault, *(run.cell(Key("driver", fault, stage, kind.value)) for stage, kind in columns)]
            for fault in faults
        ],
    )


def _first() -> tuple[str, str]:
    return "reading", next(iter(Quiescence)).value


def _vllm(run: Run) -> Iterator[str]:
    yield "### Two vLLM engines\n"
    rows = [
        [f"{key.side} {key.fault}", key.stage, key.where.partition(" over ")[2], run.cell(key)]
        for key in VLLM
    ]
    yield _table(
        ["what", "when", "over", "outcome"],
        [[*row[:2], row[2] or "loopback", row[3]] for row in rows],
    )


def _figures(run: Run) -> Iterator[str]:
    yield "## Many times over\n"
    rows = [
        [line["figure"], shown(line), f"{line['seconds']:,.0f}"]
        for line in run.figures.values()
        for shown in [FIGURE_TEXTS[line["figure"]]]
    ]
    yield _table(["test", "what", "seconds"], sorted(rows))


FIGURE_TEXTS: dict[str, Callable[[Line], str]] = {
    "fuzz": lambda line: f"{line['what']}: {line['inputs']:,} inputs",
    "model": lambda line: f"{line['steps']:,} steps in {line['examples']:,} examples",
    "reuse": lambda line: (
        f"{line['driver']}, pages reused at {line['how']}: {line['tries']:,} loads, "
        f"{line['stale']:,} stale, the others right"
    ),
    "soak": lambda line: (
        f"{line['quiescence'].replace('_', ' ')}: {line['requests']:,} requests, "
        f"{line['loaded']:,} loads right, {line['failed']:,} failed; "
        f"{line['memory']:+} MiB, {line['files']:+} files, {line['threads']:+} threads"
    ),
}
SECTIONS = (_sides, _over_drivers, _networks, _waiting, _driver, _vllm, _figures)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(runs: Sequence[str]) -> None:
    run = read([*([RESULTS] * RESULTS.exists()), *map(Path, runs)])
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in run.lines()), encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(before + BEGIN + tables(run) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
