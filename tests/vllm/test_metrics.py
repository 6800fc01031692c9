"""Metrics through vLLM's own classes: its log line, and its Prometheus metrics."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from msgspec import msgpack
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvferry.core.errors import StaleError
from kvferry.core.metrics import (
    MAX_PEERS,
    PEERS_DOWN,
    PEERS_UP,
    REFUSED,
    LoadRecord,
    Metrics,
    Stage,
)
from kvferry.integrations.vllm.scheduler_metrics import HELD, HOLDS, LOADS, TOKENS
from tests.engines import probes

GOOD: dict[str, Any] = {
    "seconds": 0.0042,
    "wait_seconds": 0.0001,
    "post_seconds": 0.001,
    "transfer_seconds": 0.0011,
    "fence_seconds": 0.0002,
    "path": "UCX",
}
BAD: dict[str, Any] = {"seconds": 9.0, "error": StaleError("gone"), "stage": Stage.FENCE}


def rank(index: int, seed: int) -> Any:
    from kvferry.integrations.vllm.metrics_export import FerryStats

    counting = Metrics(driver="nixl", rank=str(index))
    for result in (GOOD | {"check_seconds": 0.002 * index}, BAD):
        counting.count_load(
            LoadRecord(
                request="r",
                engine=f"prefill-{seed}",
                reads=True,
                tokens=9,
                copies=3,
                nbytes=3000,
                **result,
            )
        )
    counting.set(PEERS_UP, 2 + seed)
    counting.set(PEERS_DOWN, index)
    return FerryStats(data=counting.take() or {})


def counted(seed: int = 0) -> dict[str, Any]:
    """What a step's reports come to: two ranks and the scheduler, added and sent as vLLM does."""
    from kvferry.integrations.vllm.metrics_export import FerryStats

    scheduler = Metrics(driver="nixl")
    scheduler.add(LOADS, 1)
    scheduler.add(TOKENS, 9)
    scheduler.add(REFUSED, reason="prompt")
    scheduler.set(HELD, 7)
    scheduler.add(HOLDS, 5, outcome="made")
    scheduler.add(HOLDS, 4, outcome="read")
    scheduler.add(HOLDS, 1, outcome="expired")
    scheduler.add(HOLDS, 2, outcome="evicted")
    total = rank(0, seed).aggregate(rank(1, seed))
    total.aggregate(FerryStats(data=scheduler.take() or {}))
    sent: dict[str, Any] = msgpack.decode(msgpack.encode(total.to_dict()))
    return sent


def exposed_after(*steps: int) -> list[dict[str, float]]:
    """What the second of two engines behind one front end shows at start, and after each step."""
    from kvferry.integrations.vllm import KVFerryConnector

    registry = CollectorRegistry()
    transfer = SimpleNamespace(kv_connector_extra_config={"driver": "nixl"})
    kinds: tuple[Any, ...] = (Counter, Gauge, Histogram)
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    metrics = KVFerryConnector.build_prom_metrics(
        config,
        {kind: partial(kind, registry=registry) for kind in kinds},  # type: ignore[misc]
        ["model_name", "engine"],
        {0: ["tiny", "0"], 1: ["tiny", "1"]},
    )
    shown = [probes.samples(registry, "1")]
    for seed in steps:
        metrics.observe(counted(seed), 1)
        shown.append(probes.samples(registry, "1"))
    return shown


def test_the_log_line_is_short_and_says_what_is_wrong() -> None:
    """After steps in which nothing happened, there is none."""
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    from kvferry.integrations.vllm import KVFerryConnector

    logging: Any = KVConnectorLogging(None)
    logging.connector_cls = KVFerryConnector
    lines = MagicMock()
    for _ in range(3):
        logging.observe(counted())
    for _ in range(2):
        logging.log(lines)
    assert [call.args[0] % call.args[1:] for call in lines.call_args_list] == [
        "KV Transfer metrics: loads=3, tokens=27, MB=0.018, GB/s=0.003, waited ms median=1.1, "
        "waited ms longest=2.1, read ms median=2.3, read ms longest=2.3, tickets=15, held pages=7, "
        "stale reads=6, refused tickets=3, peers down=1, expired leases=3, evicted holds=6"
    ]


def test_no_log_line_where_nothing_happened() -> None:
    """vLLM logs a line of statistics that are not empty, whatever it says."""
    from kvferry.integrations.vllm.metrics_export import FerryStats, LoggedStats

    for name in ("peers_up", "quarantined_pages"):
        assert LoggedStats({name: {"loopback": {"0": 0}}}).is_empty()
    assert LoggedStats({}).is_empty()
    failed = {"failed_loads": {"loopback": 1}}
    assert LoggedStats(failed).reduce() == {"failed": 1}
    stats = FerryStats({"peers_up": {"loopback": {"0": 1}}})
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


def test_metrics_add_up_over_ranks_and_steps() -> None:
    start, _, after = exposed_after(0, 0)
    assert after['bytes_total{driver="nixl",path="UCX",peer="prefill-0"}'] == 12000
    assert after['copies_total{driver="nixl",path="UCX",peer="prefill-0"}'] == 12
    failure = 'load_failures_total{cause="stale",driver="nixl",peer="prefill-0",stage="fence"}'
    assert after[failure] == 4
    assert after['refused_tickets_total{driver="nixl",reason="prompt"}'] == 2
    assert after['stage_seconds_count{driver="nixl",stage="transfer"}'] == 4
    assert after['stage_seconds_sum{driver="nixl",stage="transfer"}'] == pytest.approx(0.0044)
    seconds = 'peer_seconds_total{driver="nixl",peer="prefill-0",stage="transfer"}'
    assert after[seconds] == pytest.approx(0.0044)
    assert after['peers_up{driver="nixl",rank="1"}'] == 2, "the later one counts"
    assert after['held_pages{driver="nixl"}'] == 7
    assert after['holds_total{driver="nixl",outcome="evicted"}'] == 4
    assert start['loads_total{driver="nixl"}'] == 0


def test_what_may_never_happen_is_0_from_the_start() -> None:
    """A counter that appears with its first failure hides it from a rate."""
    [start] = exposed_after()
    assert set(start.values()) == {0}
    assert 'refused_tickets_total{driver="nixl",reason="signature"}' in start
    assert 'done_after_expiry_total{driver="nixl"}' in start
    assert 'holds_total{driver="nixl",outcome="expired"}' in start


def test_peers_are_bounded() -> None:
    after = exposed_after(*range(3 * MAX_PEERS))[-1]
    pulls = {name: value for name, value in after.items() if name.startswith("pulls_total")}
    assert len(pulls) == MAX_PEERS + 1
    assert pulls['pulls_total{driver="nixl",path="UCX",peer="other"}'] == 2 * 2 * MAX_PEERS
