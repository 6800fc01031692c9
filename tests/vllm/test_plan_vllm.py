"""The engines of ``kvferry plan`` match the installed vLLM."""

from __future__ import annotations

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
from kvferry.cli.plan.model import Model, RecurrentState, read_model
from kvferry.cli.plan.report import BACKENDS, PREFERRED
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


@pytest.fixture(scope="module")
def facts() -> Any:
    """What vLLM says; importing it changes the process."""
    from tests.vllm import vllm_facts

    return vllm_facts


def spec_of(facts: Any, case: StateCase, model: Model) -> Any:
    """Return vLLM's spec of a case's states."""
    assert model.state is not None
    dtypes = [model.state.input_dtype, model.state.dtype][: 1 + bool(model.state.heads)]
    return facts.state_spec(case.kind, case.tp, dtypes, case.arguments)


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


@pytest.mark.parametrize(
    ("order", "kernel"),
    [*[(order, 0) for order in ORDERS], *[(order, KERNEL) for order in ORDERS_OF_WHOLE_BLOCKS]],
)
def test_strides_of_pages_and_kernel_blocks(facts: Any, order: str, kernel: int) -> None:
    keys = [f for f in make_test_engine(order, kernel).ranks[0].fields if f.key.endswith("/k")]
    found = facts.places(order, kernel or None)
    assert [offset_and_strides(f) for f in keys] == [place[:4] for place in found]
    assert {axis_length(f.tokens) for f in keys} == {TOKENS}


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_cache_groups(facts: Any, windows: list[int]) -> None:
    [layout] = make_engine(model(windows), PlanSettings(), 16).ranks
    groups: dict[int, list[int]] = {}
    for f in layout.fields:
        if f.key.endswith(("/k", "/ssm")):
            groups.setdefault(f.group, []).append(int(f.key.split(".")[1]))
    assert list(groups.values()) == facts.groups(windows)


def placed(f: Field) -> tuple[object, ...]:
    """Return what says where a field's elements are."""
    return f.offset, f.unit, f.dtype, f.shard_range, f.shard, f.inner


@pytest.mark.parametrize("case", STATES, ids=[f"{case.kind}-{case.tp}" for case in STATES])
def test_states(facts: Any, tmp_path: Path, case: StateCase) -> None:
    """Fields of a state, and the size of blocks that hold one, as the connector and vLLM say."""
    described = hybrid(case, tmp_path)
    spec = spec_of(facts, case, described)
    layout = make_engine(described, PlanSettings(tp=case.tp), 16).ranks[-1]
    first = f"layers.{described.states[0]}.mixer/"
    mine = {f.key.removeprefix(first): placed(f) for f in layout.fields if f.key.startswith(first)}
    found = facts.state_fields_of(case.backend, case.groups, case.kernel, spec, case.tp)
    assert mine == {f.key.removeprefix("layers.0.mixer/"): placed(f) for f in found}
    for size in (16, 24, 64):
        aligned = facts.aligned_block_size(
            spec,
            size,
            mla=described.latent,
            kv_heads=max(1, described.kv_heads // case.tp),
            head_size=sum(described.parts.values()) // (1 if described.latent else 2),
        )
        settings = PlanSettings(tp=case.tp, block_size=size)
        assert fit_states(described, settings).block_size == aligned, size


@pytest.mark.parametrize(("layers", "pp"), PIPELINES)
def test_pipeline_stages(facts: Any, layers: int, pp: int) -> None:
    ranks = make_engine(model([0] * layers), PlanSettings(pp=pp), 16).ranks
    found = [sorted({int(f.key.split(".")[1]) for f in layout.fields}) for layout in ranks]
    assert [[stage[0], stage[-1] + 1] for stage in found] == facts.stages(layers, pp)
    assert list(chain(*found)) == list(range(layers))


@pytest.mark.parametrize("layout", BACKENDS)
def test_advice_about_attention_backends(facts: Any, layout: str) -> None:
    taken = {name: facts.orders(name) for name in (*ABLE, *UNABLE)}
    assert [name for name, orders in taken.items() if orders is None or layout in orders] == ABLE
    can, cannot = BACKENDS[layout].split("; ")
    assert all(name in can for name in ABLE)
    assert all(name in cannot for name in UNABLE)


def test_order_that_the_connector_asks_for_is_named() -> None:
    source = (Path(kvferry.__file__).parent / "integrations/vllm/connector.py").read_text()
    assert f'PREFERRED_LAYOUT = "{PREFERRED}"' in source
