"""What cannot work is refused when an engine is launched, before its model is loaded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.engines import ENVIRONMENT, ROOT

LAUNCH = """
import sys
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

def launch(**extra):
    transfer = KVTransferConfig(
        kv_connector="KVFerryConnector",
        kv_connector_module_path="kvferry.integrations.vllm",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )
    arguments = AsyncEngineArgs(
        model=sys.argv[1], enforce_eager=True, dtype="float32", kv_transfer_config=transfer
    )
    try:
        arguments.create_engine_config()
        print("made")
    except ValueError as error:
        print(type(error).__name__, error)

launch(drvier=1)
launch(side_channel_port=int(sys.argv[2]))
launch()
"""


@pytest.mark.timeout(300)
def test_vllm_refuses_before_it_starts_an_engine(checkpoint: Path) -> None:
    check_launches_of(sys.executable, checkpoint)


def check_launches_of(python: str, model: Path) -> None:
    """Launches of a version of vLLM are checked; ``python`` is that of its environment."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = subprocess.run(
            [python, "-c", LAUNCH, str(model), str(taken.getsockname()[1])],
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
    said = [line for line in result.stdout.splitlines() if line.startswith(("ConfigE", "made"))]
    assert len(said) == 3, result.stderr[-2000:]
    assert "did you mean 'driver'" in said[0]
    assert "the port is in use" in said[1]
    assert said[2] == "made"
