"""The commands with NIXL installed."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.cli.command import install_drivers, run_kvferry
from tests.cli.test_bench import SMALL_GRID
from tests.cli.test_doctor import findings_of


def test_ucx_of_nixl_is_reported(tmp_path: Path) -> None:
    environment = install_drivers(tmp_path, "")
    ran = run_kvferry(environment, "doctor", "--json")
    found = findings_of(ran)
    assert ran.returncode == 0
    assert re.match(r"1\.\d+\.\d+, .* \(.*nixl.*\): .*tcp \(.*lo", found["UCX of nixl"]["found"])
    assert "nixl_cu12 " in found["driver nixl"]["found"]
    assert run_kvferry(environment, "drivers").returncode == 0


def test_bench_over_nixl(tmp_path: Path) -> None:
    threads = ("--option", 'backend_options={"num_threads": 1}')
    environment = install_drivers(tmp_path, "")
    ran = run_kvferry(environment, "bench", "nixl", *SMALL_GRID, "--json", *threads)
    assert ran.returncode == 0, ran.stderr
    record = json.loads(ran.stdout)
    assert "UCX" in record["conditions"]["library"]
    assert len(record["results"]) == 5
