"""The commands where NIXL and UCX are installed."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvferry.drivers.ucx import library as ucx
from tests.cli.command import install_drivers, run_kvferry


def test_drivers_and_their_ucx_are_reported(tmp_path: Path) -> None:
    taken = ucx.find()
    environment = install_drivers(tmp_path, "")
    ran = run_kvferry(environment, "doctor", "--json")
    found = {each["name"]: each for each in json.loads(ran.stdout)["findings"]}
    assert ran.returncode == 0
    assert re.match(r"1\.\d+\.\d+, .* \(.*nixl.*\): .*tcp \(.*lo", found["UCX of nixl"]["found"])
    assert "nixl_cu12 " in found["driver nixl"]["found"]
    assert str(taken) in found["driver ucx"]["found"]
    rdma = "with RDMA" if taken.rdma else "without RDMA"
    assert f"{ucx.dotted(taken.version)}, {rdma} (" in found["UCX of ucx"]["found"]
    assert "tcp (" in found["UCX of ucx"]["found"]
    listed = json.loads(run_kvferry(environment, "drivers", "--json").stdout)
    libraries = {driver["name"]: driver["library"] for driver in listed}
    assert libraries["ucx"].startswith(str(taken))
    assert "tcp (" in libraries["ucx"]
    assert libraries["nixl"].endswith(", UCX")
    for driver in listed:
        if driver["name"] in ("nixl", "ucx"):
            assert "cpu" in driver["capabilities"]["memory"]
            assert driver["capabilities"]["quiescence"] == "after_disconnect"
