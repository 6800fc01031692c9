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


@pytest.fixture
def oldest() -> Iterator[Any]:
    """A vLLM that takes the ids of blocks, not of requests, whose load failed."""
    with without_vllm.modules("compat_029") as [module]:
        del sys.modules[f"{without_vllm.PACKAGE}.base"].KVConnectorTransferResults
        yield module


class FullAttentionSpec:
    """vLLM's class of this name, to a function that asks for the name."""


class SlidingWindowSpec:
    """Likewise."""


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

    results = oldest.transfer_results(sent={"s"}, received={"r"}, failed={"r"})
    assert (results.finished_sending, results.failed_recving) == ({"s"}, {"r"})
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
