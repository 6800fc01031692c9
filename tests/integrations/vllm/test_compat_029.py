"""What vLLM 0.29 lacks, by its features. Needs no vLLM."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.integrations.vllm import compat_029
from kvferry.integrations.vllm.checks import cache_problems
from tests.integrations.vllm import without_vllm
from tests.integrations.vllm.halves import blocks


@pytest.fixture
def later() -> Iterator[Any]:
    """A vLLM that takes the ids of requests whose load failed."""
    with without_vllm.modules("compat_029") as [module]:
        yield module


@pytest.fixture
def oldest(later: Any) -> Any:
    """A vLLM that takes the ids of blocks."""
    base = sys.modules[f"{without_vllm.PACKAGE}.base"]
    del base.KVConnectorTransferResults
    return later


class FullAttentionSpec:
    """vLLM's class of this name, to a function that asks for the name."""


class SlidingWindowSpec:
    """Likewise."""


def test_results_without_such_a_class(oldest: Any) -> None:
    made = oldest.transfer_results(sent={"s"}, received={"r"}, failed={"r"})
    assert (made.finished_sending, made.finished_recving, made.failed_recving) == (
        {"s"},
        {"r"},
        {"r"},
    )


def test_blocks_of_failed_loads(oldest: Any) -> None:
    """Those of the load alone: neither cached blocks, nor vLLM's null block."""
    recorded, failing = oldest.LoadBlocks(), oldest.FailedBlocks()
    recorded.allocated("a", blocks(7, 0, 8, 9, cached=1), 40)
    recorded.allocated("b", blocks(3), 20)
    recorded.allocated("computed here", blocks(7, 0, 8, 9, cached=1), 0)
    taken = recorded.take()
    assert taken == {"a": (8, 9), "b": (3,)}
    assert recorded.take() == {}
    failing.started(taken)
    failing.ended(["another connector's"], {"another connector's"})
    assert (failing.take_blocks(), failing.take_requests()) == (set(), frozenset())
    failing.ended(["a", "b"], {"a"})
    assert (failing.take_blocks(), failing.take_requests()) == ({8, 9}, frozenset({"a"}))
    assert (failing.take_blocks(), failing.take_requests()) == (set(), frozenset())


def test_no_blocks_are_recorded_where_vllm_takes_requests(later: Any) -> None:
    recorded = later.LoadBlocks()
    recorded.allocated("a", SimpleNamespace(blocks=[*blocks(1).blocks, *blocks(2).blocks]), 40)
    assert recorded.take() == {}


def test_failed_requests() -> None:
    """They count when every rank has reported the load, also if one reported them earlier."""
    failures = compat_029.FailedRequests()
    early = SimpleNamespace(finished_recving=None)
    late: Any = SimpleNamespace(finished_recving={"a", "b"})
    assert failures.among_finished(early, ["a"]) == set()
    assert failures.among_finished(late, []) == {"a"}
    assert failures.among_finished(late, []) == set()
    named: Any = SimpleNamespace(finished_recving={"a", "b"}, failed_recving={"b"})
    assert failures.among_finished(named, []) == {"b"}


def test_an_engine_that_cannot_be_told_of_failed_loads_does_not_load(
    oldest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat_029, "takes_failed_requests", oldest.takes_failed_requests)
    monkeypatch.setattr("kvferry.integrations.vllm.checks.refusals", lambda groups: ())

    def problems(*groups: object, loads: bool = True) -> str:
        found = [SimpleNamespace(kv_cache_spec=group) for group in groups]
        config: Any = SimpleNamespace(kv_cache_groups=found, transfer_groups=found)
        transfer: Any = SimpleNamespace(is_kv_consumer=loads)
        return "".join(cache_problems(transfer, config))

    full, window = FullAttentionSpec(), SlidingWindowSpec()
    assert not problems(full)
    assert not problems(SimpleNamespace(kv_cache_specs={"layer": full}))
    assert not problems(full, full, window, loads=False)
    said = problems(full, full, window)
    assert "with 3 cache groups: it cannot be told that a load failed" in said
    assert said.endswith('set kv_role "kv_producer", or install a later vLLM')
    assert "with a cache of sliding windows or states: it cannot" in problems(window)


def test_drafters_with_a_cache() -> None:
    def drafter(**answers: bool) -> Any:
        return SimpleNamespace(**{name: lambda a=a: a for name, a in answers.items()})

    methods = ("use_eagle", "uses_draft_model", "uses_extract_hidden_states")
    assert not compat_029.drafts_with_cache(drafter(**dict.fromkeys(methods, False)))
    for method in methods:
        assert compat_029.drafts_with_cache(
            drafter(**dict.fromkeys(methods, False) | {method: True})
        )
    assert compat_029.drafts_with_cache(drafter(uses_draft_kv_cache=True))
