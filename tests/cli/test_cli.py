"""The ``kvferry`` command, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvferry

HEAVY = ("numpy", "torch", "vllm", "stevedore", "zmq", "kvferry.core.transport.registry")


def kvferry_command(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from kvferry.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(path or ""), "COLUMNS": "200"},
    )


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder with a distribution whose driver lacks a library."""
    info = tmp_path / "kvferry_fake-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvferry-fake\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[kvferry.drivers]\nneedy = fake_needy:Driver\n")
    (tmp_path / "fake_needy.py").write_text("import a_library_that_is_missing\n")
    return tmp_path


def test_help_lists_the_commands() -> None:
    result = kvferry_command("--help")
    assert result.returncode == 0
    assert "drivers" in result.stdout
    assert "demo" in result.stdout
    assert "plan" in result.stdout


def test_version() -> None:
    assert kvferry_command("--version").stdout.strip() == kvferry.__version__


def test_lists_drivers_with_what_they_can_do_and_why_not(broken: Path) -> None:
    result = kvferry_command("drivers", path=broken)
    assert result.returncode == 0
    for part in ("loopback", f"kvferry {kvferry.__version__}", "read, write", "can cancel"):
        assert part in result.stdout
    words = " ".join(result.stdout.replace("│", " ").split())
    for part in ("needy", "kvferry-fake 1.2", "does not work here", "a_library_that_is_missing"):
        assert part in words


def test_lists_drivers_as_json(broken: Path) -> None:
    records = {
        one["name"]: one
        for one in json.loads(kvferry_command("drivers", "--json", path=broken).stdout)
    }
    loopback, needy = records["loopback"], records["needy"]
    assert loopback["works"]
    assert loopback["reason"] is None
    assert loopback["capabilities"]["memory"] == ["cpu"]
    assert loopback["version"] == kvferry.__version__
    assert not needy["works"]
    assert needy["capabilities"] is None
    assert "a_library_that_is_missing" in needy["reason"]


def test_the_command_line_itself_is_light() -> None:
    code = (
        "import sys\n"
        "import kvferry.cli\n"
        f"loaded = [name for name in {HEAVY} if name in sys.modules]\n"
        "sys.exit(str(loaded) if loaded else 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")
