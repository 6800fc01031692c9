"""Figures on their way through vLLM's classes, in an engine's process (`engines.Engine.run`)."""

from __future__ import annotations

from functools import partial
from typing import Any


def counted(seed: int = 0) -> dict[str, Any]:
    """What a step's reports come to: two ranks and the scheduler, added and sent as vLLM does."""
    from msgspec import msgpack

    from kvferry.core.errors import StaleError
    from kvferry.core.metrics import PEERS_DOWN, PEERS_UP, REFUSED, LoadRecord, Metrics, Stage
    from kvferry.integrations.vllm.metric_definitions import HELD, HOLDS, LOADS, TOKENS
    from kvferry.integrations.vllm.metrics import FerryStats

    def rank(index: int) -> FerryStats:
        figures = Metrics(driver="nixl", rank=str(index))
        good = LoadRecord(
            request="r",
            engine=f"prefill-{seed}",
            path="UCX",
            reads=True,
            tokens=9,
            copies=3,
            nbytes=3000,
            seconds=0.002,
            transfer_seconds=0.0011,
        )
        figures.count_load(good)
        bad = LoadRecord(
            request="s",
            engine=f"prefill-{seed}",
            error=StaleError("gone"),
            stage=Stage.FENCE,
            reads=True,
            tokens=9,
            copies=3,
            nbytes=3000,
            seconds=9.0,
        )
        figures.count_load(bad)
        figures.set(PEERS_UP, 2 + seed)
        figures.set(PEERS_DOWN, index)
        return FerryStats(data=figures.take() or {})

    scheduler = Metrics(driver="nixl")
    scheduler.add(LOADS, 1)
    scheduler.add(TOKENS, 9)
    scheduler.add(REFUSED, reason="prompt")
    scheduler.set(HELD, 7)
    scheduler.add(HOLDS, 4, outcome="read")
    scheduler.add(HOLDS, 2, outcome="evicted")
    total = rank(0).aggregate(rank(1)).aggregate(FerryStats(data=scheduler.take() or {}))
    sent: dict[str, Any] = msgpack.decode(msgpack.encode(total.to_dict()))
    return sent


def exposed_after(engine: Any, steps: list[int]) -> list[dict[str, float]]:
    """What the second of two engines behind one front end shows at start, and after each step."""
    from unittest.mock import MagicMock

    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from kvferry.integrations.vllm import KVFerryConnector
    from tests.engines import probes

    registry = CollectorRegistry()
    config = MagicMock()
    config.kv_transfer_config.kv_connector_extra_config = {"driver": "nixl"}
    kinds: tuple[Any, ...] = (Counter, Gauge, Histogram)
    types: dict[type, Any] = {kind: partial(kind, registry=registry) for kind in kinds}
    metrics = KVFerryConnector.build_prom_metrics(
        config,
        types,
        ["model_name", "engine"],
        {0: ["tiny", "0"], 1: ["tiny", "1"]},
    )
    shown = [probes.samples(registry, "1")]
    for seed in steps:
        metrics.observe(counted(seed), 1)
        shown.append(probes.samples(registry, "1"))
    return shown


def logged(engine: Any, steps: list[int]) -> list[str]:
    """vLLM's log line after some steps, and after none."""
    from unittest.mock import MagicMock

    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    from kvferry.integrations.vllm import KVFerryConnector

    logging = KVConnectorLogging(None)
    logging.connector_cls = KVFerryConnector
    lines = MagicMock()
    for seed in steps:
        logging.observe(counted(seed))
    for _ in range(2):
        logging.log(lines)
    return [call.args[0] % call.args[1:] for call in lines.call_args_list]


def ail(engine: Any, problem: str) -> None:
    """From now on every endpoint here finds this wrong, or nothing if it is empty."""
    from kvferry.core.endpoint import Endpoint

    found = (problem,) if problem else ()
    Endpoint.problems = property(lambda self: found)  # type: ignore[assignment]
