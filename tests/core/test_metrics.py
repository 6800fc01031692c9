"""``Metrics``: changes since the last ``take``, and their sums."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import PeerLostError, StaleError
from kvferry.core.metrics import (
    BYTES,
    FIGURES,
    LOAD_SECONDS,
    LOST_PEERS,
    MAX_NAME,
    MAX_OBSERVED,
    MAX_PEERS,
    OTHER,
    STAGE_SECONDS,
    UNREACHED,
    Data,
    LoadRecord,
    Metric,
    MetricKind,
    Metrics,
    PeerNames,
    Stage,
    flat,
    merge,
)

BY_NAME = {metric.name: metric for metric in FIGURES}


PLAIN: dict[str, Any] = {"request": "r", "engine": "prefill", "path": "memcpy", "reads": True}
PLAIN |= {"tokens": 10, "copies": 2, "nbytes": 4096, "seconds": 0.5, "wait_seconds": 2.0}
PLAIN |= {"post_seconds": 0.1, "transfer_seconds": 0.3, "fence_seconds": 0.05}


def new_metrics() -> Metrics:
    return Metrics(driver="loopback", rank="3")


def record(**changes: Any) -> LoadRecord:
    """Return the record of a successful load, with changes."""
    return LoadRecord(**(PLAIN | changes))


def counted(*records: LoadRecord) -> Data:
    metrics = new_metrics()
    for each in records:
        metrics.count_load(each)
    return metrics.take() or {}


def values(metric: Metric, data: Data) -> dict[tuple[str, ...], Any]:
    return dict(flat(metric, data))


def test_figures_of_ranks_are_sums_and_times_those_of_the_slower() -> None:
    one = record(copies=2, nbytes=30, early_nbytes=7, seconds=0.5, first_tokens=(4, 0))
    other = record(copies=3, nbytes=40, early_nbytes=1, seconds=0.2, first_tokens=(3, 5))
    both = replace(one, copies=5, nbytes=70, early_nbytes=8, first_tokens=(4, 5))
    assert one.combine(other) == other.combine(one) == both


def test_a_successful_load_is_counted() -> None:
    data = counted(record())
    assert values(BYTES, data) == {("loopback", "prefill", "memcpy"): 4096}
    assert values(LOAD_SECONDS, data) == {("loopback",): [0.5]}
    stages = {"wait": 2.0, "check": 0.0, "post": 0.1, "transfer": 0.3, "fence": 0.05}
    assert values(STAGE_SECONDS, data) == {("loopback", s): [t] for s, t in stages.items()}
    assert "load_failures" not in data


@pytest.mark.parametrize(
    ("changes", "labels", "stale"),
    [
        ({"error": StaleError("s"), "stage": Stage.FENCE}, ("prefill", "fence", "stale"), 1),
        ({"error": StaleError("s"), "stage": Stage.WAIT}, ("prefill", "wait", "stale"), 0),
        (
            {"error": PeerLostError("l"), "stage": Stage.HANDSHAKE, "reached": False},
            (UNREACHED, "handshake", "peer_lost"),
            0,
        ),
    ],
)
def test_a_failed_load_is_counted(
    changes: dict[str, Any], labels: tuple[str, ...], stale: int
) -> None:
    """Its bytes are not counted; an engine that was not reached is not named."""
    data = counted(record(reads=False), record(**changes))
    assert values(BY_NAME["load_failures"], data) == {("loopback", *labels): 1}
    assert sum(values(BY_NAME["stale_reads"], data).values()) == stale
    assert set(data) <= {"load_failures", "stale_reads"}


def test_the_number_of_peer_names_is_bounded() -> None:
    names = PeerNames(limit=2)
    expected = {"a": "a", "b": "b", "c": OTHER, UNREACHED: UNREACHED, "d": OTHER}
    assert {peer: names(peer) for peer in expected} == expected
    assert names("a") == "a"
    many = PeerNames()
    assert len({many(str(number)) for number in range(10 * MAX_PEERS)}) == MAX_PEERS + 1
    assert len(record(engine="x" * 1000).peer) == MAX_NAME


def test_a_distribution_that_is_not_taken_does_not_grow_without_bound() -> None:
    metrics = new_metrics()
    for _ in range(MAX_OBSERVED + 10):
        metrics.add(LOAD_SECONDS, 1.0)
    data = metrics.take() or {}
    assert len(data["load_seconds"]["loopback"]) == MAX_OBSERVED


amounts = st.integers(1, 1 << 60)
names = st.sampled_from(["a", "b", "c"])
events = st.lists(st.tuples(st.sampled_from(FIGURES), names, names, amounts), max_size=30)


def apply_events(metrics: Metrics, happened: list[tuple[Metric, str, str, int]]) -> None:
    for metric, one, two, amount in happened:
        labels = dict.fromkeys(set(metric.labels) - {"driver", "rank"}, one) | {"path": two}
        if metric.kind is MetricKind.GAUGE:
            metrics.set(metric, amount)
        else:
            metrics.add(metric, amount, **labels)


@given(events, st.integers(0, 30), st.integers(0, 30))
def test_merged_parts_equal_the_whole(
    happened: list[tuple[Metric, str, str, int]], first: int, second: int
) -> None:
    """Merging does not change the parts, and JSON does not either."""
    whole, parts = new_metrics(), new_metrics()
    apply_events(whole, happened)
    first, second = sorted((first, second))
    total: Data = {}
    for part in (happened[:first], happened[first:second], happened[second:]):
        apply_events(parts, part)
        data = parts.take() or {}
        sent = json.loads(json.dumps(data))
        merge(BY_NAME, total, data)
        assert data == sent
    assert total == (whole.take() or {})


def test_metrics_of_another_version_are_ignored() -> None:
    total: Data = {}
    merge(BY_NAME, total, {"unheard_of": {"x": 1}, "lost_peers": {"loopback": {"p": 1}}})
    assert values(LOST_PEERS, total) == {("loopback", "p"): 1}
    assert set(total) == {"lost_peers"}
