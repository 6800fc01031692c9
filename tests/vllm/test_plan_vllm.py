"""The engines of ``kvferry plan`` match the installed vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kvferry
from kvferry.cli.plan.engines import (
    ORDERS,
    WHOLE,
    Engine,
    PlanSettings,
    fit_states,
    make_engine,
)
from kvferry.cli.plan.model import Model, read_model
from kvferry.cli.plan.report import BACKENDS, PREFERRED
from kvferry.cli.plan.states import RecurrentState
from kvferry.core.layout import Field, axis_length
from tests.cli import hybrid_configs as configs
from tests.cli.plan_command import write_config

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
    [-1, -1, -1, 0] * 4,
    [-1, 0, 20, 20, -1, 0, 20, 20],
]
"""The window of each layer; 0 for none, and -1 for a state instead of attention."""
PIPELINES = [[10, 3], [61, 4], [61, 8], [80, 4], [5, 5], [7, 2], [30, 7]]


class StateCase(NamedTuple):
    """A hybrid, and the arguments that its class in vLLM gives to ``MambaStateShapeCalculator``."""

    config: dict[str, Any]
    tp: int
    kind: str
    backend: str
    arguments: dict[str, int]
    kernel: int = 4
    groups: int = 0


DELTA_NET = {
    "num_k_heads": 16,
    "num_v_heads": 32,
    "head_k_dim": 128,
    "head_v_dim": 128,
    "conv_kernel_size": 4,
}
GRANITE = {
    "intermediate_size": 4096,
    "n_groups": 1,
    "num_heads": 64,
    "head_dim": 64,
    "state_size": 128,
    "conv_kernel": 4,
}
NEMOTRON = {
    "intermediate_size": 8192,
    "n_groups": 8,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "conv_kernel": 4,
}
FALCON = GRANITE | {"intermediate_size": 1536, "num_heads": 24}
JAMBA = {"intermediate_size": 8192, "state_size": 16, "conv_kernel": 4}
LFM2 = {"intermediate_size": 2048, "conv_kernel": 3}
KDA = {"num_heads": 32, "head_dim": 128, "conv_kernel_size": 4}
STATES = [
    StateCase(configs.QWEN3_NEXT, 1, "linear_attention", "GDN_ATTN", DELTA_NET),
    StateCase(configs.QWEN3_NEXT, 2, "linear_attention", "GDN_ATTN", DELTA_NET),
    StateCase(configs.QWEN3_5, 4, "linear_attention", "GDN_ATTN", DELTA_NET),
    StateCase(configs.GRANITE, 1, "mamba2", "MAMBA2_ATTN", GRANITE, groups=1),
    StateCase(configs.GRANITE, 4, "mamba2", "MAMBA2_ATTN", GRANITE, groups=1),
    StateCase(configs.ZAMBA2, 2, "mamba2", "MAMBA2_ATTN", GRANITE, groups=1),
    StateCase(configs.FALCON_H1, 2, "mamba2", "MAMBA2_ATTN", FALCON, groups=1),
    StateCase(configs.NEMOTRON_H, 8, "mamba2", "MAMBA2_ATTN", NEMOTRON, groups=8),
    StateCase(configs.JAMBA, 2, "mamba1", "MAMBA1_ATTN", JAMBA),
    StateCase(configs.LFM2, 2, "conv", "SHORT_CONV_ATTN", LFM2, kernel=3),
    StateCase(configs.KIMI_LINEAR, 2, "kda", "KIMI_K3_KDA", KDA),
]


def hybrid(case: StateCase, folder: Path) -> Model:
    """Return the model that ``kvferry plan`` reads from a case's config."""
    return read_model(Path(write_config(folder, case.config)))


def asked_state(case: StateCase, model: Model, block_size: int) -> dict[str, Any]:
    """Return what ``vllm_facts.py`` is asked about a case."""
    assert model.state is not None
    asked = case._asdict()
    del asked["config"]
    return asked | {
        "dtypes": [model.state.input_dtype, model.state.dtype][: 1 + bool(model.state.heads)],
        "mla": model.latent,
        "kv_heads": max(1, model.kv_heads // case.tp),
        "head_size": sum(model.parts.values()) // (1 if model.latent else 2),
        "block_size": block_size,
    }


BLOCK_SIZES = [16, 24, 64]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("hybrids")
    asked = {
        "states": [
            asked_state(case, hybrid(case, folder), block_size)
            for case in STATES
            for block_size in BLOCK_SIZES
        ],
        "kernels": ORDERS_OF_WHOLE_BLOCKS,
        "windows": WINDOWS,
        "pipelines": PIPELINES,
        "backends": [*ABLE, *UNABLE],
    }
    script = Path(__file__).with_name("vllm_facts.py")
    command = [sys.executable, str(script), json.dumps(asked)]
    # Without what other tests set for engines, such as the order of a state's dimensions.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    run = subprocess.run(
        command, env=plain, capture_output=True, text=True, check=False, timeout=110
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def model(windows: list[int]) -> Model:
    """Return a model with a layer for each window, or with a state for -1."""
    states = tuple(n for n, window in enumerate(windows) if window < 0)
    small = RecurrentState(
        channels=(), columns=0, heads=1, elements=1, input_dtype="bfloat16", dtype="bfloat16"
    )
    return Model(
        layers=len(windows),
        windows={n: window for n, window in enumerate(windows) if window >= 0},
        attention_heads=24,
        kv_heads=HEADS,
        parts={"k": HEAD, "v": HEAD},
        dtype="bfloat16",
        states=states,
        state=small if states else None,
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
        if f.key.endswith(("/k", "/ssm")):
            groups.setdefault(f.group, []).append(int(f.key.split(".")[1]))
    assert list(groups.values()) == facts["groups"][case]


@pytest.mark.parametrize("index", range(len(STATES)))
def test_states_match_the_connector_and_vllm(
    facts: dict[str, Any], tmp_path: Path, index: int
) -> None:
    case = STATES[index]
    described = hybrid(case, tmp_path)
    layout = make_engine(described, PlanSettings(tp=case.tp), 16).ranks[-1]
    first = f"layers.{described.states[0]}.mixer"
    mine = [
        [
            f.key.replace(first, "layers.0.mixer"),
            f.offset,
            f.unit,
            f.dtype,
            list(f.shard_range),
            [[[d.extent, d.stride] for d in axis] for axis in (f.shard, *f.inner)],
        ]
        for f in layout.fields
        if f.key.startswith(f"{first}/")
    ]
    assert mine == facts["states"][index * len(BLOCK_SIZES)]["fields"]


@pytest.mark.parametrize("index", range(len(STATES)))
def test_block_sizes_of_hybrids_match_vllm(
    facts: dict[str, Any], tmp_path: Path, index: int
) -> None:
    case = STATES[index]
    described = hybrid(case, tmp_path)
    mine = [
        fit_states(described, PlanSettings(tp=case.tp, block_size=size)).block_size
        for size in BLOCK_SIZES
    ]
    start = index * len(BLOCK_SIZES)
    found = facts["states"][start : start + len(BLOCK_SIZES)]
    assert mine == [one["block_size"] for one in found]


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
