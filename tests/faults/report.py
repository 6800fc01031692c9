"""Make the tables of docs/reliability.md: ``python -m tests.faults.report RUN.jsonl...``

The lines of the given runs are merged into benchmarks/results/faults.jsonl, where a later line
replaces an earlier one of the same cell or figure. The tables show that file, in its order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
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


def tables(lines: Iterable[Line]) -> str:
    """Return the sections of the page."""
    cells: dict[Key, str] = {}
    figures = {}
    for line in lines:
        if "figure" in line:
            figures[f"{line['figure']} | {FIGURES[line['figure']](line)}"] = line["seconds"]
            continue
        error, comma, more = line["outcome"].partition(",")
        outcome = f"{ERROR_WORDS.get(error, error)}{comma}{more}, {line['seconds']:.2f} s"
        cells[Key(*(line[name] for name in Key._fields))] = outcome

    def section(
        title: str,
        heading: str,
        is_in: Callable[[Key], bool],
        row: str = "{0.side} {0.fault}",
        column: str = "{0.stage}",
    ) -> str:
        """Return a table of some cells; what stands in a row and in a column has one name."""
        found = {key: outcome for key, outcome in cells.items() if is_in(key)}
        rows: dict[str, dict[str, str]] = {}
        for key, outcome in found.items():
            over = key.where.partition(" over ")[2] or "loopback"
            quiet = key.where.replace("_", " ")
            rows.setdefault(row.format(key, over=over), {})[column.format(key, quiet=quiet)] = (
                outcome
            )
        columns = list(dict.fromkeys(name for each in rows.values() for name in each))
        return f"### {title}\n\n" + _table(
            f"{heading} | {' | '.join(columns)}",
            [
                " | ".join([name, *(of.get(each, "") for each in columns)])
                for name, of in rows.items()
            ],
        )

    def loads(where: str, side: str = "") -> Callable[[Key], bool]:
        return lambda key: key.where == where and key.stage in STAGES and side in ("", key.side)

    def waits(key: Key) -> bool:
        return key.where == "loopback" and key.stage not in STAGES

    parts = [
        *(
            section(f"The {side}", side, loads("loopback", side), "{0.fault}")
            for side in ("producer", "consumer")
        ),
        *(section(f"Over {driver}", "what", loads(driver)) for driver in DRIVERS),
        section("Between two networks, over UCX", "producer", loads(CABLE), "{0.fault}"),
        section(
            "While a request waits",
            "what | the request is",
            waits,
            "{0.side} {0.fault} | {0.stage}",
            "outcome",
        ),
        section(
            "The driver",
            "driver",
            lambda key: key.side == "driver",
            "{0.fault}",
            "{0.stage}, quiet {quiet}",
        ),
        section(
            "Two vLLM engines",
            "what | when | over",
            lambda key: key.where.startswith("vllm"),
            "{0.side} {0.fault} | {0.stage} | {over}",
            "outcome",
        ),
        "## Many times over\n\n"
        + _table(
            "test | what | seconds",
            [f"{name} | {seconds:,.0f}" for name, seconds in sorted(figures.items())],
        ),
    ]
    return "\n".join(parts)


def current_tables(page: str) -> str:
    return page.split(BEGIN)[1].split(END)[0]


def _table(heading: str, lines: Iterable[str]) -> str:
    ruler = " | ".join(["---"] * len(heading.split(" | ")))
    return "".join(f"| {line} |\n" for line in (heading, ruler, *lines))


def main(runs: Sequence[str]) -> None:
    found = read([RESULTS, *map(Path, runs)])
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in found.values()), "utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(before + BEGIN + tables(found.values()) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
