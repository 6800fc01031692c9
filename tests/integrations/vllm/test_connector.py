"""The connector of the worker's role, and what it says of itself; vLLM is not needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, MagicMock, call

import pytest

from kvferry.core.errors import KVFerryError
from tests.integrations.vllm import without_vllm
from tests.integrations.vllm.without_vllm import Role


@pytest.fixture(scope="module")
def modules() -> Iterator[list[Any]]:
    with without_vllm.modules("connector", "metadata") as found:
        yield found


@pytest.fixture
def vllm(modules: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """``connector`` and ``metadata``, with stand-ins for the worker half and what is checked."""
    connector, metadata = modules
    halves = MagicMock()
    monkeypatch.setattr(connector, "start_worker", halves.worker)
    monkeypatch.setattr(connector, "checks", halves.checks)
    monkeypatch.setattr(connector, "share_log_handlers", halves.share_log_handlers)
    return SimpleNamespace(connector=connector, metadata=metadata, halves=halves)


TRANSFER = SimpleNamespace(kv_connector_extra_config={}, engine_id="e")
CONFIG = SimpleNamespace(
    kv_transfer_config=TRANSFER,
    parallel_config=SimpleNamespace(data_parallel_index=0),
    model_config=SimpleNamespace(use_mla=False),
    lora_config=None,
)
CACHES = SimpleNamespace(transfer_group_ids=(0, 2))


def made(vllm: Any, role: Role) -> Any:
    return vllm.connector.KVFerryConnector(CONFIG, role, CACHES)


def test_memory_that_peers_may_read_is_not_given_away(vllm: Any) -> None:
    """vLLM 0.33 calls the hook before it unmaps the cache, and then does not unmap it."""
    connector = made(vllm, Role.WORKER)
    connector.register_kv_caches({"layer": "cache"})
    with pytest.raises(KVFerryError, match=r"refuses to sleep.*use level 0"):
        connector.unregister_kv_caches()
    assert not vllm.halves.worker.return_value.close.called
    with pytest.raises(KVFerryError, match="a scheduler's hook was called"):
        connector.reset_cache()


def test_a_worker_with_adapters(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.connector, "observe_loads", lambda config: [])
    config = SimpleNamespace(**{**vars(CONFIG), "lora_config": object()})
    connector = vllm.connector.KVFerryConnector(config, Role.WORKER, CACHES)
    connector.register_kv_caches({})
    report = vllm.metadata.RankReport(problems={0: ("it burns",)})
    vllm.halves.worker.return_value.take_report.side_effect = [None, None, report]
    assert connector.build_connector_worker_meta() is None
    for expected in (vllm.metadata.RankReport(), report):
        connector.bind_connector_metadata(vllm.metadata.StepMetadata(asks_adapters=5))
        found = connector.build_connector_worker_meta()
        assert (found.problems, found.adapters.step) == (expected.problems, 5)


def test_a_worker_of_a_vllm_that_takes_the_blocks_of_failed_loads(vllm: Any) -> None:
    connector = made(vllm, Role.WORKER)
    connector.register_kv_caches({})
    half = vllm.halves.worker.return_value
    half.take_report.return_value = None
    half.results.return_value = without_vllm.Results()
    assert connector.get_finished(set()) == (None, None)
    assert connector.build_connector_worker_meta() is None
    half.results.return_value = without_vllm.Results(
        finished_sending={"sent"}, finished_recving={"good", "bad"}, failed_recving={"bad"}
    )
    assert connector.get_finished(set()) == ({"sent"}, {"good", "bad"})
    assert connector.build_connector_worker_meta() == vllm.metadata.RankReport(
        failed=frozenset({"bad"})
    )
    assert connector.build_connector_worker_meta() is None


@pytest.mark.parametrize("outer", [None, "its own", "another's"])
def test_what_is_checked_at_start(
    vllm: Any, outer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = SimpleNamespace(kv_transfer_config=None if outer == "its own" else "around")
    found = None if outer is None else around
    monkeypatch.setattr(vllm.connector, "get_current_vllm_config_or_none", lambda: found)
    made(vllm, Role.WORKER)
    engine = "around" if outer == "another's" else TRANSFER
    assert vllm.halves.checks.mock_calls == [
        call.check_engine(CONFIG, engine),
        call.has_siblings(engine),
        call.warn_of_risks(ANY, engine),
    ]
    assert vllm.halves.share_log_handlers.called


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (SimpleNamespace(use_mla=False), "LBHNC"),
        (SimpleNamespace(use_mla=True), None),
        (None, None),
    ],
)
def test_the_order_that_is_asked_for(vllm: Any, model: Any, layout: str | None) -> None:
    asked = vllm.connector.KVFerryConnector.get_required_kvcache_layout
    assert asked(SimpleNamespace(model_config=model)) == layout


def test_sleep_mode_is_not_supported(vllm: Any) -> None:
    """vLLM 0.33 asks, and takes silence for a yes."""
    assert vllm.connector.KVFerryConnector.supports_sleep_mode(TRANSFER) is False


def test_import_loads_neither_vllm_nor_torch() -> None:
    """vLLM's plugin loader imports the plugin everywhere, also where no engine starts."""
    code = (
        "import sys, kvferry.integrations.vllm\n"
        "from importlib.metadata import entry_points\n"
        "[plugin] = entry_points(group='vllm.general_plugins', name='kvferry')\n"
        "assert callable(plugin.load())\n"
        "print({'vllm', 'torch', 'zmq'} & set(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert output.stdout == b"set()\n"
