"""LMCache's own tests of its NIXL channel, and of its peer-to-peer cache over it, on ours.

The files are those of LMCache's source distribution, of which two names are replaced.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = sorted((Path(sys.prefix) / "source").glob("lmcache-*/tests/v1/distributed"))
DRIVERS = ("loopback", "ucx", "nixl")
REPLACED = {
    "lmcache.v1.distributed.transfer_channel.impl.nixl_impl": "kvferry.integrations.lmcache",
    "NixlTransferChannelContext": "KVFerryContext",
    '"nixl", local_l1_desc': '"kvferry", local_l1_desc',
    'nixl = pytest.importorskip("nixl")': "",
    # The peer-to-peer test asks for a GPU to pin memory, and passes without.
    "if not torch_dev.is_available():": "if False:",
}
NOT_OURS = {
    "test_register_client_keeps_first_and_closes_duplicate": "register_client is NIXL's alone",
    "test_remove_client_closes_and_drops_it": "register_client is NIXL's alone",
    "test_connecting_registers_clients_on_both_sides": "who is asked learns no client",
}
"""Tests of what only the NIXL channel does, and no interface demands."""

pytestmark = pytest.mark.skipif(not SOURCES, reason="LMCache's source distribution is not here")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("file", "passed"),
    [
        ("transfer_channel/test_nixl_impl.py", 10),
        ("l2_adapters/test_p2p_l2_adapter_integration.py", 2),
    ],
)
def test_passes(driver: str, file: str, passed: int, tmp_path: Path) -> None:
    text = (SOURCES[-1] / file).read_text()
    for old, new in REPLACED.items():
        text = text.replace(old, new)
    (tmp_path / "test_theirs.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path)]
    command += [f"--deselect=test_theirs.py::{name}" for name in NOT_OURS]
    environment = os.environ | {"KVFERRY_LMCACHE": json.dumps({"driver": driver})}
    run = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert f"\n{passed} passed" in run.stdout
