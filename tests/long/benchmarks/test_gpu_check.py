"""The check of a machine with a GPU, rehearsed on CPU memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import pytest

pytestmark = pytest.mark.skipif(not find_spec("torch"), reason="the check needs torch")

ROOT = Path(__file__).parents[3]
CHECK = (sys.executable, "-m", "tests.long.gpu", "--rehearse")
MARK = "KVFERRY_TEST_MARK"


def check(folder: Path, *arguments: str) -> dict[str, str]:
    """Run the check to its end, and return its results by step, as they stand on the page."""
    command = [*CHECK, *arguments, "--out", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + (folder / "log.txt").read_text(encoding="utf-8")
    steps = (folder / "page.md").read_text(encoding="utf-8").split("\n## ")[1:]
    return {name: text for name, _, text in (each.partition(": ") for each in steps)}


def column(text: str, title: str) -> list[str]:
    """Return the cells of the column with a title."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    [head] = [line for line in lines if f" {title} " in line]
    rows = lines[lines.index(head) + 2 :]
    return [row[head.index(f" {title} ")].strip() for row in rows if len(row) == len(head)]


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
    assert len(found) == 11
    assert int(column(found["zeroing"], "spans")[0]) > 0
    assert column(found["staging"], "way") == ["to host pages", "from host pages"]
    assert column(found["staging"], "memory") == ["unpinned"] * 2
    assert int(column(found["loads-ucx"], "loads")[0]) > 0


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
