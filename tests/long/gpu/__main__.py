"""Check kvferry on a machine with a GPU: ``make gpu``.

    python -m tests.long.gpu [--rehearse] [--only STEP]... [--driver NAME]... [--out FOLDER]

Each step is a run of pytest on a file here, in processes of its own, which are killed at its limit.
The machine needs torch, a driver of kvferry that reaches GPU memory, and no network; ``make
gpu-bundle`` collects what else is needed. ``--rehearse`` runs every step on CPU memory and with
small sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

HERE = Path(__file__).parent
TOTAL_SECONDS = 590.0  # for all steps together: what does not fit any more is not run
DRIVERS = ("nixl", "ucx")
NOTHING, INTERRUPTED = 3, 130  # exit statuses: this machine can run nothing; Ctrl-C
NEEDED = (
    *("torch", "numpy", "msgspec", "zmq", "stevedore", "cryptography", "rich", "typer"),
    *("pytest", "pytest_timeout", "hypothesis"),
)
SUITE_SECONDS, SUITE_GRACE = 85.0, 45.0
"""For each run of the suite: afterwards, no further test begins; and what the last may take."""
PATIENCE = 4  # how many times longer a step may take in a rehearsal, which may share its cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A run of pytest on a file; its tests are shared out among ``processes``."""

    name: str
    file: str
    seconds: float  # after which it is ended
    only: str = ""  # which of the file's tests: pytest's ``-k``
    environment: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1


def all_steps(drivers: Iterable[str], suite_seconds: float) -> Iterator[Step]:
    """All steps, what matters most first."""
    each = [(driver, {"KVFERRY_GPU_DRIVER": driver}) for driver in drivers]
    yield Step(name="environment", file="environment", seconds=90)
    for driver, own in each:
        yield Step(name=f"loads-{driver}", file="loads", seconds=75, environment=own)
    for name in ("zeroing", "staging"):
        yield Step(name=name, file="kernels", seconds=60, only=name)
    for driver, own in each:
        # Whether UCX may read another process's GPU memory by CUDA IPC; by default, where it finds
        # NVLink.
        for value, name in (("auto", "auto"), ("y", "on")):
            more = {"KVFERRY_GPU_SECONDS": f"{suite_seconds}"}
            more["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = value
            yield Step(
                name=f"suite-{driver}-{name}",
                file="suite",
                seconds=suite_seconds + SUITE_GRACE,
                environment=own | more,
                # Most of a test's time is the start of processes.
                processes=max(1, min(4, (os.cpu_count() or 1) // 4)),
            )
    for driver, own in each:
        shown = own | {"UCX_PROTO_INFO": "y"}
        yield Step(name=f"bench-{driver}", file="speed", seconds=75, environment=shown)


def run_step(step: Step, seconds: float, log: BinaryIO) -> str:
    """Run a step to its end, or for so many seconds, and leave no process behind.

    Returns what became of it: ``passed``, ``failed``, or ``did not end``. The tests write their
    figures and failures onto the page (``conftest``).
    """
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        shards = [f"{index}/{step.processes}" for index in range(step.processes)]
        running = [stack.enter_context(_process(step, shard, log)) for shard in shards]
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        if None in (statuses := [process.poll() for process in running]):
            return "did not end; the log names the test"
        return "failed" if any(statuses) else "passed"


@contextlib.contextmanager
def _process(step: Step, shard: str, log: BinaryIO) -> Iterator[subprocess.Popen[bytes]]:
    """Start pytest, and kill it with all processes that it has started when the context ends."""
    command = [sys.executable, "-m", "pytest", f"{HERE}/test_{step.file}.py", "-k", step.only]
    command += [f"--rootdir={HERE}", f"--confcutdir={HERE}", "--import-mode=importlib", "-s", "-v"]
    command += ["-p", "kvferry.testing.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "-m", "not slow", "--tb=short"]
    own = {
        "KVFERRY_GPU_SHARD": shard,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the machine may have others, of any version
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        [*command, "--timeout=30"] if step.file == "suite" else command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, **own, **step.environment},
        start_new_session=True,  # so that they are one process group
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def say(text: str, page: Path | None = None) -> None:
    """Show the progress, and write it onto the page, if there is one."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    if page is not None:
        with page.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")


def main() -> int:
    """Run the check, and return its exit status."""
    options = _options()
    missing = [name for name in NEEDED if find_spec(name) is None]
    missing += ["kvferry"] * (not list(distributions(name="kvferry")))
    if missing:
        say(f"this Python lacks {', '.join(missing)}: nothing was checked (`make gpu-bundle` on a")
        say("machine with a network collects everything except torch and numpy)")
        return NOTHING
    from tests.long.gpu.device import Device, load_torch

    torch = load_torch()
    if not options.rehearse and not torch.cuda.is_available():
        say(f"torch {torch.__version__} sees no GPU here, so nothing was checked: see --rehearse")
        return NOTHING
    near, far, where = "cpu", "cpu", "CPU memory, as a rehearsal"
    if not options.rehearse:
        near, far = "cuda:0", f"cuda:{torch.cuda.device_count() - 1}"
        where = Device(near).describe()
    os.environ |= {"KVFERRY_GPU_NEAR": near, "KVFERRY_GPU_FAR": far}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _check(options, where)
    except KeyboardInterrupt:
        say("interrupted; what has ended is on the page")
        return INTERRUPTED


def _check(options: argparse.Namespace, where: str) -> int:
    every = all_steps(options.driver or DRIVERS, 3.0 if options.rehearse else SUITE_SECONDS)
    steps = [step for step in every if step.name.startswith(tuple(options.only or [""]))]
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    page, passed = out / "page.md", 0
    page.write_text(f"# kvferry on {where}\n", encoding="utf-8")
    os.environ["KVFERRY_GPU_PAGE"] = str(page.resolve())
    end = time.monotonic() + options.limit
    with (out / "log.txt").open("wb") as log:
        for step in steps:
            say(f"\n## {step.name}\n", page)
            began = time.monotonic()
            found = "not run, for lack of time"
            if began < end:
                limit = step.seconds * (PATIENCE if options.rehearse else 1)
                found = run_step(step, min(limit, end - began), log)
            passed += found == "passed"
            say(f"- {found}, {time.monotonic() - began:.0f} s", page)
    say(f"\n{passed} of {len(steps)} steps passed.", page)
    say(f"Page and log: {out}")
    return int(passed < len(steps) or not steps)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.long.gpu", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="on CPU memory, with small sizes")
    parser.add_argument("--only", action="append", help="a step, or how the names of some begin")
    parser.add_argument("--driver", action="append", help="default: nixl and ucx")
    parser.add_argument("--limit", type=float, default=TOTAL_SECONDS, help="seconds for all steps")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"), help="for the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
