"""The configuration in ``examples/ray_serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.ray_serve import local
from kvferry.integrations.ray import CONNECTOR, check_engine_id
from kvferry.integrations.vllm.config import Config, parse

pytest.importorskip("yaml", reason="PyYAML comes with vLLM")


def transfers() -> list[dict[str, Any]]:
    """Return the ``kv_transfer_config`` of prefill and of decode."""
    import yaml

    [application] = yaml.safe_load(local.SERVE_YAML.read_text())["applications"]
    configs = [application["args"][f"{role}_config"] for role in ("prefill", "decode")]
    return [config["engine_kwargs"]["kv_transfer_config"] for config in configs]


def settings(transfer: dict[str, Any]) -> Config:
    """Return the connector's settings, as an engine reads them."""
    return parse(transfer["kv_connector_extra_config"])


def test_the_roles_are_those_of_a_pair() -> None:
    assert [transfer["kv_role"] for transfer in transfers()] == ["kv_producer", "kv_consumer"]
    assert {transfer["kv_connector"] for transfer in transfers()} == {CONNECTOR}


def test_both_deployments_have_the_same_driver() -> None:
    prefill, decode = map(settings, transfers())
    assert prefill.driver == decode.driver != "loopback"


def test_replicas_share_neither_an_engine_id_nor_a_port() -> None:
    for transfer in transfers():
        check_engine_id(transfer)
        assert settings(transfer).side_channel_port == 0


def test_for_one_machine_only_what_the_machine_lacks_is_changed() -> None:
    arguments = local.arguments(Path("model"))
    for role, whole in zip(("prefill", "decode"), transfers(), strict=True):
        config = arguments[f"{role}_config"]
        changed = config["engine_kwargs"]["kv_transfer_config"]
        assert changed["kv_role"] == whole["kv_role"]
        assert settings(changed).driver == "loopback"
        assert config["accelerator_config"] == {"kind": "cpu"}
