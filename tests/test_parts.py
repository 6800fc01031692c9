"""``tests/parts.py`` runs parts of ``make test`` and says how long each took."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parts import ROOT

MAKE = """#!/bin/sh
echo "made $2"
[ "$2" != types ]
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment whose ``make`` fails for one part."""
    program = tmp_path / "make"
    program.write_text(MAKE)
    program.chmod(0o755)
    return os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tests/parts.py", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_all_parts_run_and_one_that_fails_shows_its_output(environment: dict[str, str]) -> None:
    ran = run(environment, "lint,docs,types", "unit")
    assert ran.returncode == 1, ran.stderr
    lines = ran.stdout.splitlines()
    made = {line for line in lines if line.startswith("made")}
    assert made == {"made lint", "made types", "made unit"}
    assert [line.split()[::2] for line in lines[-4:]] == [
        ["lint", "passed"],
        ["docs", "passed"],
        ["types", "FAILED"],
        ["unit", "passed"],
    ]


def test_parts_that_pass_give_status_0(environment: dict[str, str]) -> None:
    ran = run(environment, "lint", "unit")
    assert ran.returncode == 0, ran.stderr
    assert "FAILED" not in ran.stdout
