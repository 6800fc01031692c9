"""Everything that this vLLM has is described, opaque or refused, and nothing is by accident."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from enum import EnumMeta
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.integrations.vllm.caches.attention_pages import PACKINGS
from kvferry.integrations.vllm.caches.cache_kinds import HANDLED, REFUSED, refusals
from kvferry.integrations.vllm.caches.state_pages import STATE_PACKINGS
from tests.vllm.caches import census, coverage_page
from tests.vllm.caches.views import group

NO_BACKEND = {
    "CUSTOM": "a place for one that is registered at run time, and then opaque",
    "TORCH_SDPA": "a tag for vision towers, which have no cache",
    "NO_ATTENTION": "names a module that this vLLM does not have",
}
"""Members of vLLM's enumerations that are no backend with a cache."""


def _spec_classes() -> set[str]:
    """Those that are in the source, and those that importing vLLM's own module makes."""
    from vllm.v1 import kv_cache_interface as interface

    found = {cls.simple for cls in census.derived(census.SPEC_ROOT)}
    live = [v for v in vars(interface).values() if inspect.isclass(v)]
    return found | {v.__name__ for v in live if issubclass(v, interface.KVCacheSpec)} - {
        census.SPEC_ROOT
    }


def test_every_kind_of_cache_has_a_verdict() -> None:
    classes = _spec_classes()
    assert classes >= {"FullAttentionSpec", "MambaSpec"}
    assert classes - {*HANDLED, *REFUSED} == set(), "add each to HANDLED, or to REFUSED"
    assert {*HANDLED, *REFUSED} - classes == set(), "vLLM has these no more"


def test_every_backend_has_a_verdict() -> None:
    states = {b.name for b in census.backends() if b.state}
    paged = {b.name for b in census.backends()} - states
    known = {name.partition("/")[0] for name in (*PACKINGS, *coverage_page.OPAQUE)}
    assert paged >= {"FLASH_ATTN", "TRITON_FLASHINFER", "CPU_ATTN"}
    assert paged - known == set(), "add each to PACKINGS, or to OPAQUE with the reason"
    assert known - paged == set(), "vLLM has these no more"
    assert states - set(STATE_PACKINGS) == set(), "add each to STATE_PACKINGS"
    assert {name.partition("/")[0] for name in STATE_PACKINGS} - states == set()


def test_every_enumerated_backend_was_found() -> None:
    """The scan of the source misses none that vLLM can choose."""
    from vllm.v1.attention.backends import registry

    scanned = {path for b in census.backends() for path in b.classes}
    enumerations = [v for v in vars(registry).values() if isinstance(v, EnumMeta) and len(v)]
    assert len(enumerations) == 2
    for enumeration in enumerations:
        members: list[Any] = list(enumeration)
        lost = [m.name for m in members if m.value not in scanned and m.name not in NO_BACKEND]
        assert lost == []


def test_every_kernel_of_the_cpu_backend_has_a_verdict() -> None:
    from vllm.v1.attention.backends import cpu_attn

    tree = ast.parse(inspect.getsource(cpu_attn._get_attn_isa))
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    kernels = {f"CPU_ATTN/{ast.literal_eval(value)}" for value in returned if value}
    known = {*PACKINGS, *coverage_page.OPAQUE}
    assert kernels == {name for name in known if name.startswith("CPU_ATTN/")}


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("SinkFullAttentionSpec", {"sink_len": 4}, "the sink's keys"),
        ("CrossAttentionSpec", {}, "would have to name the encoder's input"),
        ("HiddenStateCacheSpec", {}, "ExampleHiddenStatesConnector"),
        ("FullAttentionSpec", {"non_causal": True}, "prefix LM"),
        ("FullAttentionSpec", {"tokens_per_state": Fraction(1, 4)}, "4 entries per token"),
        ("FullAttentionSpec", {}, None),
        ("MLAAttentionSpec", {}, None),
        ("RSWASpec", {"rswa_window": 64}, None),
        ("SlidingWindowSpec", {"sliding_window": 64}, None),
        ("SlidingWindowMLASpec", {"sliding_window": 64, "bounded_replay": True}, None),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 64}, None),
        ("CircularBufferSpec", {}, None),
    ],
)
def test_what_is_refused(name: str, options: dict[str, Any], why: str | None) -> None:
    spec = _spec(name, **options)
    refused = _refusals(group(["a"], spec))
    assert [why in text for text in refused if why] == [True] * len(refused)
    assert bool(refused) == (why is not None)
    assert _refusals(group(["a"], spec, enable_kv_transfer=False)) == []


def test_each_layer_s_own_kind_of_cache_counts_whatever_it_is_derived_from() -> None:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    class TheirSpec(type(_full())):  # type: ignore[misc]
        pass

    theirs = TheirSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=_full().dtype)
    specs = {"a": _full(), "b": theirs, "c": _full()}
    both = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)
    for spec in (theirs, both):
        assert _refusals(group(["a", "b", "c"], spec)) == [
            "the caches of a, b and 1 more layers (TheirSpec: not known here)"
        ]


def test_the_page_names_all_caches() -> None:
    page = coverage_page.PAGE.read_text(encoding="utf-8")
    assert page == coverage_page.with_caches(page), f"run: {coverage_page.COMMAND}"


def test_the_page_has_a_verdict_on_every_architecture() -> None:
    """It is written by hand: by the caches that the layers of an architecture make."""
    from vllm.model_executor.models.registry import _VLLM_MODELS

    page = coverage_page.PAGE.read_text(encoding="utf-8")
    head, _, table = page.partition("\n## Architectures\n")
    rows = [line.split(" | ") for line in table.splitlines() if line.endswith("` |")]
    verdicts = Counter({row[0].removeprefix("| "): 0 for row in rows})
    named: list[str] = []
    for verdict, *_, names in rows:
        named += re.findall("`(.*?)`", names)
        verdicts[verdict.removeprefix("| ")] += names.count("`") // 2
    assert set(_VLLM_MODELS) - set(named) == set(), "add each to the table, with its verdict"
    assert set(named) - set(_VLLM_MODELS) == set(), "vLLM has these no more"
    assert len(named) == len(set(named))
    assert f"All {len(named)} that vLLM" in table
    assert all(f"| {verdict} | {count} |" in head for verdict, count in verdicts.items())


def _refusals(*groups: Any) -> list[str]:
    config: Any = SimpleNamespace(transfer_groups=[g for g in groups if g.enable_kv_transfer])
    return list(refusals(config))


def _spec(name: str, **options: Any) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as interface

    shape = {"block_size": 32, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    return getattr(interface, name)(**shape, **options)


def _full() -> Any:
    return _spec("FullAttentionSpec")
