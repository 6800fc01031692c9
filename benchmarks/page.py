"""The page of ``make bench`` and its plots, from the figures that are kept.

    python benchmarks/page.py

``benchmarks/everything.py`` measures, keeps what it found in ``build/bench/results.json`` and calls
this. Parts that it could not run stand here as they were measured last, with their date.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import rows

ROOT = Path(__file__).parent.parent
RELEASE = ROOT / "benchmarks/results/release.json"
"""Of the last release, with which ``--against`` compares."""
RESULTS = ROOT / "build/bench/results.json"
LIMITS = ROOT / "benchmarks/limits.toml"
PAGE = ROOT / "build/bench/page.md"
PLOTS = "plots"
"""A folder beside the page."""

BUSY = "**Other work wanted the same cores meanwhile: take these figures as rough.**"

UNPRINTED = ("date", "load", "load after", "source", "extent")
"""Conditions that the page does not list with the others."""

Store = dict[str, dict[str, Any]]
"""By part: ``conditions`` and ``rows`` of the last run that measured something, and ``missing`` or
``failed`` (with its ``date``) where a later one did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A script of this folder.

    Attributes:
        name: of the script, and ``title``: on the page.
        short: arguments with which ``make bench`` runs it, so that all parts together take less
            than about 15 minutes; ``--long`` leaves them out.
        takes_long: whether it takes minutes whatever its arguments, and is run with ``--long`` or
            by its name only. (Where vLLM's worker has a descriptor for each block, one call of it
            takes seconds.)
    """

    name: str
    title: str
    short: tuple[str, ...] = ()
    takes_long: bool = False


PARTS = (
    Part(
        name="planning",
        title="handshake and planning, beside vLLM's worker",
        takes_long=True,
    ),
    Part(
        name="handshake",
        title="a peer known to NIXL, beside vLLM's worker",
        takes_long=True,
    ),
    Part(
        name="request",
        title="one request, from the plan to posted, beside vLLM's worker",
        short=("--seconds", "3"),
    ),
    Part(name="request_profile", title="what one request costs in Python"),
    Part(name="drivers", title="each driver, beside memcpy and NIXL"),
    Part(name="nixl", title="the driver nixl, beside NIXL's own API"),
    Part(name="ucx", title="the driver ucx, beside NIXL on the same transports"),
    Part(
        name="end_to_end", title="real vLLM engines, beside NixlConnector", short=("--rounds", "4")
    ),
    Part(
        name="staging",
        title="staging through host memory, beside the direct way",
        short=("--rounds", "4"),
        takes_long=True,
    ),
    Part(
        name="second_turn",
        title="conversations, with and without tickets for next turns",
        takes_long=True,
    ),
    Part(
        name="early",
        title="pages that cross while prefill computes",
        takes_long=True,
    ),
    Part(name="steps", title="what an engine step costs", short=("--seconds", "6")),
    Part(
        name="channel", title="the side channel, and memory for each peer", short=("--rounds", "5")
    ),
    Part(
        name="cold_start",
        title="a thousand consumer engines at one side channel",
        takes_long=True,
    ),
    Part(name="known_producers", title="what idle producers cost a rank"),
    Part(name="replies", title="what hostile replies cost", short=("--rounds", "2")),
    Part(name="fence", title="what the fence costs"),
    Part(name="proofs", title="what proofs of tickets cost"),
    Part(name="orphaned", title="how long prefill stands still when decode dies"),
    Part(name="gpu", title="VRAM to VRAM"),
)

HEAD = """# Performance

Written by `make bench` (about 15 minutes, no GPU needed) from what it measured; run it where you
mean to use kvferry. `make bench BENCH_OPTIONS=--long` measures all parts, with more rounds. Rates
depend on the machine, so what counts here are the ratios: each is the median of ratios between two
things done by turns in the same rounds, with its interval of 95 % confidence. A target is met if
all of the interval keeps it, missed if none of it does, and otherwise open. `kvferry bench DRIVER`
measures one driver on its own.

Three parts measure beside the NIXL worker of vLLM: of the installed 0.32, and of 0.33, the newest,
where its source is at hand (`make bench` looks in `.cache/vllm-next`). 0.33 has no build for CPUs,
so its worker's own Python code runs from the source distribution, on torch 2.13 (it asks for 2.14)
and on NIXL's own calls or the same stand-in for them as 0.32's. 0.33's worker describes a layer's
blocks by one strided descriptor, 0.32's each block by one of its own: what a handshake costs beside
0.32 says nothing about 0.33.
"""

NAMES = ("loopback", "nixl", "process_vm_readv", "ucx")

MISSING = """## Missing

No figure with an RDMA NIC exists yet: all engines and processes here share one host.
"""

NO_GPU = """No figure with a GPU exists yet either. The code for CUDA memory (registration, zeroing,
the event behind a hold, the conformance suite's `memory = "cuda"`) has not run on a GPU, nor has
`benchmarks/gpu.py`, which measures VRAM to VRAM where there is one.
"""


def load(path: Path) -> Store:
    """What is kept; nothing yet where there is no file."""
    found: Store = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def save(path: Path, store: Store) -> None:
    """Keep it."""
    parts = [f"{_json(name)}: {_entry(entry)}" for name, entry in sorted(store.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _entry(entry: Mapping[str, Any]) -> str:
    """A line for each row."""
    fields = [f"{_json(name)}: {_json(entry[name])}" for name in sorted(entry) if name != "rows"]
    lines = ",\n  ".join(map(_json, entry.get("rows", ())))
    fields += [f'"rows": [\n  {lines}]'] * ("rows" in entry)
    return "{" + ",\n ".join(fields) + "}"


def _json(found: object) -> str:
    return json.dumps(found, ensure_ascii=False)


def remember(store: Store, name: str, entry: Mapping[str, Any]) -> None:
    """Put what came of a run in place of what was there; rows stay until there are others."""
    kept = {} if "rows" in entry else store.get(name, {})
    kept = {key: kept[key] for key in ("conditions", "rows") if key in kept}
    store[name] = kept | dict(entry)


def write(store: Store, path: Path = PAGE) -> None:
    """Write the page and its plots."""
    sections = {name: sections_of(entry) for name, entry in store.items()}
    drawn = _plots(path.parent / PLOTS, sections)
    path.write_text(text(store, drawn), encoding="utf-8")


def sections_of(entry: Mapping[str, Any]) -> dict[str, list[rows.Row]]:
    """A part's rows, by section."""
    found = [rows.row_of(one) for one in entry.get("rows", ())]
    return {key: list(group) for key, group in groupby(found, key=lambda row: row.section)}


def text(store: Store, drawn: Mapping[str, str]) -> str:
    """The page.

    Args:
        store: what is kept.
        drawn: the file of each section that has a plot.
    """
    no_gpu = "" if store.get("gpu", {}).get("rows") else NO_GPU
    absent = "\n".join(_absent(store))
    parts = [HEAD, *_targets(store), *_bodies(store, drawn), MISSING, no_gpu, absent]
    return "\n".join(part.strip("\n") + "\n" for part in parts if part)


def _targets(store: Store) -> Iterator[str]:
    found = [row for part in PARTS for row in _rows(store, part.name) if row.target is not None]
    if not found:
        return
    yield "## Targets\n"
    headings = ("work", "target", "ratio", "95 %", "of", "verdict")
    yield _table(headings, [_target_cells(row) for row in found])
    yield from _reasons([row for row in found if row.met is not True])


def _rows(store: Store, name: str) -> Iterator[rows.Row]:
    for section in sections_of(store.get(name, {})).values():
        yield from section


def _target_cells(row: rows.Row) -> Sequence[str]:
    said = rows.said(row)
    return (
        f"{row.section}: {row.case}",
        row.target or "",
        f"**{rows.number(row.ratio)}**",
        f"{rows.number(row.low)} to {rows.number(row.high)}",
        row.of,
        said if row.met else f"**{said}**",
    )


def _reasons(unmet: Sequence[rows.Row]) -> Iterator[str]:
    """What ``limits.toml`` says about rows that miss their target."""
    limits = _texts().get("limit", [])
    said = [limit for limit in limits if any(_about(limit, row) for row in unmet)]
    rest = [row for row in unmet if not any(_about(limit, row) for limit in limits)]
    items = [f"- *{limit['work']}*: {' '.join(limit['why'].split())}" for limit in said]
    if rest:
        items.append(f"- Not explained yet: {'; '.join(f'{r.section}: {r.case}' for r in rest)}.")
    if items:
        yield "### Why not\n"
        yield "\n".join(items)


def _texts() -> dict[str, Any]:
    """What ``limits.toml`` says."""
    return tomllib.loads(LIMITS.read_text(encoding="utf-8")) if LIMITS.exists() else {}


def _about(limit: Mapping[str, Any], row: rows.Row) -> bool:
    return (
        limit["section"] in row.section
        and limit.get("case", "") in row.case
        and limit.get("of", "") in row.of
    )


def _bodies(store: Store, drawn: Mapping[str, str]) -> Iterator[str]:
    notes = _texts().get("notes", {})
    for part in PARTS:
        entry = store.get(part.name, {})
        if not entry.get("rows"):
            continue
        yield f"## {_heading(part.title)}\n"
        yield f"`python benchmarks/{part.name}.py`. {_conditions(entry['conditions'])}\n"
        if part.name in notes:
            yield f"{' '.join(notes[part.name].split())}\n"
        if why := entry.get("missing") or entry.get("failed"):
            yield f"Not measured again on {entry['date']}: {why}\n"
        for section, found in sections_of(entry).items():
            yield f"### {_heading(section)}\n"
            if section in drawn:
                yield f"![{section}]({drawn[section]})\n"
            yield _section(found)


def _heading(said: str) -> str:
    """With a capital, unless it begins with a name that has none."""
    return said if said.startswith(NAMES) else f"{said[0].upper()}{said[1:]}"


def _conditions(found: Mapping[str, Any]) -> str:
    load = f"load {found['load']} before and {found['load after']} after"
    rest = {key: value for key, value in found.items() if key not in UNPRINTED}
    said = f"{found['date']}, {load}; " + ", ".join(f"{k} {v}" for k, v in rest.items()) + "."
    busy = max(found["load"], found["load after"]) > found.get("cores", 1)
    return f"{said} {BUSY}" if busy else said


def _section(found: Sequence[rows.Row]) -> str:
    """A table with a line for each case, and a column for each thing that ratios are to."""
    ofs = list(dict.fromkeys(row.of for row in found))
    cases: dict[tuple[str, str], dict[str, str]] = {}
    for row in found:
        _, ratio, interval, _, target, measured = rows.cells(row)
        said = f"**{ratio}** ({interval})" + (f", {target}" if target else "")
        cases.setdefault((row.case, measured), {})[row.of] = said
    headings = ["case", *(f"ratio to {of}" for of in ofs), "measured"]
    lines = [
        [case, *(own.get(of, "") for of in ofs), measured]
        for (case, measured), own in cases.items()
    ]
    return _table(headings, lines)


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    every = [headings, ["---"] * len(headings), *lines]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in every)


def _cell(said: str) -> str:
    return said.replace("|", "\\|").replace("\n", " ")


def _absent(store: Store) -> Iterator[str]:
    """The parts that have never been measured."""
    for part in PARTS:
        entry = store.get(part.name, {})
        if not entry.get("rows"):
            why = entry.get("missing") or entry.get("failed") or "it has not been run"
            yield f"- {part.title} (`benchmarks/{part.name}.py`): {why}"


def _plots(
    folder: Path, sections: Mapping[str, Mapping[str, Sequence[rows.Row]]]
) -> dict[str, str]:
    try:
        import plots
    except ModuleNotFoundError:
        print("no plots: matplotlib is not installed (pip install 'kvferry[plot]')")
        return {}
    found: dict[str, str] = plots.draw_all(folder, sections)
    return found


if __name__ == "__main__":
    write(load(RESULTS))
