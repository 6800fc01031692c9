"""Registering the backend, and what each replica gets. Needs no Ray."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvferry import KVFerryError
from kvferry.integrations.ray import BACKEND, CONNECTOR, build_pd_openai_app, register, serve_on

FACTORY = "ray.llm._internal.serve.engines.vllm.kv_transfer.factory"
NODE = "10.0.0.7"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Ray's registry: the class or its place by the connector's name."""
    backends: dict[str, str] = {}
    packages = FACTORY.split(".")
    for depth in range(1, len(packages)):
        monkeypatch.setitem(sys.modules, ".".join(packages[:depth]), ModuleType("package"))
    factory: Any = ModuleType(FACTORY)
    factory.KVConnectorBackendFactory = SimpleNamespace(
        is_registered=backends.__contains__, register_backend=backends.__setitem__
    )
    monkeypatch.setitem(sys.modules, FACTORY, factory)
    return backends


@pytest.mark.parametrize("there", [{}, {CONNECTOR: "somebody:Else"}])
def test_the_backend_is_registered_once(registered: dict[str, str], there: dict[str, str]) -> None:
    registered |= there
    register()
    assert registered == {CONNECTOR: BACKEND} | there


@pytest.mark.parametrize("factory", [None, SimpleNamespace(KVConnectorBackendFactory=object())])
def test_without_rays_registry_the_error_names_the_version_to_install(
    monkeypatch: pytest.MonkeyPatch, registered: dict[str, str], factory: Any
) -> None:
    monkeypatch.setitem(sys.modules, FACTORY, factory)
    with pytest.raises(KVFerryError, match=r"no KVConnectorBackendFactory .* 'ray\[serve,llm\]=="):
        build_pd_openai_app({"prefill_config": "prefill.yaml"})


@pytest.mark.parametrize(
    ("transfer", "extra"),
    [
        ({}, {"side_channel_host": NODE}),
        ({"kv_connector_extra_config": None}, {"side_channel_host": NODE}),
        (
            {"kv_connector_extra_config": {"driver": "ucx"}},
            {"driver": "ucx", "side_channel_host": NODE},
        ),
        (
            {"kv_connector_extra_config": {"side_channel_host": "storage"}, "engine_id": None},
            {"side_channel_host": "storage"},
        ),
    ],
)
def test_a_replica_is_served_at_its_nodes_address(
    transfer: dict[str, Any], extra: dict[str, str]
) -> None:
    """Below a MultiConnector, only the inner dictionary is the engine's own."""
    inner = transfer.get("kv_connector_extra_config")
    serve_on(transfer, NODE)
    assert transfer["kv_connector_extra_config"] == extra
    assert inner is None or transfer["kv_connector_extra_config"] is inner


def test_a_replica_refuses_an_engine_id() -> None:
    with pytest.raises(KVFerryError, match=r"'prefill-1', which all replicas .* remove it"):
        serve_on({"engine_id": "prefill-1"}, NODE)
