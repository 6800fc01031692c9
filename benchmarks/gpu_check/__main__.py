"""Run all steps, show the progress, and write the results after each."""

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from .defaults import DRIVERS, OVER_TCP, SUITE_SECONDS, TOTAL_SECONDS

NOTHING, INTERRUPTED = 3, 130
"""Exit statuses: this machine can run nothing; Ctrl-C."""

NEEDED = ("torch", "numpy", "msgspec", "zmq", "stevedore", "cryptography", "rich", "typer")
NEEDED_BY_SUITE = ("pytest", "pytest_timeout", "hypothesis")


def main() -> int:
    """Run the check, and return its exit status."""
    options = _options()
    why_not = _why_not(options)
    if why_not:
        print(f"{why_not}: nothing was checked", flush=True)
        return NOTHING
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _check(options)
    except KeyboardInterrupt:
        print("interrupted; what has ended is in the results", flush=True)
        return INTERRUPTED


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _why_not(options: argparse.Namespace) -> str:
    """Return why nothing can be checked here; empty if something can."""
    missing = [name for name in (*NEEDED, *NEEDED_BY_SUITE) if find_spec(name) is None]
    if missing:
        return (
            f"Python {sys.version.split()[0]} lacks {', '.join(missing)} (`make gpu-bundle` on a "
            "machine with a network collects everything except torch and numpy)"
        )
    try:
        version("kvferry")
    except PackageNotFoundError:
        return "kvferry is neither installed here (`pip install -e .`) nor in a bundle"
    from .devices import load_torch

    torch = load_torch()
    if not options.rehearse and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU here (--rehearse runs on CPU memory)"
    return ""


def _check(options: argparse.Namespace) -> int:
    from .devices import Device
    from .outcome import Stopwatch
    from .report import RunReport
    from .runner import StepResult, run_step
    from .steps import all_steps, named_steps

    steps = all_steps(
        rehearse=options.rehearse,
        drivers=options.driver or DRIVERS,
        suite_seconds=options.suite_seconds,
    )
    if options.only:
        over_tcp = options.driver or OVER_TCP
        steps += named_steps(rehearse=options.rehearse, drivers=over_tcp)
        steps = [step for step in steps if step.name.startswith(tuple(options.only))]
    device = Device("cpu" if options.rehearse else "cuda:0").describe()
    options.out.mkdir(parents=True, exist_ok=True)
    if not steps:
        print("no step has such a name", flush=True)
        return NOTHING
    results, skipped, whole = list[StepResult](), dict[str, str](), Stopwatch()
    report = RunReport(
        device=device,
        rehearsal=options.rehearse,
        steps=steps,
        results=results,
        skipped=skipped,
    )
    report.write(options.out)
    print(f"{len(steps)} steps on {device}; results and log: {options.out}", flush=True)
    with (options.out / "log.txt").open("wb") as log:
        for index, step in enumerate(steps):
            left = max(0.0, options.limit - whole.seconds)
            print(f"{index + 1:2}/{len(steps)} {step.name} ({step.title}) ... ", end="", flush=True)
            if left < step.needs:
                skipped[step.name] = f"it needs {step.needs:.0f} s, and {left:.0f} s are left"
                print(f"skipped: {skipped[step.name]}", flush=True)
                continue
            results.append(run_step(replace(step, limit=min(step.limit, left)), log))
            print(f"{results[-1].status}, {results[-1].seconds:.0f} s", flush=True)
            for problem in results[-1].outcome.problems[:5]:
                print(f"      {problem[:300]}", flush=True)
            report.write(options.out)
    report.write(options.out)
    print(f"{report.summary()}; {whole.seconds:.0f} s in all", flush=True)
    return int(bool(report.failed or report.missing))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="on CPU memory, with small sizes")
    parser.add_argument(
        "--only",
        action="append",
        metavar="STEP",
        help="a step, or how the names of some begin; staged-nixl runs only so",
    )
    parser.add_argument("--driver", action="append", help="default: nixl and ucx")
    parser.add_argument(
        "--suite-seconds",
        type=float,
        default=SUITE_SECONDS,
        metavar="S",
        help="for each run of the suite",
    )
    parser.add_argument(
        "--limit", type=float, default=TOTAL_SECONDS, metavar="S", help="for all steps together"
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"), help="for the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
