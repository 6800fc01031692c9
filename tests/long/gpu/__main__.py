"""Check kvferry on a machine with a GPU, in steps that each run in a process of their own: ``make
gpu``.

    python -m tests.long.gpu [--rehearse] [--only STEP]... [--out FOLDER]

Each step is a run of pytest on a part of the tests here. The machine needs torch, a driver of
kvferry that reaches GPU memory, and no network; ``make gpu-bundle`` collects what else is needed.
``--rehearse`` runs every step on CPU memory and with small sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

HERE = Path(__file__).parent
TOTAL_SECONDS = 590.0  # for all steps together
DRIVERS = ("nixl", "ucx")  # the drivers that are checked
NOTHING, INTERRUPTED = 3, 130  # exit statuses: this machine can run nothing; Ctrl-C
NEEDED = (
    *("torch", "numpy", "msgspec", "zmq", "stevedore", "cryptography", "rich", "typer"),
    *("pytest", "pytest_timeout", "hypothesis"),
)
SUITE_SECONDS, SUITE_START, SUITE_GRACE = 85.0, 5.0, 45.0
"""For each run of the suite: afterwards, no further test begins; and what it may take beyond that
if no test hangs, and if one does."""
TEST_SECONDS = 30
"""How long a test of the suite may take; one that hangs is ended, and the next one begins."""
REHEARSAL_PATIENCE = 4
"""How many times longer a step may take in a rehearsal, which may share its two cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A run of pytest."""

    name: str  # for ``--only``
    title: str  # what it shows
    tests: tuple[str, ...]  # arguments of pytest that choose tests of this folder
    needs: float  # seconds if nothing hangs; with less time left it is skipped
    limit: float  # the seconds after which it is ended
    environment: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1  # among which the tests are shared out


@dataclass(slots=True, kw_only=True)
class Result:
    """A step that has ended, or was skipped: its status, and what its tests have written."""

    step: Step
    status: str = "passed"
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    tables: dict[str, list[Any]] = field(default_factory=dict)


def all_steps(drivers: Sequence[str], suite_seconds: float) -> Iterator[Step]:
    """Yield all steps, which fit into ``TOTAL_SECONDS`` if nothing hangs.

    Their limits together are more: after a step that hangs, those that do not fit any more are
    skipped.
    """
    yield _step("environment", "versions, doctor, CUDA IPC between two processes", 40, 90)
    for driver in drivers:
        title = f"{driver}: loads while the GPU is busy, checked on the device"
        yield _step(f"loads-{driver}", title, 35, 75)
    for name, title in (
        ("zeroing", "zeroes at the right places, without a wait for the default stream"),
        ("staging", "copies between the cache and host pages"),
    ):
        yield _step(name, title, 20, 60, "-k", name, file="kernels")
    for driver in drivers:
        for value, name in (("auto", "auto"), ("y", "on")):
            yield _step(
                f"suite-{driver}-{name}",
                f"the conformance suite of {driver}, zcopy {name}",
                suite_seconds + SUITE_START,
                suite_seconds + SUITE_GRACE,
                f"--timeout={TEST_SECONDS}",
                # Most of a test's time is the start of processes.
                processes=max(1, min(4, (os.cpu_count() or 1) // 4)),
                KVFERRY_GPU_DRIVER=driver,
                KVFERRY_GPU_SECONDS=str(suite_seconds),
                # Whether UCX may read another process's GPU memory by CUDA IPC; by default, where
                # it finds NVLink.
                UCX_CUDA_IPC_ENABLE_GET_ZCOPY=value,
            )
    for driver in drivers:
        title = f"{driver}: speed beside a plain copy"
        yield _step(f"bench-{driver}", title, 35, 75, file="speed", UCX_PROTO_INFO="y")


def _step(
    name: str,
    title: str,
    needs: float,
    limit: float,
    *tests: str,
    file: str = "",
    processes: int = 1,
    **environment: str,
) -> Step:
    """A step on the file of its name, for the driver in its name."""
    first, _, driver = name.partition("-")
    return Step(
        name=name,
        title=title,
        tests=(f"{HERE}/test_{file or first}.py", *tests),
        needs=needs,
        limit=limit,
        environment={"KVFERRY_GPU_DRIVER": driver} | environment,
        processes=processes,
    )


def run_step(step: Step, log: BinaryIO) -> Result:
    """Run a step to its end or its limit, and leave no process behind."""
    log.write(f"\n===== {step.name}: {step.title}\n".encode())
    log.flush()
    began, ended = time.monotonic(), True
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{index}.jsonl" for index in range(step.processes)]
        with contextlib.ExitStack() as stack:
            running = [
                stack.enter_context(_process(step, file, f"{index}/{step.processes}", log))
                for index, file in enumerate(files)
            ]
            for process in running:
                try:
                    process.wait(max(0.0, step.limit - (time.monotonic() - began)))
                except subprocess.TimeoutExpired:
                    ended = False
        texts = [file.read_text(encoding="utf-8") if file.exists() else "" for file in files]
    # The last line of a process that was killed may not be whole.
    whole = [[line for line in text.splitlines(True) if line.endswith("\n")] for text in texts]
    result = judged(step, [[json.loads(line) for line in lines] for lines in whole])
    result.seconds = round(time.monotonic() - began, 1)
    if not ended:
        result.status = "timed out"
        result.problems.insert(0, f"the step was ended after {step.limit:g} s")
    return result


@contextlib.contextmanager
def _process(
    step: Step, file: Path, shard: str, log: BinaryIO
) -> Iterator[subprocess.Popen[bytes]]:
    """Start pytest, and kill it with all processes that it has started when the context ends."""
    command = [sys.executable, "-m", "pytest", *step.tests, "-v", "-c", os.devnull, "--tb=short"]
    command += [f"--rootdir={HERE}", f"--confcutdir={HERE}", "--import-mode=importlib", "-s"]
    command += ["-p", "kvferry.testing.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    own = {
        "KVFERRY_GPU_FILE": str(file),
        "KVFERRY_GPU_SHARD": shard,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the machine may have others, of any version
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        [*command, "-m", "not slow"],
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


def judged(step: Step, lines: Sequence[Sequence[Mapping[str, Any]]]) -> Result:
    """Return the result of a step from the lines that the tests of each process have written."""
    result, counts, tests = Result(step=step), Counter[str](), set()
    for own in lines:
        counts["all"] += sum(line.get("collected", 0) for line in own)
        if not any(line.get("collected") for line in own):
            result.problems.append("pytest collected no tests; the log says why")
        elif "ended" not in own[-1]:
            hung = next((line["began"] for line in reversed(own) if "began" in line), "pytest")
            result.problems.append(f"{hung} did not end")
    for test in (line for own in lines for line in own if "test" in line):
        tests.add(test["test"])
        counts[test["outcome"]] += 1
        if test["outcome"] == "failed":
            result.problems.append(f"{test['test']}: {first_error(test['text'])}")
        elif test["outcome"] == "skipped":
            result.skipped.append(f"{test['test']} was skipped: {test['text']}")
        for title, row in test["tables"]:
            result.tables.setdefault(title, []).append(row)
    if counts["all"] > 1 or not result.tables:
        row = {name: counts[name] for name in ("all", "passed", "failed", "skipped")}
        result.tables["tests"] = [row | {"not run": max(0, counts["all"] - len(tests))}]
    if result.problems:
        result.status = "failed"
    return result


def first_error(text: str) -> str:
    """Return the line of a failure that says most: the first one that pytest marks with an E."""
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return (marked or text.splitlines() or ["no text"])[0][:300]


def say(text: str, end: str = "\n") -> None:
    """Show the progress."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


# The results.


def summary(results: Sequence[Result], steps: Sequence[Step]) -> str:
    """Return one line: how many steps passed, and which did not."""
    passed = sum(result.status == "passed" for result in results)
    parts = [f"{passed} of {len(steps)} steps passed"]
    failed = [r.step.name for r in results if r.status in ("failed", "timed out")]
    skipped = [f"{r.step.name} ({r.problems[0]})" for r in results if r.status == "skipped"]
    skipped += [step.name for step in steps[len(results) :]]
    parts += [f"failed: {', '.join(failed)}"] * bool(failed)
    return "; ".join(parts + [f"not run: {', '.join(skipped)}"] * bool(skipped))


def write(file: Path, where: str, results: Sequence[Result], steps: Sequence[Step]) -> None:
    """Write the page of results."""
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    page = [f"# kvferry {version('kvferry')} on {where}\n", f"{date}. {summary(results, steps)}.\n"]
    heads = [
        {"step": r.step.name, "status": r.status, "s": r.seconds, "shows": r.step.title}
        for r in results
    ]
    page += _table(heads)
    for result in results:
        page.append(f"\n## {result.step.name}: {result.status}\n")
        page += [f"- {_cell(each)}" for each in (*result.problems[:40], *result.skipped)]
        for title, rows in result.tables.items():
            page += [f"\n{title}:\n", *_table(rows)]
    file.write_text("\n".join(page) + "\n", encoding="utf-8")


def _table(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for line in (columns, ["---"] * len(columns), *(map(row.get, columns) for row in rows)):
        yield f"| {' | '.join(_cell('' if cell is None else cell) for cell in line)} |"


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def main() -> int:
    """Run the check, and return its exit status."""
    options = _options()
    if why_not := _why_not(options.rehearse):
        say(f"{why_not}: nothing was checked")
        return NOTHING
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _check(options)
    except KeyboardInterrupt:
        say("interrupted; what has ended is in the results")
        return INTERRUPTED


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _why_not(rehearse: bool) -> str:
    """Return why nothing can be checked here; empty if something can."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        return (
            f"Python {sys.version.split()[0]} lacks {', '.join(missing)} (`make gpu-bundle` on a "
            "machine with a network collects everything except torch and numpy)"
        )
    try:
        version("kvferry")
    except PackageNotFoundError:
        return "kvferry is neither installed here (`pip install -e .`) nor in a bundle"
    from tests.long.gpu.device import load_torch

    torch = load_torch()
    if not rehearse and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU here (--rehearse runs on CPU memory)"
    return ""


def _check(options: argparse.Namespace) -> int:
    from tests.long.gpu.device import Device, load_torch

    suite_seconds = 3.0 if options.rehearse else SUITE_SECONDS
    steps = list(all_steps(options.driver or DRIVERS, suite_seconds))
    if options.only:
        steps = [step for step in steps if step.name.startswith(tuple(options.only))]
    if not steps:
        say("no step has such a name")
        return NOTHING
    near, far, where = "cpu", "cpu", "CPU memory, as a rehearsal"
    if not options.rehearse:
        near, far = "cuda:0", f"cuda:{load_torch().cuda.device_count() - 1}"
        where = Device(near).describe()
    os.environ |= {"KVFERRY_GPU_NEAR": near, "KVFERRY_GPU_FAR": far}
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    say(f"{len(steps)} steps on {where}; results and log: {out}")
    end = time.monotonic() + options.limit
    with (out / "log.txt").open("wb") as log:
        for index, step in enumerate(steps):
            write(out / "page.md", where, results, steps)
            left = max(0.0, end - time.monotonic())
            say(f"{index + 1:2}/{len(steps)} {step.name} ({step.title}) ... ", end="")
            if left < step.needs:
                why = f"it needs {step.needs:.0f} s, and {left:.0f} s are left"
                results.append(Result(step=step, status="skipped", problems=[why]))
            else:
                limit = step.limit * (REHEARSAL_PATIENCE if options.rehearse else 1)
                results.append(run_step(replace(step, limit=min(limit, left)), log))
            say(f"{results[-1].status}, {results[-1].seconds:.0f} s")
            for problem in results[-1].problems[:5]:
                say(f"      {problem[:300]}")
    write(out / "page.md", where, results, steps)
    say(summary(results, steps))
    return int(any(result.status != "passed" for result in results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.long.gpu", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="on CPU memory, with small sizes")
    parser.add_argument(
        "--only",
        action="append",
        metavar="STEP",
        help="a step, or how the names of some begin",
    )
    parser.add_argument("--driver", action="append", help="default: nixl and ucx")
    parser.add_argument(
        "--limit", type=float, default=TOTAL_SECONDS, metavar="S", help="for all steps together"
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"), help="for the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
