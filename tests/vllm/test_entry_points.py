"""What vLLM loads and asks of kvferry before an engine starts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from kvferry.integrations.vllm.transfer_config import KEYS, OLD_KEYS
from tests.integrations.vllm.test_dynamo import wheel

__all__ = ["wheel"]

ROOT = Path(__file__).parents[2]


def test_keys_are_those_of_vllm() -> None:
    from vllm.config import KVTransferConfig

    assert {field.name for field in fields(KVTransferConfig)} == set(KEYS)
    assert not set(KEYS) & set(OLD_KEYS)


def test_the_entry_point_of_the_vllm_plugin_can_be_loaded() -> None:
    # In a process of its own, because importing vLLM changes the process.
    code = """
from importlib.metadata import entry_points
(found,) = entry_points(group="vllm.general_plugins", name="kvferry")
print(callable(found.load()))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1:] == ["True"], run.stderr


@pytest.mark.timeout(300)
def test_dynamo_knows_the_connector_once_vllm_has_loaded_the_plugin(wheel: Path) -> None:
    """Dynamo's handlers ask its table after vLLM has loaded its plugins."""
    code = f"""
import sys
sys.path.insert(0, {str(wheel)!r})
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from types import SimpleNamespace
from dynamo.vllm.kv_connector_protocols import make_kv_connector_protocol

EngineArgs(model=".")  # loads the plugins, as a worker of Dynamo does
transfer = KVTransferConfig(kv_connector="KVFerryConnector", kv_role="kv_producer")
protocol = make_kv_connector_protocol(SimpleNamespace(kv_transfer_config=transfer))
print(type(protocol).__name__)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert run.stdout.splitlines()[-1:] == ["NixlConnectorProtocol"], run.stderr
