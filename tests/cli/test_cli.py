"""The ``kvferry`` command, as a user runs it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import kvferry
from tests.cli.command import install_drivers, run_kvferry


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with a driver that lacks a library."""
    return install_drivers(tmp_path, "import a_library_that_is_missing\n", needy="Driver")


COMMANDS = (
    *("bench", "check-config", "demo", "doctor", "drivers", "health", "keygen", "plan"),
    "top",
)


def test_summaries_are_whole_at_80_columns() -> None:
    shown = run_kvferry(os.environ | {"COLUMNS": "80"}, "--help").stdout
    assert "..." not in shown.replace("[ARGS]...", "")
    words = " ".join(shown.split())
    for command in COMMANDS:
        helped = run_kvferry(os.environ | {"COLUMNS": "80"}, command, "--help").stdout
        summary = " ".join(helped.split("\n\n")[1].split())
        assert f" {command} {summary}" in words
        assert max(map(len, helped.splitlines())) <= 100


def test_interrupted_command_says_so(tmp_path: Path) -> None:
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    result = run_kvferry(install_drivers(tmp_path, code, interrupting="Driver"), "drivers")
    assert (result.returncode, result.stderr) == (130, "kvferry: interrupted\n")


def test_version_is_printed() -> None:
    assert run_kvferry(dict(os.environ), "--version").stdout.strip() == kvferry.__version__


def test_drivers_are_listed_with_capabilities_or_reason(environment: dict[str, str]) -> None:
    result = run_kvferry(environment, "drivers")
    assert result.returncode == 0
    for part in ("loopback", f"kvferry {kvferry.__version__}", "memory: cpu", "can cancel"):
        assert part in result.stdout
    words = " ".join(result.stdout.split())
    for part in ("needy", "kvferry-fake 1.2", "does not work here", "a_library_that_is_missing"):
        assert part in words


def test_reasons_have_whole_lines_at_80_columns(tmp_path: Path) -> None:
    reason = " ".join(f"word{n}" for n in range(30))
    broken = install_drivers(tmp_path, f"raise ImportError({reason!r})\n", broken="Driver")
    shown = run_kvferry(broken | {"COLUMNS": "80"}, "drivers").stdout
    assert reason in " ".join(shown.split())
    told = [line.rstrip() for line in shown.splitlines() if " word" in line]
    assert all(60 < len(line) <= 80 for line in told[:-1])


def test_drivers_are_listed_as_json(environment: dict[str, str]) -> None:
    records = {
        one["name"]: one for one in json.loads(run_kvferry(environment, "drivers", "--json").stdout)
    }
    loopback, needy = records["loopback"], records["needy"]
    assert loopback["works"]
    assert loopback["reason"] is None
    assert loopback["capabilities"]["memory"] == ["cpu"]
    assert loopback["version"] == kvferry.__version__
    assert not needy["works"]
    assert needy["capabilities"] is None
    assert "a_library_that_is_missing" in needy["reason"]
