"""The ``kvferry`` command, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvferry
from tests.cli.command import install_drivers, run_kvferry

HEAVY_MODULES = ("numpy", "torch", "vllm", "stevedore", "zmq", "kvferry.core.transport.registry")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with a driver that lacks a library."""
    return install_drivers(tmp_path, "import a_library_that_is_missing\n", needy="Driver")


def test_help_lists_commands() -> None:
    result = run_kvferry(dict(os.environ), "--help")
    assert result.returncode == 0
    assert "drivers" in result.stdout
    assert "demo" in result.stdout
    assert "plan" in result.stdout


def test_version_is_printed() -> None:
    assert run_kvferry(dict(os.environ), "--version").stdout.strip() == kvferry.__version__


def test_drivers_are_listed_with_capabilities_or_reason(environment: dict[str, str]) -> None:
    result = run_kvferry(environment, "drivers")
    assert result.returncode == 0
    for part in ("loopback", f"kvferry {kvferry.__version__}", "read, write", "can cancel"):
        assert part in result.stdout
    words = " ".join(result.stdout.replace("│", " ").split())
    for part in ("needy", "kvferry-fake 1.2", "does not work here", "a_library_that_is_missing"):
        assert part in words


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


def test_importing_the_command_line_loads_no_heavy_module() -> None:
    code = (
        "import sys\n"
        "import kvferry.cli.commands\n"
        f"loaded = [name for name in {HEAVY_MODULES} if name in sys.modules]\n"
        "sys.exit(str(loaded) if loaded else 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")
