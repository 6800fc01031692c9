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
    """What happens in a step that runs the model, as vLLM's own code drives a worker's hooks.

    Args:
        engine: The engine whose process this is.
        model: The model's folder.
        drafts: Whether a drafter runs after the model, before vLLM ends the connector's step.
    """
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


def serve_foreign_handshake(engine: Any, model: str) -> None:
    """A scheduler half that is given another connector's handshake metadata."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    connector, _ = _connector(model, KVConnectorRole.SCHEDULER)
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})
    step = connector.build_connector_meta(MagicMock(total_num_scheduled_tokens=0))
    assert step.ranks == ()
    connector.shutdown()
    connector.shutdown()


def steps_while_unwell(engine: Any, model: str) -> dict[str, bool]:
    """Whether a scheduler half has its engine step, as ranks fall ill and time passes."""
    import time

    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.outputs import KVConnectorOutput

    from kvferry.integrations.vllm.metadata import RankReport

    connector, _ = _connector(model, KVConnectorRole.SCHEDULER)
    has_to: dict[str, bool] = {}

    def hear(case: str, after: float, *problems: tuple[str, ...]) -> None:
        clock.return_value += after
        for rank, each in enumerate(problems):
            health = RankReport(problems={rank: each})
            connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=health))
        has_to[case] = connector.has_pending_push_work()

    with patch.object(time, "monotonic", return_value=time.monotonic()) as clock:
        hear("well", 0.0)
        hear("ill", 0.0, ("it burns",))
        hear("still ill", 50.0)
        hear("ill of more", 0.0, ("it burns",), ("it smokes",))
        hear("still ill of more", 50.0)
        hear("ill for long", 50.0)
        hear("ill of something else", 0.0, ("it smokes",))
        hear("well again", 0.0, (), ())
    connector.shutdown()
    return has_to


def waits_in_a_step(engine: Any) -> dict[str, bool]:
    """Whether a worker half waits in a step, by what its endpoint says and what the step runs."""
    from kvferry.integrations.vllm.metadata import StepMetadata
    from kvferry.integrations.vllm.worker import FerryWorker
    from tests.core.messages import payload

    def waits(idle: bool = True, **said: Any) -> bool:
        nothing = {"payload": payload(), "problems": (), "pending": 0, "held": 0}
        endpoint = MagicMock(**{**nothing, **said})
        worker = FerryWorker(endpoint, lambda: None)
        worker.take_report()
        worker.apply(StepMetadata(idle=idle))
        worker.results()
        return bool(endpoint.wait.called)

    return {
        "well": waits(),
        "loads": waits(pending=1),
        "holds pages": waits(held=1),
        "unwell": waits(problems=("it burns",)),
        "unwell and busy": waits(problems=("it burns",), idle=False),
    }


def reports_of_ranks(engine: Any) -> dict[str, Any]:
    """What two ranks tell the scheduler half, added up, by what the step asked and what changed."""
    from kvferry.core.lifecycle.holds import Hold, RequestId
    from kvferry.core.lifecycle.reclamation import Silence
    from kvferry.integrations.vllm.metadata import StepMetadata
    from kvferry.integrations.vllm.worker import FerryWorker
    from tests.core.messages import payload

    found = Silence(request=RequestId("r"), hold=Hold(slot=1, generation=7), age=4.0)
    endpoints = [
        MagicMock(payload=payload(rank=rank), problems=(), silent=lambda: [found])
        for rank in range(2)
    ]
    workers = [FerryWorker(endpoint, lambda: None) for endpoint in endpoints]

    def added(*, asks: bool) -> Any:
        for worker in workers:
            worker.apply(StepMetadata(asks_silent=asks))
        first, second = (worker.take_report() for worker in workers)
        return first.aggregate(second) if first and second else first or second

    reports = {"nothing": added(asks=False), "asked": added(asks=True).silent}
    endpoints[1].problems = ("it burns",)
    reports["ill"] = added(asks=False).problems
    asked = added(asks=True)
    return reports | {"asked again": (asked.problems, {r: len(s) for r, s in asked.silent.items()})}


def added_figures(engine: Any) -> dict[str, float]:
    """Two ranks' figures and the scheduler's, added and sent to the process that logs."""
    from msgspec import msgpack

    from kvferry.core.metrics import LATE, PEERS_DOWN, REFUSED, LoadRecord, Metrics
    from kvferry.integrations.vllm import KVFerryConnector
    from kvferry.integrations.vllm.metric_definitions import LOADS, TOKENS
    from kvferry.integrations.vllm.metrics import FerryStats

    def rank(index: int, *seconds: float) -> FerryStats:
        figures = Metrics(driver="loopback", rank=str(index))
        for each in seconds:
            record = LoadRecord(
                request="r", engine="e", reads=True, tokens=9, copies=1, nbytes=2000, seconds=each
            )
            figures.count_load(record)
        figures.set(PEERS_DOWN, 2)
        return FerryStats(data=figures.take() or {})

    scheduler = Metrics(driver="loopback")
    for figure, value in ((LOADS, 2), (TOKENS, 18), (LATE, 0)):
        scheduler.add(figure, value)
    scheduler.add(REFUSED, reason="prompt")
    total = rank(0, 0.001, 0.002).aggregate(rank(1, 0.003, 0.002))
    total.aggregate(FerryStats(data=scheduler.take() or {}))
    sent = msgpack.decode(msgpack.encode(total.to_dict()))
    rebuilt = KVFerryConnector.build_kv_connector_stats(sent)
    assert FerryStats().is_empty()
    assert not rebuilt.is_empty()
    return rebuilt.reduce()


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
