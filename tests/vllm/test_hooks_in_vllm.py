"""The plugin and the worker's hooks, as vLLM's own code calls them; and vLLM's ids of requests."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from kvferry.integrations.vllm.plugin import register
from kvferry.integrations.vllm.request_ids import SAMPLE
from tests.vllm.geometry.scheduled import vllm_config


def test_plugin_registers_once() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register()
    register()
    found = KVConnectorFactory.get_connector_class_by_name("KVFerryConnector")
    assert found.__module__ == "kvferry.integrations.vllm.connector"


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A worker's connector, which is vLLM's of this process, and the configuration."""
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvferry.integrations.vllm import KVFerryConnector

    config = vllm_config("worker", block=16, batch=64, extra={})
    config.model_config.multimodal_config = None
    caches = KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[])
    connector = KVFerryConnector(config, KVConnectorRole.WORKER, caches)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    return connector, config


def scheduled(metadata: object) -> Any:
    return MagicMock(
        kv_connector_metadata=metadata, has_sync_kv_loads=False, finished_req_ids=set()
    )


def test_worker_without_caches(worker: tuple[Any, Any]) -> None:
    """vLLM may drive a worker's hooks before, or without, any cache; foreign metadata too."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
        ExampleConnectorMetadata,
    )
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    connector, config = worker
    KVConnectorModelRunnerMixin.kv_connector_no_forward(
        scheduled(ExampleConnectorMetadata()), config
    )
    assert connector.get_handshake_metadata() is None
    assert not connector.has_connector_metadata()
    connector.shutdown()
    connector.shutdown()


@pytest.mark.parametrize("drafts", [False, True])
def test_loads_begin_before_the_model_runs(
    worker: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, drafts: bool
) -> None:
    """And what is over is asked for after it, before a drafter runs."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    from kvferry.integrations.vllm import connector as module
    from kvferry.integrations.vllm.metadata import StepMetadata

    happened: list[str] = []

    def results() -> KVConnectorTransferResults:
        happened.append("results")
        return KVConnectorTransferResults()

    half = MagicMock(results=results, take_report=lambda: None, take_stats=lambda: None)
    half.apply.side_effect = lambda step: happened.append("messages")
    connector, config = worker
    monkeypatch.setattr(module, "start_worker", lambda *_, **__: half)
    connector.register_kv_caches({})
    runner = KVConnectorModelRunnerMixin
    with set_forward_context(None, config):
        with runner.maybe_get_kv_connector_output(scheduled(StepMetadata()), defer_finalize=drafts):
            happened.append("model")
        if drafts:
            happened.append("drafter")
            runner.finalize_kv_connector()
    assert not connector.has_connector_metadata()
    connector.shutdown()
    assert happened == ["messages", "model", "results", *["drafter"] * drafts]


def test_ids_of_samples() -> None:
    """By them alone vLLM's scheduler could tell that others may follow."""
    from vllm import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.parallel_sampling import ParentRequest

    request = MagicMock(external_req_id=None, request_id="cmpl-7", params=SamplingParams(n=3))
    InputProcessor.assign_request_id(request)
    parent = ParentRequest(request)
    assert all(SAMPLE.match(parent.get_child_info(index)[0]) for index in range(3))
    assert not SAMPLE.match(request.request_id)
