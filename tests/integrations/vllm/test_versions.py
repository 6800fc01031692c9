"""What differs between the versions of vLLM, each by its feature. Needs no vLLM."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kvferry.integrations.vllm
from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.checks import check_failure_reports
from kvferry.integrations.vllm.config import ConfigError
from tests.integrations.vllm import without_vllm

FOLDER = Path(kvferry.integrations.vllm.__file__).parent


@pytest.fixture
def later() -> Iterator[Any]:
    """A vLLM that takes the ids of requests whose load failed."""
    with without_vllm.modules("versions") as [module]:
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


def groups(*specs: object) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def block(block_id: int, *, cached: bool = False) -> Any:
    hashed = b"hash" if cached else None
    return SimpleNamespace(block_id=block_id, block_hash=hashed, is_null=block_id == 0)


def test_no_other_module_asks_for_the_version() -> None:
    asking = [
        path.name
        for path in FOLDER.rglob("*.py")
        if "__version__" in path.read_text() and path.name != "versions.py"
    ]
    assert asking == []


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("0.28.1", False),
        ("0.29.0", True),
        ("0.30.0", True),
        ("0.32.0+cpu", True),
        ("0.32.1.dev3+gabc", True),
        ("0.33.0", False),
        ("1.30.0", False),
        ("dev", False),
    ],
)
def test_a_version_outside_the_window_is_a_warning(
    version: str,
    inside: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = ModuleType("vllm")
    vars(module)["__version__"] = version
    monkeypatch.setitem(sys.modules, "vllm", module)
    with caplog.at_level(logging.WARNING):
        versions.warn_outside_window()
    assert versions.is_in_window(version) is inside
    read = " (the source of this version was read)" if version == "0.33.0" else ""
    expected = f"the connector was not run on vLLM {version}, only on 0.29 to 0.32{read}"
    assert [record.getMessage().split(":")[0] for record in caplog.records] == (
        [] if inside else [expected]
    )


def test_results_are_of_the_class_that_vllm_has(later: Any) -> None:
    made = later.transfer_results(sent={"s"}, received={"r"}, failed=set())
    assert made == without_vllm.Results(finished_sending={"s"}, finished_recving={"r"})


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
    blocks = SimpleNamespace(blocks=([block(0), block(7, cached=True), block(8), block(9)],))
    recorded.allocated("a", blocks, 40)
    recorded.allocated("b", SimpleNamespace(blocks=([block(3)],)), 20)
    recorded.allocated("computed here", blocks, 0)
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
    recorded.allocated("a", SimpleNamespace(blocks=([block(1)], [block(2)])), 40)
    assert recorded.take() == {}


def test_failed_requests() -> None:
    """They count when every rank has reported the load, also if one reported them earlier."""
    failures = versions.FailedRequests()
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
    monkeypatch.setattr(versions, "takes_failed_requests", oldest.takes_failed_requests)
    consumer: Any = SimpleNamespace(is_kv_consumer=True)
    full, window = FullAttentionSpec(), SlidingWindowSpec()
    check_failure_reports(consumer, groups(full))
    check_failure_reports(consumer, groups(SimpleNamespace(kv_cache_specs={"layer": full})))
    check_failure_reports(SimpleNamespace(is_kv_consumer=False), groups(full, full, window))
    with pytest.raises(ConfigError, match=r'3 cache groups: .*; set kv_role "kv_producer"'):
        check_failure_reports(consumer, groups(full, full, window))
    with pytest.raises(ConfigError, match=r"sliding windows or states: .*failed"):
        check_failure_reports(consumer, groups(window))


@pytest.mark.parametrize(
    ("config", "returned"),
    [
        ({"aux_output_config": SimpleNamespace(enabled=True)}, True),
        ({"aux_output_config": SimpleNamespace(enabled=False)}, False),
        ({"model_config": SimpleNamespace(enable_return_routed_experts=True)}, True),
        ({"model_config": SimpleNamespace(enable_return_routed_experts=False)}, False),
    ],
)
def test_routed_experts(config: dict[str, Any], returned: bool) -> None:
    assert versions.returns_routed_experts(SimpleNamespace(**config)) is returned


def test_hisparse() -> None:
    def engine(**attention: Any) -> Any:
        return SimpleNamespace(attention_config=SimpleNamespace(**attention))

    assert not versions.uses_hisparse(engine())
    assert not versions.uses_hisparse(engine(hisparse_config=None))
    assert versions.uses_hisparse(engine(hisparse_config=object()))


@pytest.mark.parametrize(
    ("eagle", "multi_module", "expected"), [(False, False, 0), (True, False, 1), (True, True, 3)]
)
def test_prefill_lookahead(eagle: bool, multi_module: bool, expected: int) -> None:
    """As vLLM 0.31 computes it, and as a later one says."""
    drafter = SimpleNamespace(use_eagle=lambda: eagle, use_multi_module_mtp=lambda: multi_module)
    older: Any = SimpleNamespace(speculative_config=drafter, num_speculative_tokens=3)
    assert versions.prefill_lookahead(older) == expected
    plain: Any = SimpleNamespace(speculative_config=None)
    assert versions.prefill_lookahead(plain) == 0
    newer: Any = SimpleNamespace(num_prefill_lookahead_tokens=5)
    assert versions.prefill_lookahead(newer) == 5


def test_drafters_with_a_cache() -> None:
    def drafter(**answers: bool) -> Any:
        return SimpleNamespace(**{name: lambda a=a: a for name, a in answers.items()})

    methods = ("use_eagle", "uses_draft_model", "uses_extract_hidden_states")
    assert not versions.drafts_with_cache(drafter(**dict.fromkeys(methods, False)))
    for method in methods:
        assert versions.drafts_with_cache(drafter(**dict.fromkeys(methods, False) | {method: True}))
    assert versions.drafts_with_cache(drafter(uses_draft_kv_cache=True))


def test_specs_that_say_how_they_are_divided() -> None:
    def spec(**attributes: Any) -> Any:
        return SimpleNamespace(**attributes)

    class FullAttentionSpec:
        num_kv_heads = 1

    class MLAAttentionSpec(FullAttentionSpec):
        pass

    class SlidingWindowSpec:
        pass

    mla: Any = MLAAttentionSpec()
    sliding: Any = SlidingWindowSpec()
    assert versions.is_context_sharded(mla)
    assert versions.is_context_sharded(spec(kv_cache_specs={"a": mla, "b": sliding}))
    assert not versions.is_context_sharded(sliding)
    assert not versions.is_context_sharded(spec(kv_cache_specs={"a": sliding}))
    assert versions.is_context_sharded(spec(dcp_sharded=True))
    assert not versions.is_context_sharded(spec(dcp_sharded=False))
    assert versions.is_whole_on_each_rank(spec())
    assert versions.is_whole_on_each_rank(spec(num_kv_heads=1, max_tp_shards=1))
    assert not versions.is_whole_on_each_rank(spec(num_kv_heads=1, max_tp_shards=None))
    assert not versions.is_whole_on_each_rank(spec(num_kv_heads=1))
    assert versions.is_whole_on_each_rank(mla)
    assert not versions.is_host_resident(spec())
    assert not versions.interleaves_values(spec())
    assert not versions.interleaves_values(spec(impl=spec(_use_interleaved_v_cache=False)))
    assert versions.interleaves_values(spec(impl=spec(_use_interleaved_v_cache=True)))
    assert versions.is_host_resident(spec(host_resident=True))


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("0.31.0+cpu", " vLLM 0.31"),
        ("0.31.2", " vLLM 0.31"),
        ("0.32.1+cpu", ""),
        ("0.33.0", " vLLM 0.33"),
        ("0.31rc1", " vLLM 0.31"),
        ("0.32+cpu", ""),
        ("dev", " vLLM dev"),
        (None, ""),
    ],
)
def test_pages_of_unknown_content_stay_within_a_release(
    version: str | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the text of 0.32 is that of builds that knew no other release."""
    monkeypatch.setattr(versions, "vllm_version", lambda: version)
    assert versions.opaque_release() == text
