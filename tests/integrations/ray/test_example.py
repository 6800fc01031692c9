"""The configuration in ``examples/ray_serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.ray_serve import local
from kvferry.integrations.ray import CONNECTOR, serve_on
from kvferry.integrations.vllm.config import parse

yaml = pytest.importorskip("yaml", reason="PyYAML comes with vLLM")


def test_the_roles_are_those_of_a_pair_that_share_nothing_but_the_driver() -> None:
    [application] = yaml.safe_load(local.SERVE_YAML.read_text())["applications"]
    local_arguments = local.arguments(Path("model"))
    drivers = set[str]()
    for role, name in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        config = application["args"][f"{role}_config"]
        transfer: dict[str, Any] = config["engine_kwargs"]["kv_transfer_config"]
        assert (transfer["kv_role"], transfer["kv_connector"]) == (name, CONNECTOR)
        serve_on(transfer, "10.0.0.7")
        settings = parse(transfer["kv_connector_extra_config"])
        assert settings.side_channel_port == 0
        drivers.add(settings.driver)
        # For one machine, only what the machine lacks is changed.
        here = local_arguments[f"{role}_config"]
        changed = here["engine_kwargs"]["kv_transfer_config"]
        assert changed["kv_role"] == name
        assert parse(changed["kv_connector_extra_config"]).driver == "loopback"
        assert here["accelerator_config"] == {"kind": "cpu"}
    assert len(drivers - {"loopback"}) == len(drivers) == 1
