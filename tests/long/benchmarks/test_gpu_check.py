"""The check of a machine with a GPU, rehearsed on CPU memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

pytestmark = pytest.mark.skipif(not find_spec("torch"), reason="the check needs torch")

ROOT = Path(__file__).parents[3]
CHECK = (sys.executable, "-m", "tests.long.gpu", "--rehearse")
MARK = "KVFERRY_TEST_MARK"


def check(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the check to its end, and return its results by step."""
    command = [*CHECK, *arguments, "--out", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + (folder / "log.txt").read_text(encoding="utf-8")
    record = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return {each["step"]["name"]: each for each in record["steps"]}


def marked(mark: str) -> list[int]:
    """Return the processes other than this one that have a variable in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or belongs to somebody else
            continue
    return [pid for pid in found if pid != os.getpid()]


@pytest.mark.timeout(1600)
def test_rehearsal_of_all_steps(tmp_path: Path) -> None:
    found = check(tmp_path, "--limit", "1500")
    assert len(found) == 15
    assert found["zeroing"]["tables"]["zeroing"][0]["spans"] > 0
    ways = [(row["way"], row["memory"]) for row in found["staging"]["tables"]["staging"]]
    assert ways == [("to host pages", "unpinned"), ("from host pages", "unpinned")]
    [kill] = found["quiescence-ucx"]["tables"]["8,192 copies, peer killed"]
    assert kill["state"] == "FAILED"


@pytest.mark.timeout(600)
def test_rehearsal_over_tcp_has_staged_beside_direct(tmp_path: Path) -> None:
    found = check(tmp_path, "--only", "staged")
    rows = found["staged-nixl"]["tables"]["over_tcp, nixl"]
    assert all(row["speed of staged loads to direct"] > 0 for row in rows)
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert "tcp/" in log
    assert "sysv/" not in log
    assert "cma/" not in log


def test_interrupt_leaves_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    value = uuid4().hex
    monkeypatch.setenv(MARK, value)
    command = [*CHECK, "--driver", "loopback", "--only", "loads", "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with process:
        while len(marked(value)) < 3:  # the check, the step, and the producer
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate()
    assert process.returncode == 130
    assert "interrupted" in said
    while marked(value):  # killed processes take a moment to end
        time.sleep(0.01)
