"""Make the tables of docs/reliability.md: ``python -m tests.faults.report RUN.jsonl...``

The lines of the given runs are merged into benchmarks/results/faults.jsonl, where a later line
replaces an earlier one of the same cell or figure. The tables show that file, in its order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tests.faults.cells import CABLE, DRIVERS, RESULTS, STAGES, Key, Line, read

PAGE = Path(__file__).parents[2] / "docs/reliability.md"
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
FIGURES: dict[str, Callable[[Line], str]] = {
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

Name = Callable[[Key], str]


def tables(lines: Iterable[Line]) -> str:
    """Return the sections of the page."""
    cells: dict[Key, str] = {}
    figures = []
    for line in lines:
        if "figure" in line:
            shown = FIGURES[line["figure"]](line)
            figures.append([line["figure"], shown, f"{line['seconds']:,.0f}"])
            continue
        error, comma, more = line["outcome"].partition(",")
        outcome = f"{ERROR_WORDS.get(error, error)}{comma}{more}, {line['seconds']:.2f} s"
        cells[Key(*(line[name] for name in Key._fields))] = outcome

    def some(where: str) -> dict[Key, str]:
        """Return the cells of loads in a table."""
        staged = ((key, cells[key]) for key in cells if key.where == where)
        return {key: outcome for key, outcome in staged if key.stage in STAGES}

    def section(title: str, first: str, found: dict[Key, str], row: Name, column: Name) -> str:
        return f"### {title}\n\n" + _matrix(first, found, row, column)

    parts = [
        section(
            f"The {side}",
            side,
            {key: outcome for key, outcome in some("loopback").items() if key.side == side},
            lambda key: key.fault,
            lambda key: key.stage,
        )
        for side in ("producer", "consumer")
    ]
    parts += [
        section(
            f"Over {driver}",
            "what",
            some(driver),
            lambda key: f"{key.side} {key.fault}",
            lambda key: key.stage,
        )
        for driver in DRIVERS
    ]
    parts += [
        section(
            "Between two networks, over UCX",
            "producer",
            some(CABLE),
            lambda key: key.fault,
            lambda key: key.stage,
        ),
        "### While a request waits\n\n"
        + _table(
            ["what", "the request is", "outcome"],
            [
                [f"{key.side} {key.fault}", key.stage, outcome]
                for key, outcome in cells.items()
                if key.where == "loopback" and key.stage not in STAGES
            ],
        ),
        section(
            "The driver",
            "driver",
            {key: outcome for key, outcome in cells.items() if key.side == "driver"},
            lambda key: key.fault,
            lambda key: f"{key.stage}, quiet {key.where.replace('_', ' ')}",
        ),
        "### Two vLLM engines\n\n"
        + _table(
            ["what", "when", "over", "outcome"],
            [
                [
                    f"{key.side} {key.fault}",
                    key.stage,
                    key.where.partition(" over ")[2] or "loopback",
                    outcome,
                ]
                for key, outcome in cells.items()
                if key.where.startswith("vllm")
            ],
        ),
        "## Many times over\n\n" + _table(["test", "what", "seconds"], sorted(figures)),
    ]
    return "\n".join(parts)


def current_tables(page: str) -> str:
    return page.split(BEGIN)[1].split(END)[0]


def _matrix(first: str, cells: dict[Key, str], row: Name, column: Name) -> str:
    columns = list(dict.fromkeys(map(column, cells)))
    rows = list(dict.fromkeys(map(row, cells)))
    shown = {(row(key), column(key)): outcome for key, outcome in cells.items()}
    return _table([first, *columns], [[r, *(shown.get((r, c), "") for c in columns)] for r in rows])


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines: Iterator[Sequence[str]] = iter([headings, ["---"] * len(headings), *rows])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(runs: Sequence[str]) -> None:
    found = read([RESULTS, *map(Path, runs)])
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in found.values()), "utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(before + BEGIN + tables(found.values()) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
