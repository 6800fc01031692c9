"""Loads of adapters that a worker sees and reports. Needs no vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvferry.integrations.vllm.adapter_files import adapter_version
from kvferry.integrations.vllm.adapter_loads import (
    METHOD,
    UNKNOWN,
    AdapterLoad,
    AdapterReport,
    LoadLog,
    observe_loads,
)
from kvferry.integrations.vllm.config import ConfigError
from tests.integrations.vllm.test_adapter_files import content, write


def lora(path: str, number: int = 1) -> Any:
    return SimpleNamespace(lora_name="adapter", lora_int_id=number, lora_path=path)


def configured(rank: int = 3) -> Any:
    return SimpleNamespace(
        lora_config=SimpleNamespace(), parallel_config=SimpleNamespace(rank=rank)
    )


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's ``WorkerLoRAManager``; an instance does what ``reads`` says when it loads."""

    class Manager:
        def __init__(self, config: Any, reads: Any = lambda: None) -> None:
            self.lora_config = config.lora_config
            self._reads = reads

        def _load_adapter(self, request: Any) -> str:
            self._reads()
            return f"loaded {request.lora_int_id}"

    module = ModuleType("vllm.lora.worker_manager")
    vars(module)["WorkerLoRAManager"] = Manager
    for name in ("vllm", "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Manager


def test_a_load_is_reported_once(manager: Any, tmp_path: Path) -> None:
    path, config = write(tmp_path), configured()
    log = observe_loads(config)
    assert getattr(manager(config), METHOD)(lora(path)) == "loaded 1"
    [load] = log.take().loads
    assert (load.rank, load.adapter, load.name, load.path) == (3, 1, "adapter", path)
    assert (load.version, load.content) == (adapter_version(path), content(path))
    assert not log.take()


def test_files_that_change_during_a_load(manager: Any, tmp_path: Path) -> None:
    path, config = write(tmp_path), configured()
    log = observe_loads(config)
    manager(config, lambda: write(tmp_path, b"others"))._load_adapter(lora(path))
    # Nor is it known what vLLM read if it loads by a name on a hub.
    manager(config)._load_adapter(lora("somebody/adapter"))
    assert [load.content for load in log.take().loads] == [UNKNOWN, UNKNOWN]


def test_a_load_that_fails(manager: Any, tmp_path: Path) -> None:
    """vLLM keeps the adapter that it had."""
    config = configured()
    log = observe_loads(config)

    def fail() -> None:
        raise ValueError("LoRA rank 64 is greater than max_lora_rank")

    with pytest.raises(ValueError, match="max_lora_rank"):
        manager(config, fail)._load_adapter(lora(write(tmp_path)))
    assert not log.take()


def test_two_engines_in_one_process(manager: Any, tmp_path: Path) -> None:
    path = write(tmp_path)
    configs = [configured(), configured()]
    logs = [observe_loads(config) for config in configs]
    manager(configs[0])._load_adapter(lora(path))
    assert [len(log.take().loads) for log in logs] == [1, 0]


def test_a_vllm_that_loads_otherwise(manager: Any) -> None:
    delattr(manager, METHOD)
    with pytest.raises(ConfigError, match=r"start without enable_lora, or with vLLM 0\.29"):
        observe_loads(configured())


def test_reports_of_two_ranks() -> None:
    logs = [LoadLog(), LoadLog()]
    for rank, log in enumerate(logs):
        log.add(AdapterLoad(rank=rank, adapter=1, name="adapter", path="/adapter"))
        log.ask(4)
    report = logs[0].take().aggregate(logs[1].take())
    assert [load.rank for load in report.loads] == [0, 1]
    assert report.step == 4
    assert report.aggregate(AdapterReport()).step == 0
