"""What differs between the versions of vLLM, each by its feature. Needs no vLLM."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kvferry.integrations.vllm
from kvferry.integrations.vllm import versions

FOLDER = Path(kvferry.integrations.vllm.__file__).parent


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
    expected = f"the connector was not run on vLLM {version}, only on 0.29 to 0.32"
    assert [record.getMessage().split(":")[0] for record in caplog.records] == (
        [] if inside else [expected]
    )


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


def test_hits_from_peers_have_no_name_in_an_older_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert versions.peer_hit_source() is None


def test_routed_experts_were_a_setting_of_the_model() -> None:
    for on in (True, False):
        older: Any = SimpleNamespace(model_config=SimpleNamespace(enable_return_routed_experts=on))
        assert versions.returns_routed_experts(older) is on


def test_what_ranks_divide_is_as_the_spec_says_or_else_as_of_full_attention() -> None:
    class FullAttentionSpec:
        num_kv_heads = 1

    class MLAAttentionSpec(FullAttentionSpec):
        pass

    specs: list[Any] = [MLAAttentionSpec(), SimpleNamespace(), SimpleNamespace(dcp_sharded=True)]
    specs += [SimpleNamespace(kv_cache_specs={"a": each, "b": specs[1]}) for each in specs[:2]]
    specs.append(SimpleNamespace(dcp_sharded=False))
    found = [versions.is_context_sharded(spec) for spec in specs]
    assert found == [True, False, True, True, False, False]
    specs = [FullAttentionSpec(), MLAAttentionSpec(), SimpleNamespace()]
    specs += [SimpleNamespace(num_kv_heads=8, max_tp_shards=shards) for shards in (1, None)]
    found = [versions.is_whole_on_each_rank(spec) for spec in specs]
    assert found == [False, True, True, True, False]


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
