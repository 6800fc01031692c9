"""The plugin registers the connector with Dynamo's vLLM workers, where Dynamo is installed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvferry.integrations.vllm import dynamo, plugin
from kvferry.integrations.vllm.transfer_config import NAME

Install = Callable[..., None]
"""Writes modules: their text by their names, with slashes for dots."""


def loaded() -> set[str]:
    """The modules of Dynamo that are imported."""
    return {name for name in sys.modules if name.partition(".")[0] == "dynamo"}


@pytest.fixture(autouse=True)
def without_dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has not imported Dynamo."""
    kept = {name: sys.modules.pop(name) for name in loaded()}
    yield
    for name in loaded():
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a Dynamo with some modules."""

    def write(**modules: str) -> None:
        for name, text in modules.items():
            path = tmp_path / "dynamo" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    return write


@pytest.mark.parametrize("other", ["nothing", "a script", "without a spec", "without workers"])
def test_where_dynamo_is_not_installed(
    other: str,
    install: Install,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """ai-dynamo-runtime has the package dynamo, but not dynamo.vllm."""
    if other == "a script":
        (tmp_path / "dynamo.py").write_text("raise RuntimeError('a script of the user')")
        monkeypatch.syspath_prepend(tmp_path)
    elif other == "without a spec":
        monkeypatch.setitem(sys.modules, "dynamo", ModuleType("dynamo"))
    elif other == "without workers":
        install(**{"llm/__init__": ""})
    dynamo.register(NAME)
    assert not caplog.records
    assert "dynamo.vllm" not in sys.modules


def test_the_plugin_adds_the_connector(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM often loads it twice; an entry of Dynamo's own would remain likewise."""
    factory = SimpleNamespace(register_connector=lambda *_: None)
    name = "vllm.distributed.kv_transfer.kv_connector.factory"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(KVConnectorFactory=factory))
    text = "KV_CONNECTOR_PROTOCOLS = {'NixlConnector': 'by a ticket', 'Other': 'otherwise'}"
    install(**{"vllm/__init__": "", "vllm/kv_connector_protocols": text})
    for connector in ("by a ticket", "Dynamo's own"):
        plugin.register()
        table = sys.modules[dynamo.MODULE].KV_CONNECTOR_PROTOCOLS
        assert table == {"NixlConnector": "by a ticket", "Other": "otherwise", NAME: connector}
        table[NAME] = "Dynamo's own"
    assert not caplog.records


@pytest.mark.parametrize(
    ("modules", "cause"),
    [
        ({}, "ModuleNotFoundError: No module named 'dynamo.vllm.kv_connector_protocols'"),
        ({"vllm/kv_connector_protocols": "KV_CONNECTOR_PROTOCOLS = {}"}, "KeyError: "),
        ({"vllm/kv_connector_protocols": "KV_CONNECTOR_PROTOCOLS = 1 / 0"}, "ZeroDivisionErr"),
    ],
)
def test_another_version_is_warned_of(
    modules: dict[str, str], cause: str, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(**{"vllm/__init__": ""}, **modules)
    dynamo.register(NAME)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for words in ("Use Dynamo 1.6.1", cause):
        assert words in record.getMessage()
