"""The conformance suite in a process of pytest: counts, and the text of each failure."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import suite_recorder
from .outcome import Outcome, Settings, Stopwatch

SUITE = Path(__file__).with_name("suite.py")
TEST_SECONDS = 30
"""How long a test may take; a test that hangs is ended, and the next one begins."""
GRACE_SECONDS = 35.0
"""How long after the step's budget pytest is killed, if a test hangs in a native call."""

CORES_PER_SHARD, MOST_SHARDS = 4, 4
"""Most of a test's time is the start of processes, so the tests are shared out among several
processes of pytest where there are cores for them."""


def run(settings: Settings) -> Outcome:
    """Run the suite within the budget of seconds."""
    shards = max(1, min(MOST_SHARDS, (os.cpu_count() or 1) // CORES_PER_SHARD))
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{index}.jsonl" for index in range(shards)]
        running = [
            subprocess.Popen(_command(), env=_environment(settings, file, f"{index}/{shards}"))
            for index, file in enumerate(files)
        ]
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, settings.seconds + GRACE_SECONDS - watch.seconds))
            process.kill()
            process.wait()
        texts = [file.read_text(encoding="utf-8") if file.exists() else "" for file in files]
    return _judged([[json.loads(line) for line in text.splitlines()] for text in texts])


def _command() -> list[str]:
    plugins = ("kvferry.testing.plugin", "pytest_timeout", suite_recorder.__name__)
    command = [sys.executable, "-m", "pytest", str(SUITE), "-q", "-c", os.devnull]
    command += [f"--rootdir={SUITE.parent}", "--import-mode=importlib", "--tb=short"]
    command += [argument for name in plugins for argument in ("-p", name)]
    return [*command, "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}", "-m", "not slow"]


def _environment(settings: Settings, file: Path, shard: str) -> Mapping[str, str]:
    return os.environ | {
        "KVFERRY_CHECK_DRIVER": settings.driver,
        "KVFERRY_CHECK_MEMORY": settings.near,
        suite_recorder.FILE: str(file),
        suite_recorder.SECONDS: str(settings.seconds),
        suite_recorder.SHARD: shard,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the machine may have others, of any version
    }


def _judged(shards: Sequence[Sequence[Mapping[str, Any]]]) -> Outcome:
    outcome, results = Outcome(), [line for lines in shards for line in lines if "test" in line]
    counts = Counter(line["outcome"] for line in results)
    collected = sum(line.get("collected", 0) for lines in shards for line in lines)
    if not all(any("collected" in line for line in lines) for lines in shards):
        outcome.problems.append("pytest collected no tests; the log says why")
    outcome.problems += [f"{name} did not end" for name in filter(None, map(_hung, shards))]
    outcome.problems += [
        f"{line['test']}: {_first_error(line['text'])}"
        for line in results
        if line["outcome"] == "failed"
    ]
    outcome.tables["tests"] = [
        {
            "all": collected,
            "passed": counts["passed"],
            "failed": counts["failed"],
            "skipped": counts["skipped"],
            "not run": max(0, collected - len({line["test"] for line in results})),
        }
    ]
    outcome.details["tests"] = results
    return outcome


def _hung(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the test that began last, if its process was killed or crashed; else nothing."""
    if not lines or "ended" in lines[-1]:
        return ""
    return next((line["began"] for line in reversed(lines) if "began" in line), "")


def _first_error(text: str) -> str:
    """Return the line of a failure that says most: the first one that pytest marks with an E."""
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return (marked or text.splitlines() or ["no text"])[0][:300]
