"""What each replica of a deployment gets for itself."""

from typing import Any

import pytest

from kvferry import KVFerryError
from kvferry.integrations.ray import check_engine_id, serve_on

NODE = "10.0.0.7"


def test_the_side_channel_is_at_the_nodes_address() -> None:
    transfer: dict[str, Any] = {"kv_connector_extra_config": {"driver": "ucx"}}
    serve_on(transfer, NODE)
    extra = transfer["kv_connector_extra_config"]
    assert extra == {"driver": "ucx", "side_channel_host": NODE}


@pytest.mark.parametrize("transfer", [{}, {"kv_connector_extra_config": None}])
def test_without_other_settings_the_address_is_set_too(transfer: dict[str, Any]) -> None:
    serve_on(transfer, NODE)
    assert transfer == {"kv_connector_extra_config": {"side_channel_host": NODE}}


def test_a_configured_address_stays() -> None:
    transfer = {"kv_connector_extra_config": {"side_channel_host": "storage-network"}}
    serve_on(transfer, NODE)
    assert transfer["kv_connector_extra_config"]["side_channel_host"] == "storage-network"


def test_the_settings_are_changed_in_place() -> None:
    """Below a MultiConnector, only the inner dictionary is the engine's own."""
    extra = {"driver": "ucx"}
    serve_on({"kv_connector_extra_config": extra}, NODE)
    assert extra["side_channel_host"] == NODE


def test_an_engine_id_is_refused_with_its_value_and_the_remedy() -> None:
    with pytest.raises(KVFerryError, match=r"'prefill-1', which all replicas .* remove it"):
        serve_on({"engine_id": "prefill-1"}, NODE)


@pytest.mark.parametrize("settings", [None, {}, {"engine_id": None}, "KVFerryConnector"])
def test_settings_without_an_engine_id_pass(settings: Any) -> None:
    check_engine_id(settings)
