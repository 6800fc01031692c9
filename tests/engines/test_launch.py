"""What cannot work is refused when an engine is launched, before its model is loaded."""

from __future__ import annotations

import multiprocessing.process
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.engines.engines import ENVIRONMENT, ROOT, run_apart

PROGRAM = "import sys; from tests.engines.test_launch import launches; launches(*sys.argv[1:])"


def launches(model: str, port: str, answers: str) -> None:
    """Launch three engines, as far as vLLM's configuration, and write down what comes of it."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    def launch(**extra: object) -> str:
        transfer = KVTransferConfig(
            kv_connector="KVFerryConnector",
            kv_connector_module_path="kvferry.integrations.vllm",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        )
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


def launches_here(model: str, port: str, answers: str) -> None:
    """The same in a process that has imported vLLM, and takes itself for a program of its own."""
    from tests.engines import engine_process, frugal

    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    engine_process.log_to(f"{answers}.log")
    frugal.adapt()
    launches(model, port, answers)


@pytest.mark.timeout(300)
def test_vllm_refuses_before_it_starts_an_engine(checkpoint: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run_apart(launches_here, str(checkpoint), port, str(tmp_path / "answers"))
    check((tmp_path / "answers").read_text().splitlines())


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
    check(answers.read_text().splitlines())


def check(said: Sequence[str]) -> None:
    """The first two were refused, before a model was loaded."""
    assert len(said) == 3
    assert "ConfigError" in said[0]
    assert "did you mean 'driver'" in said[0]
    assert "the port is in use" in said[1]
    assert said[2] == "made"
