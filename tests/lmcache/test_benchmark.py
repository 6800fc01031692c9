"""LMCache's own benchmark between two processes, which compares every byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.free_port import free_port
from tests.waiting import eventually

TOOL = [sys.executable, "-m", "kvferry.integrations.lmcache", "tool", "transfer-channel-benchmark"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("driver", ["loopback", "ucx", "nixl"])
def test_a_thousand_objects_are_read_at_once_and_verified(driver: str, tmp_path: Path) -> None:
    port = free_port(3)
    url, control, own = (f"127.0.0.1:{port + n}" for n in range(3))
    common = ["--transfer-channel-type", "kvferry", "--url", url, "--control-url", control]
    common += ["--page-size", "64KB", "--object-size", "64KB", "--num-objects", "1000"]
    common += ["--num-source-objects", "1200"]
    environment = os.environ | {"KVFERRY_LMCACHE": json.dumps({"driver": driver})}
    log = tmp_path / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [*TOOL, "--role", "server", *common, "--buffer-size", "128MB"],
            stdout=file,
            stderr=file,
            env=environment,
        )
    try:
        eventually(lambda: "ready" in log.read_text() or server.poll() is not None)
        client = subprocess.run(
            [*TOOL, "--role", "client", *common, "--listen-url", own, "--verify"],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
    finally:
        server.terminate()
        server.wait()
    assert client.returncode == 0, client.stderr[-4000:]
    assert "verify OK: 1000 objects" in client.stdout
