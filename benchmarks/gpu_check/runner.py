"""Run steps, each in a process of its own with a time limit, and leave no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from .outcome import Outcome, Settings, Stopwatch

TAIL_BYTES = 3000
"""How much of a step's output goes into the results; the log has all of it."""

Status = Literal["passed", "failed", "timed out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the check.

    Attributes:
        name: the name for ``--only``.
        title: what the step shows.
        module: the module of this package whose function ``run`` is the step.
        needs: how many seconds it may take if nothing hangs; with less time left it is skipped.
        limit: after how many seconds it is ended.
        settings: what it is told.
        environment: variables for its process.
    """

    name: str
    title: str
    module: str
    needs: float
    limit: float
    settings: Settings
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A step that has ended.

    Attributes:
        step: the step.
        status: how it ended.
        seconds: how long it took.
        outcome: what it found.
        tail: the end of what it printed.
    """

    step: Step
    status: Status
    seconds: float
    outcome: Outcome
    tail: str

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "name": self.step.name,
            "title": self.step.title,
            "status": self.status,
            "seconds": round(self.seconds, 1),
            "limit": self.step.limit,
            "environment": dict(self.step.environment),
            **asdict(self.outcome),
            "log tail": self.tail,
        }


def run_step(step: Step, log: BinaryIO) -> StepResult:
    """Run a step to its end or its time limit.

    Args:
        step: the step.
        log: what the step and its processes print is appended here.
    """
    log.write(f"\n===== {step.name}: {step.title}\n".encode())
    log.flush()
    start, watch = log.tell(), Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcome.json"
        with _process(step, file, log) as process:
            try:
                ended = process.wait(step.limit)
            except subprocess.TimeoutExpired:
                ended = None
        outcome = _outcome(file, ended)
    status: Status = "failed" if outcome.problems else "passed"
    if ended is None:
        status = "timed out"
        outcome.problems.insert(0, f"the step was ended after {step.limit:g} s")
    return StepResult(
        step=step,
        status=status,
        seconds=watch.seconds,
        outcome=outcome,
        tail=_tail(Path(log.name), start),
    )


@contextlib.contextmanager
def _process(step: Step, file: Path, log: BinaryIO) -> Iterator[subprocess.Popen[bytes]]:
    """Start a step, and kill it with all processes that it has started when the context ends."""
    settings = json.dumps(asdict(step.settings))
    process = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.step", step.module, settings, str(file)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(step.environment),
        start_new_session=True,  # so that they are one process group
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _outcome(file: Path, ended: int | None) -> Outcome:
    try:
        return Outcome.read(file)
    except (OSError, ValueError):
        if ended is None:
            return Outcome()
        return Outcome(problems=[f"the step's process ended with status {ended}; see the log"])


def _tail(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")
