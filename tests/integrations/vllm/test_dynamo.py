"""The plugin registers the connector with Dynamo's vLLM workers, where Dynamo is installed."""

from __future__ import annotations

import logging
import multiprocessing
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.integrations.vllm import dynamo, plugin
from kvferry.integrations.vllm.transfer_config import NAME
from tests.engines.engines import PREFILL, ROOT

WHEEL = ROOT / ".cache" / "dynamo" / "ai_dynamo-1.6.1-py3-none-any.whl"
"""Dynamo's own files; the targets of the Makefile that run this test fetch them."""

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
    """Installs a Dynamo of version 9.9.9 with some modules."""

    def write(**modules: str) -> None:
        info = tmp_path / "ai_dynamo-9.9.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ai-dynamo\nVersion: 9.9.9\n")
        for name, text in modules.items():
            path = tmp_path / "dynamo" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    return write


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of Dynamo's wheel."""
    if not WHEEL.is_file():
        pytest.skip(f"no {WHEEL.name}: 'make unit' fetches it, where there is a package index")
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(WHEEL) as archive:
        archive.extractall(folder)
    return folder


def table() -> dict[str, object]:
    """Dynamo's table of connectors, in this process."""
    found: dict[str, object] = sys.modules[dynamo.MODULE].KV_CONNECTOR_PROTOCOLS
    return found


class TestAnotherDynamo:
    def test_not_installed(self, caplog: pytest.LogCaptureFixture) -> None:
        dynamo.register(NAME)
        assert not loaded()
        assert not caplog.records

    def test_another_module_of_this_name_is_not_imported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "dynamo.py").write_text("raise RuntimeError('a script of the user')")
        monkeypatch.syspath_prepend(tmp_path)
        dynamo.register(NAME)
        assert not loaded()
        assert not caplog.records

    def test_installed_without_its_vllm_workers(
        self, install: Install, caplog: pytest.LogCaptureFixture
    ) -> None:
        """ai-dynamo-runtime has the package dynamo, but not dynamo.vllm."""
        install(**{"llm/__init__": ""})
        dynamo.register(NAME)
        assert not caplog.records

    def test_a_table_with_nixl_connector(
        self,
        install: Install,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """The plugin that vLLM loads, often twice, adds the connector."""
        factory = SimpleNamespace(register_connector=lambda *_: None)
        name = "vllm.distributed.kv_transfer.kv_connector.factory"
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(KVConnectorFactory=factory))
        text = "KV_CONNECTOR_PROTOCOLS = {'NixlConnector': 'by a ticket', 'Other': 'otherwise'}"
        install(**{"vllm/__init__": "", "vllm/kv_connector_protocols": text})
        for _ in range(2):
            plugin.register()
            assert table() == {
                "NixlConnector": "by a ticket",
                "Other": "otherwise",
                NAME: "by a ticket",
            }
        assert not caplog.records

    def test_dynamo_s_own_entry_remains(self, install: Install) -> None:
        text = f"KV_CONNECTOR_PROTOCOLS = {{'NixlConnector': 1, {NAME!r}: 2}}"
        install(**{"vllm/__init__": "", "vllm/kv_connector_protocols": text})
        dynamo.register(NAME)
        assert table()[NAME] == 2

    @pytest.mark.parametrize(
        ("modules", "cause"),
        [
            ({}, "ModuleNotFoundError: No module named 'dynamo.vllm.kv_connector_protocols'"),
            ({"vllm/kv_connector_protocols": ""}, "AttributeError: "),
            ({"vllm/kv_connector_protocols": "KV_CONNECTOR_PROTOCOLS = {}"}, "KeyError: "),
            ({"vllm/kv_connector_protocols": "KV_CONNECTOR_PROTOCOLS = ()"}, "AttributeError: "),
            ({"vllm/kv_connector_protocols": "import no_such_module"}, "ModuleNotFoundError: "),
            ({"vllm/kv_connector_protocols": "from os import nothing"}, "ImportError: "),
            ({"vllm/kv_connector_protocols": "KV_CONNECTOR_PROTOCOLS = 1 / 0"}, "ZeroDivisionErr"),
        ],
        ids=["no module", "no table", "no NixlConnector", "no dict", "dependency", "import", "any"],
    )
    def test_another_version(
        self,
        modules: dict[str, str],
        cause: str,
        install: Install,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        install(**{"vllm/__init__": ""}, **modules)
        dynamo.register(NAME)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        message = record.getMessage()
        assert "Dynamo 9.9.9" in message
        assert "Use Dynamo 1.6.1" in message
        assert cause in message

    def test_engine_core_and_workers_say_nothing(
        self,
        install: Install,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """They are children of the process in which Dynamo runs, which has logged the warning."""
        install(**{"vllm/__init__": ""})
        monkeypatch.setattr(multiprocessing, "parent_process", object)
        dynamo.register(NAME)
        assert not caplog.records


class TestDynamosOwnFiles:
    def test_a_request_is_handed_over_with_a_ticket(
        self, wheel: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(wheel)
        dynamo.register(NAME)
        transfer = SimpleNamespace(kv_connector=NAME)
        make = sys.modules[dynamo.MODULE].make_kv_connector_protocol
        protocol = make(SimpleNamespace(kv_transfer_config=transfer))
        assert protocol.prefill_request_kv_transfer_params() == PREFILL
        ticket = {"remote_engine_id": "engine", "kvferry": {"version": 1}}
        answer = SimpleNamespace(kv_transfer_params=ticket)
        assert protocol.decode_request_kv_transfer_params(answer) == ticket

    def test_nothing_else_of_dynamo_is_imported(self, wheel: Path) -> None:
        """Its other modules import vLLM, and would do so while vLLM loads its plugins."""
        code = f"""
import logging, sys
from kvferry.integrations.vllm import dynamo
sys.path.insert(0, {str(wheel)!r})
before = set(sys.modules)
dynamo.register("KVFerryConnector")
imported = {{name for name in set(sys.modules) - before if name not in sys.stdlib_module_names}}
print(*sorted(imported - {{"dynamo.vllm._version"}}))
"""
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        )
        assert run.stdout.split() == ["dynamo", "dynamo.vllm", dynamo.MODULE]
