"""Figures: what is new since the last time, and that it adds up wherever it is added."""

from __future__ import annotations

import json
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
    PEERS_UP,
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

BY_NAME = {figure.name: figure for figure in FIGURES}


def counting() -> Metrics:
    return Metrics(driver="loopback", rank="3")


def record(**changes: Any) -> LoadRecord:
    """A load of 10 tokens that succeeded."""
    said: dict[str, Any] = {
        "request": "r",
        "engine": "prefill",
        "path": "memcpy",
        "reads": True,
        "tokens": 10,
        "copies": 2,
        "nbytes": 4096,
        "seconds": 0.5,
        "wait_seconds": 2.0,
        "post_seconds": 0.1,
        "transfer_seconds": 0.3,
        "fence_seconds": 0.05,
    }
    return LoadRecord(**(said | changes))


def values(figure: Metric, data: Data) -> dict[tuple[str, ...], Any]:
    return dict(flat(figure, data))


def test_names_are_unique_and_labels_known() -> None:
    assert len(BY_NAME) == len(FIGURES)
    known = {"driver", "rank", "peer", "path", "stage", "cause", "reason"}
    assert {label for figure in FIGURES for label in figure.labels} == known
    assert all(figure.labels[0] == "driver" for figure in FIGURES)


def test_nothing_is_new_where_nothing_happened() -> None:
    figures = counting()
    assert figures.take() is None
    figures.add(BYTES, 0, peer="p", path="")
    figures.set(PEERS_UP, 0)
    figures.count_load(record(reads=False))
    assert figures.take() is None


def test_what_was_taken_is_not_given_again() -> None:
    figures = counting()
    figures.add(BYTES, 5, peer="p", path="a")
    figures.add(BYTES, 6, peer="p", path="a")
    figures.add(BYTES, 7, peer="q", path="")
    taken = figures.take()
    assert taken == {"bytes": {"loopback": {"p": {"a": 11}, "q": {"": 7}}}}
    figures.add(BYTES, 1, peer="p", path="a")
    assert taken["bytes"]["loopback"]["p"]["a"] == 11
    assert figures.take() == {"bytes": {"loopback": {"p": {"a": 1}}}}


def test_a_gauge_is_new_when_it_changes() -> None:
    figures = counting()
    for now, new in ((2, {"peers_up": {"loopback": {"3": 2}}}), (2, None)):
        figures.set(PEERS_UP, now)
        assert figures.take() == new
    figures.set(PEERS_UP, 0)
    assert figures.take() == {"peers_up": {"loopback": {"3": 0}}}


def test_a_load_that_succeeded() -> None:
    figures = counting()
    figures.count_load(record())
    data = figures.take()
    assert data is not None
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
def test_a_load_that_failed(changes: dict[str, Any], labels: tuple[str, ...], stale: int) -> None:
    """What was read is not counted as pulled; an engine that was never met has no name here."""
    figures = counting()
    figures.count_load(record(**changes))
    data = figures.take()
    assert data is not None
    assert dict(flat(BY_NAME["load_failures"], data)) == {("loopback", *labels): 1}
    assert sum(values(BY_NAME["stale_reads"], data).values()) == stale
    assert set(data) <= {"load_failures", "stale_reads"}


def test_names_of_peers_are_bounded() -> None:
    names = PeerNames(limit=2)
    assert [names(peer) for peer in ("a", "b", "c", "a", UNREACHED, "d")] == [
        "a",
        "b",
        OTHER,
        "a",
        UNREACHED,
        OTHER,
    ]
    many = PeerNames()
    assert len({many(str(number)) for number in range(10 * MAX_PEERS)}) == MAX_PEERS + 1
    assert len(record(engine="x" * 1000).peer) == MAX_NAME


def test_a_distribution_that_nobody_takes_does_not_grow_for_ever() -> None:
    figures = counting()
    for _ in range(MAX_OBSERVED + 10):
        figures.observe(LOAD_SECONDS, 1.0)
    data = figures.take()
    assert data is not None
    assert len(data["load_seconds"]["loopback"]) == MAX_OBSERVED


amounts = st.integers(1, 1 << 60)
names = st.sampled_from(["a", "b", "c"])
events = st.lists(st.tuples(st.sampled_from(FIGURES), names, names, amounts), max_size=30)


def happen(figures: Metrics, what: list[tuple[Metric, str, str, int]]) -> None:
    for figure, one, two, amount in what:
        labels = dict.fromkeys(set(figure.labels) - {"driver", "rank"}, one) | {"path": two}
        if figure.kind is MetricKind.COUNTER:
            figures.add(figure, amount, **labels)
        elif figure.kind is MetricKind.GAUGE:
            figures.set(figure, amount)
        else:
            figures.observe(figure, amount, **labels)


@given(events, st.integers(0, 30), st.integers(0, 30))
def test_taken_in_parts_it_is_the_same(
    what: list[tuple[Metric, str, str, int]], first: int, second: int
) -> None:
    """However often it is taken, and whether the parts travelled or not; parts stay as they are."""
    whole, parts = counting(), counting()
    happen(whole, what)
    first, second = sorted((first, second))
    total: Data = {}
    for part in (what[:first], what[first:second], what[second:]):
        happen(parts, part)
        data = parts.take() or {}
        sent = json.loads(json.dumps(data))
        merge(BY_NAME, total, data)
        assert data == sent
    assert total == (whole.take() or {})


def test_what_another_version_counts_is_left_out() -> None:
    total: Data = {}
    merge(BY_NAME, total, {"unheard_of": {"x": 1}, "lost_peers": {"loopback": {"p": 1}}})
    assert values(LOST_PEERS, total) == {("loopback", "p"): 1}
    assert set(total) == {"lost_peers"}
