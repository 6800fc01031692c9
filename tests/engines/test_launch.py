"""What cannot work is refused when an engine is launched, before its model is loaded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.engines import CONNECTOR, ENVIRONMENT, ROOT

PROGRAM = "import sys; from tests.engines.test_launch import launches; launches(*sys.argv[1:])"


def launches(model: str, port: str, answers: str) -> None:
    """Launch three engines, as far as vLLM's configuration, and write down what comes of it."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    def launch(**extra: object) -> str:
        settings: dict[str, object] = {"kv_role": "kv_both", "kv_connector_extra_config": extra}
        transfer = KVTransferConfig(**CONNECTOR, **settings)
        arguments = AsyncEngineArgs(
            model=model, enforce_eager=True, dtype="float32", kv_transfer_config=transfer
        )
        try:
            arguments.create_engine_config()
        except ValueError as error:
            return f"{type(error).__name__} {error}".replace("\n", " ")
        return "made"

    said = [launch(drvier=1), launch(side_channel_port=int(port)), launch()]
    Path(answers).write_text("\n".join(said))


@pytest.mark.timeout(300)
def test_vllm_refuses_before_it_starts_an_engine(checkpoint: Path, tmp_path: Path) -> None:
    check_launches_of(sys.executable, checkpoint, tmp_path)


def check_launches_of(python: str, model: Path, folder: Path) -> None:
    """Launches of a version of vLLM are checked; ``python`` is that of its environment."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, answers = str(taken.getsockname()[1]), folder / "answers"
        result = subprocess.run(
            [python, "-c", PROGRAM, str(model), port, str(answers)],
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
    assert result.returncode == 0, result.stderr[-2000:]
    [misspelt, in_use, made] = answers.read_text().splitlines()
    assert "ConfigError" in misspelt
    assert "did you mean 'driver'" in misspelt
    assert "the port is in use" in in_use
    assert made == "made"
