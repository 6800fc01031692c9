"""vLLM's hooks called by hand, in an engine's process (`engines.Engine.run`)."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock, patch


def register_twice(engine: Any) -> str:
    """Where the connector comes from that vLLM knows by name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvferry.integrations.vllm.plugin import register

    register()
    register()
    module: str = KVConnectorFactory.get_connector_class_by_name("KVFerryConnector").__module__
    return module


def register_over_another(engine: Any) -> str:
    """What `register` says where another connector has the name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    from kvferry.core.errors import KVFerryError
    from kvferry.integrations.vllm.plugin import register

    registry = {"KVFerryConnector": lambda: ExampleConnector}
    with patch.object(KVConnectorFactory, "_registry", registry):
        try:
            register()
        except KVFerryError as error:
            return str(error)
    return ""


def drive_worker_without_caches(engine: Any, model: str) -> None:
    """A step of a worker whose caches were never registered, with another connector's metadata."""
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
        ExampleConnectorMetadata,
    )
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    connector, config = _connector(model, KVConnectorRole.WORKER)
    output = MagicMock(
        kv_connector_metadata=ExampleConnectorMetadata(),
        has_sync_kv_loads=False,
        finished_req_ids=set(),
    )
    with patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector):
        KVConnectorModelRunnerMixin.kv_connector_no_forward(output, config)
    assert connector.get_handshake_metadata() is None
    assert not connector.has_connector_metadata()
    connector.shutdown()
    connector.shutdown()


def order_of_a_step(engine: Any, model: str, drafts: bool) -> list[str]:
    """What happens in a step that runs the model, as vLLM's own code drives a worker's hooks."""
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorRole,
        KVConnectorTransferResults,
    )
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    from kvferry.integrations.vllm import connector as module
    from kvferry.integrations.vllm.metadata import StepMetadata

    happened: list[str] = []

    def results() -> KVConnectorTransferResults:
        happened.append("results")
        return KVConnectorTransferResults()

    worker = MagicMock(results=results, take_report=lambda: None, take_stats=lambda: None)
    worker.apply.side_effect = lambda step: happened.append("messages")
    connector, config = _connector(model, KVConnectorRole.WORKER)
    with patch.object(module, "start_worker", lambda *_, **__: worker):
        connector.register_kv_caches({})
    output = MagicMock(
        kv_connector_metadata=StepMetadata(), has_sync_kv_loads=False, finished_req_ids=set()
    )
    with (
        patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector),
        set_forward_context(None, config),
    ):
        with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(
            output, defer_finalize=drafts
        ):
            happened.append("model")
        if drafts:
            happened.append("drafter")
            KVConnectorModelRunnerMixin.finalize_kv_connector()
        assert not connector.has_connector_metadata()
    connector.shutdown()
    return happened


def ids_of_samples(engine: Any) -> list[str]:
    """What vLLM calls three samples of a request, however the client calls that."""
    from vllm import SamplingParams
    from vllm.v1.engine.parallel_sampling import ParentRequest

    request = MagicMock(external_req_id="cmpl-7", params=SamplingParams(n=3))
    request.request_id = _internal_id()
    parent = ParentRequest(request)
    return [parent.get_child_info(index)[0] for index in range(3)]


def id_of_a_request(engine: Any) -> str:
    """What vLLM calls a request of which one sample is wanted."""
    return _internal_id()


def _internal_id() -> str:
    from vllm.v1.engine.input_processor import InputProcessor

    request = MagicMock(external_req_id=None, request_id="cmpl-7")
    InputProcessor.assign_request_id(request)
    return str(request.request_id)


def _connector(model: str, role: Any) -> tuple[Any, Any]:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvferry.integrations.vllm import KVFerryConnector

    transfer = KVTransferConfig(
        kv_connector="KVFerryConnector",
        kv_connector_module_path="kvferry.integrations.vllm",
        kv_role="kv_both",
    )
    arguments = EngineArgs(
        model=model, dtype="float32", max_model_len=1024, kv_transfer_config=transfer
    )
    config = arguments.create_engine_config()
    caches = KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[])
    return KVFerryConnector(config, role, caches), config
