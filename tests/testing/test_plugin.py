"""The pytest plugin adds a marker to every pytest and imports nothing that takes time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvferry.testing

IMPORT_CHECK = """
import sys
import pytest
import kvferry.testing.plugin
heavy = {"hypothesis", "numpy", "kvferry.core.transport"} & set(sys.modules)
sys.exit(f"imports {heavy}" if heavy else 0)
"""

# A driver that moves nothing: the failures of the suite must show the values that differ.
MODULE_CODE = """
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing import TransferTests

class Idle(LoopbackTransport):
    def read(self, peer, copies, notify=None):
        return super().read(peer, type(copies)(
            local=copies.local[:0], remote=copies.remote[:0], nbytes=copies.nbytes[:0], segments=()
        ), notify)

class TestIdle(TransferTests):
    factory = "test_idle:Idle"
"""


def run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=own,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_plugin_imports_nothing_heavy() -> None:
    result = run("-c", IMPORT_CHECK)
    assert result.returncode == 0, result.stderr


def test_every_exported_name_exists() -> None:
    for name in kvferry.testing.__all__:
        assert getattr(kvferry.testing, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = kvferry.testing.nothing_of_this_name


def test_suite_works_outside_this_repository(tmp_path: Path) -> None:
    (tmp_path / "test_idle.py").write_text(MODULE_CODE)
    # Strict: the plugin has to have registered the marker of the slow test.
    options = ["-q", "-p", "no:asyncio", "-p", "no:cacheprovider", "--strict-markers"]
    test = "test_idle.py::TestIdle::test_a_batch_moves_its_bytes_and_no_others[one copy]"
    result = run("-m", "pytest", *options, test, cwd=tmp_path)
    assert "1 failed" in result.stdout, result.stdout
    assert "this side's memory" in result.stdout
