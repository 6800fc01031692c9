"""The engines of ``kvferry plan`` match the installed vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import kvferry
from kvferry.cli.plan.engines import ORDERS, WHOLE, Engine, PlanSettings, make_engine
from kvferry.cli.plan.model import Model
from kvferry.cli.plan.report import BACKENDS, PREFERRED
from kvferry.core.layout import Field, axis_length

pytestmark = pytest.mark.vllm

BLOCKS, LAYERS, HEADS, TOKENS, HEAD, KERNEL = 5, 3, 2, 16, 8, 4
"""The same as in ``vllm_facts.py``, and the block size of kernels."""

ORDERS_OF_WHOLE_BLOCKS = [order for order in ORDERS if order.startswith(WHOLE)]

ABLE = ["FLASH_ATTN", "TRITON_ATTN"]
UNABLE = ["CPU_ATTN", "FLEX_ATTENTION", "ROCM_ATTN"]
"""Backends that the advice says can, or cannot, store a block's layers together. FLASHINFER is one
of them, too, but cannot be imported without its package."""

WINDOWS = [
    [20, 20, 0, 20, 20, 0, 20],
    [0, 20, 0, 20, 0],
    [20] * 5 + [0] + [20] * 5 + [0],
    [0, 20, 20, 20, 20],
]
PIPELINES = [[10, 3], [61, 4], [61, 8], [80, 4], [5, 5], [7, 2], [30, 7]]


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    asked = {
        "kernels": ORDERS_OF_WHOLE_BLOCKS,
        "windows": WINDOWS,
        "pipelines": PIPELINES,
        "backends": [*ABLE, *UNABLE],
    }
    script = Path(__file__).with_name("vllm_facts.py")
    command = [sys.executable, str(script), json.dumps(asked)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def model(windows: list[int]) -> Model:
    return Model(
        layers=len(windows),
        windows=dict(enumerate(windows)),
        attention_heads=24,
        kv_heads=HEADS,
        parts={"k": HEAD, "v": HEAD},
        dtype="bfloat16",
    )


def make_test_engine(order: str, kernel: int = 0) -> Engine:
    settings = PlanSettings(block_size=TOKENS, layout=order, kernel_block=kernel)
    return make_engine(model([0] * LAYERS), settings, (BLOCKS - 1) * TOKENS)


def offset_and_strides(f: Field) -> list[int]:
    """Return the offset, and the strides of pages (or smaller kernel blocks), heads and tokens."""
    block = f.tokens[0].stride if len(f.tokens) > 1 else f.page_stride
    return [f.offset, block, f.shard[-1].stride, f.tokens[-1].stride]


@pytest.mark.parametrize("order", ORDERS)
def test_page_strides_match_vllm(facts: dict[str, Any], order: str) -> None:
    keys = [f for f in make_test_engine(order).ranks[0].fields if f.key.endswith("/k")]
    assert [offset_and_strides(f) for f in keys] == [found[:4] for found in facts["places"][order]]


@pytest.mark.parametrize("order", ORDERS_OF_WHOLE_BLOCKS)
def test_kernel_block_strides_match_vllm(facts: dict[str, Any], order: str) -> None:
    keys = [f for f in make_test_engine(order, KERNEL).ranks[0].fields if f.key.endswith("/k")]
    assert [offset_and_strides(f) for f in keys] == [found[:4] for found in facts["kernels"][order]]
    assert {axis_length(f.tokens) for f in keys} == {TOKENS}


@pytest.mark.parametrize("case", range(len(WINDOWS)))
def test_cache_groups_match_vllm(facts: dict[str, Any], case: int) -> None:
    [layout] = make_engine(model(WINDOWS[case]), PlanSettings(), 16).ranks
    groups: dict[int, list[int]] = {}
    for f in layout.fields:
        if f.key.endswith("/k"):
            groups.setdefault(f.group, []).append(int(f.key.split(".")[1]))
    assert list(groups.values()) == facts["groups"][case]


@pytest.mark.parametrize("case", range(len(PIPELINES)))
def test_pipeline_stages_match_vllm(facts: dict[str, Any], case: int) -> None:
    layers, pp = PIPELINES[case]
    ranks = make_engine(model([0] * layers), PlanSettings(pp=pp), 16).ranks
    found = [sorted({int(f.key.split(".")[1]) for f in layout.fields}) for layout in ranks]
    assert [[stage[0], stage[-1] + 1] for stage in found] == facts["stages"][case]
    assert list(chain(*found)) == list(range(layers))


@pytest.mark.parametrize("layout", BACKENDS)
def test_advice_about_attention_backends_matches_vllm(facts: dict[str, Any], layout: str) -> None:
    able = [name for name, taken in facts["backends"].items() if taken is None or layout in taken]
    assert able == ABLE
    can, cannot = BACKENDS[layout].split("; ")
    assert all(name in can for name in ABLE)
    assert all(name in cannot for name in UNABLE)


def test_order_that_the_connector_asks_for_is_named() -> None:
    source = (Path(kvferry.__file__).parent / "integrations/vllm/connector.py").read_text()
    assert f'PREFERRED_LAYOUT = "{PREFERRED}"' in source
