"""The UCX that is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry.drivers.ucx import library
from kvferry.drivers.ucx.library import find
from tests.drivers.ucx.test_library import LOAD_SCRIPT


def test_installed_library_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = find()
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOAD_SCRIPT, found.path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "True False\n"
    assert found.version >= library.LOWEST
    assert find(found.path).version == found.version
