"""The UCX that is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.drivers.ucx import library
from kvferry.drivers.ucx.library import find
from tests.cli.command import install_drivers, run_kvferry
from tests.cli.test_doctor import findings_of
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


def test_ucx_is_reported_by_doctor_and_drivers(tmp_path: Path) -> None:
    taken = library.find()
    environment = install_drivers(tmp_path, "")
    found = findings_of(run_kvferry(environment, "doctor", "--json"))
    assert str(taken) in found["driver ucx"]["found"]
    rdma = "with RDMA" if taken.rdma else "without RDMA"
    version = library.dotted(taken.version)
    assert f"{version}, {rdma} (" in found["UCX of ucx"]["found"]
    assert "tcp (" in found["UCX of ucx"]["found"]
    listed = json.loads(run_kvferry(environment, "drivers", "--json").stdout)
    (said,) = (driver["library"] for driver in listed if driver["name"] == "ucx")
    assert said.startswith(str(taken))
    assert "tcp (" in said
