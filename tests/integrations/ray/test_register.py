"""Registering the backend, where Ray is not what it should be."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvferry import KVFerryError
from kvferry.integrations.ray import BACKEND, build_pd_openai_app, register

FACTORY = "ray.llm._internal.serve.engines.vllm.kv_transfer.factory"


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's module with the registry cannot be imported."""
    monkeypatch.setitem(sys.modules, FACTORY, None)


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


def test_the_backend_is_registered_by_the_connectors_name(registered: dict[str, str]) -> None:
    register()
    assert registered == {"KVFerryConnector": BACKEND}


def test_what_is_registered_stays(registered: dict[str, str]) -> None:
    registered["KVFerryConnector"] = "somebody:Else"
    register()
    assert registered == {"KVFerryConnector": "somebody:Else"}


@pytest.mark.usefixtures("absent")
def test_without_rays_registry_the_error_names_the_version_to_install() -> None:
    with pytest.raises(KVFerryError, match=r"no KVConnectorBackendFactory .* 'ray\[serve,llm\]=="):
        register()


def test_a_registry_with_other_functions_is_refused_likewise(
    monkeypatch: pytest.MonkeyPatch, registered: dict[str, str]
) -> None:
    monkeypatch.setattr(sys.modules[FACTORY], "KVConnectorBackendFactory", SimpleNamespace())
    with pytest.raises(KVFerryError, match=r"'ray\[serve,llm\]=="):
        register()
    assert not registered


@pytest.mark.parametrize("role", ["prefill_config", "decode_config"])
@pytest.mark.parametrize("form", [dict, SimpleNamespace])
def test_an_engine_id_is_refused_before_anything_is_built(role: str, form: Any) -> None:
    config = form(engine_kwargs={"kv_transfer_config": {"engine_id": "mine"}})
    with pytest.raises(KVFerryError, match="sets engine_id to 'mine'"):
        build_pd_openai_app({role: config})


@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize("config", [None, "prefill.yaml", {}, {"engine_kwargs": None}])
def test_other_configurations_are_left_to_ray(config: object) -> None:
    with pytest.raises(KVFerryError, match="no KVConnectorBackendFactory"):
        build_pd_openai_app({"prefill_config": config, "decode_config": config})
