"""The check of a machine with a GPU, rehearsed on CPU memory."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not find_spec("torch"), reason="the check needs torch")

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(1600)
def test_rehearsal_of_all_steps(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.long.gpu", "--rehearse", "--limit=1500"]
    done = subprocess.run([*command, f"--out={tmp_path}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + (tmp_path / "log.txt").read_text(encoding="utf-8")
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "11 of 11 steps passed" in page
    for figure in ("software: what Python", "way from host pages", "loads 20;", "alone, ms"):
        assert figure in page
