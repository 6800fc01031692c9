"""The engines of ``kvferry plan`` are those that the installed vLLM makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest

from kvferry.cli.plan.engines import ORDERS, WHOLE, PlanSettings, fit_states, make_engine
from kvferry.cli.plan.model import Model, RecurrentState, read_model
from kvferry.core.layout import Field, Layout
from kvferry.integrations.vllm.caches.pages import LayerFacts
from tests.cli import hybrid_configs as configs
from tests.cli.plan_command import TINY, write_config
from tests.vllm.geometry.engine_of_ranks import Shape, layouts
from tests.vllm.geometry.model import Attention, Latent, Layer, Part, Setting

HEADS, HEAD, TOKENS, PROMPT = 4, 8, 16, 1024


@dataclass(frozen=True, kw_only=True)
class State(Layer):
    """A layer with a state of one number, or with vLLM's sizes of a kind of state."""

    shapes: Any = ((1,),)
    dtypes: tuple[str, ...] = ("bfloat16",)
    groups: int = 0
    kernel: int = 0

    @property
    def types(self) -> Any:
        import torch

        return tuple(getattr(torch, name) for name in self.dtypes)

    def spec(self, setting: Setting) -> Any:
        from vllm.v1.kv_cache_interface import MambaSpec

        return MambaSpec(shapes=self.shapes, dtypes=self.types, block_size=setting.state_block)

    def facts(self, setting: Setting) -> LayerFacts:
        return LayerFacts(backend=self.backend, groups=self.groups, kernel=self.kernel)

    def parts(self, cache: Any, spec: Any, setting: Setting, pages: int) -> Iterator[Part]:
        raise NotImplementedError


def model(windows: Sequence[int]) -> Model:
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


def in_vllm(windows: Sequence[int]) -> list[Layer]:
    return [
        State(name=f"layers.{n}.mixer")
        if window < 0
        else Attention(name=f"layers.{n}.attn", heads=HEADS, size=HEAD, window=window)
        for n, window in enumerate(windows)
    ]


def both(
    described: Model, layers: Sequence[Layer], settings: PlanSettings
) -> Iterator[tuple[Layout, Layout]]:
    """Yield each rank as planned, and as vLLM lays it out."""
    planned = make_engine(described, settings, PROMPT).ranks
    shape = Shape(
        tp=settings.tp,
        pp=settings.pp,
        block=settings.block_size,
        kernel=settings.kernel_block,
        order=settings.layout,
        blocks=max(f.pages for rank in planned for f in rank.fields),
    )
    return zip(planned, layouts(layers, shape), strict=True)


def place(f: Field) -> tuple[object, ...]:
    """Return what says where a field's bytes are, and which these are."""
    axes = [[dim for dim in axis if dim.extent > 1] for axis in (f.tokens, f.shard, *f.inner)]
    return f.key, f.group, f.offset, f.page_stride, f.pages, f.dtype, f.unit, f.shard_range, axes


@pytest.mark.parametrize(
    ("windows", "settings"),
    [
        *(([0] * 3, {"layout": order}) for order in ORDERS),
        *(
            ([0] * 3, {"layout": order, "kernel_block": 4})
            for order in ORDERS
            if order.startswith(WHOLE)
        ),
        *(([0] * 3, {"tp": tp}) for tp in (2, 8)),
        *(
            ([0] * layers, {"pp": pp})
            for layers, pp in [(10, 3), (61, 4), (61, 8), (80, 4), (5, 5), (7, 2), (30, 7)]
        ),
        ([20, 20, 0, 20, 20, 0, 20], {}),
        ([0, 20, 0, 20, 0], {}),
        ([*[20] * 5, 0, *[20] * 5, 0], {}),
        ([0, 20, 20, 20, 20], {}),
    ],
)
def test_pages(windows: list[int], settings: dict[str, Any]) -> None:
    for planned, laid_out in both(model(windows), in_vllm(windows), PlanSettings(**settings)):
        assert sorted(map(place, planned.fields)) == sorted(map(place, laid_out.fields))
        assert planned.groups == laid_out.groups


@pytest.mark.parametrize("windows", [[-1, -1, -1, 0] * 4, [-1, 0, 20, 20, -1, 0, 20, 20]], ids=str)
def test_groups_with_states(windows: list[int]) -> None:
    for planned, laid_out in both(model(windows), in_vllm(windows), PlanSettings()):
        assert layers_of_groups(planned) == layers_of_groups(laid_out)


def layers_of_groups(layout: Layout) -> list[list[str]]:
    groups = defaultdict[int, set[str]](set)
    for f in layout.fields:
        groups[f.group].add(f.key.partition("/")[0])
    return [sorted(groups[group]) for group in sorted(groups)]


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_pages_of_an_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, order: str) -> None:
    import vllm.v1.worker.utils  # noqa: F401  # it would import what only a GPU's build has
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_cuda", lambda: True)  # CPUs have no such backends
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 64}
    content = TINY | {"model_type": "deepseek_v32", "num_hidden_layers": 2, **sizes}
    described = read_model(Path(write_config(tmp_path, content)))
    latent: dict[str, Any] = {"size": 576, "backend": "FLASHMLA_SPARSE"}
    index: dict[str, Any] = {"size": 132, "backend": "DEEPSEEK_V32_INDEXER", "dtype": "uint8"}
    layers: list[Layer] = [
        *(Latent(name=f"layers.{n}.attn", **latent) for n in range(2)),
        *(Latent(name=f"layers.{n}.indexer", **index) for n in range(2)),
    ]
    for planned, laid_out in both(described, layers, PlanSettings(block_size=32, layout=order)):
        assert sorted(map(place, planned.fields)) == sorted(map(place, laid_out.fields))


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
NEMOTRON = GRANITE | {"intermediate_size": 8192, "n_groups": 8, "num_heads": 128}
FALCON = GRANITE | {"intermediate_size": 1536, "num_heads": 24}
JAMBA = {"intermediate_size": 8192, "state_size": 16, "conv_kernel": 4}
LFM2 = {"intermediate_size": 2048, "conv_kernel": 3}
KDA = {"num_heads": 32, "head_dim": 128, "conv_kernel_size": 4}
STATES = [
    StateCase(configs.QWEN3_NEXT, 2, "gated_delta_net", "GDN_ATTN", DELTA_NET),
    StateCase(configs.QWEN3_5, 4, "gated_delta_net", "GDN_ATTN", DELTA_NET),
    StateCase(configs.GRANITE, 4, "mamba2", "MAMBA2_ATTN", GRANITE, groups=1),
    StateCase(configs.ZAMBA2, 2, "mamba2", "MAMBA2_ATTN", GRANITE, groups=1),
    StateCase(configs.FALCON_H1, 2, "mamba2", "MAMBA2_ATTN", FALCON, groups=1),
    StateCase(configs.NEMOTRON_H, 8, "mamba2", "MAMBA2_ATTN", NEMOTRON, groups=8),
    StateCase(configs.JAMBA, 2, "mamba1", "MAMBA1_ATTN", JAMBA),
    StateCase(configs.LFM2, 2, "short_conv", "SHORT_CONV_ATTN", LFM2, kernel=3),
    StateCase(configs.KIMI_LINEAR, 2, "kda", "KIMI_K3_KDA", KDA),
]


def layer_of(case: StateCase, state: RecurrentState, name: str) -> State:
    """Return the case's layer of a state, with the sizes that vLLM computes for a rank."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    sizes = getattr(MambaStateShapeCalculator, f"{case.kind}_state_shape")
    return State(
        name=name,
        backend=case.backend,
        shapes=sizes(tp_world_size=case.tp, **case.arguments),
        dtypes=(state.input_dtype, state.dtype)[: 1 + bool(state.heads)],
        groups=case.groups,
        kernel=case.kernel,
    )


@pytest.mark.parametrize("case", STATES, ids=[f"{case.kind}-{case.tp}" for case in STATES])
def test_states(tmp_path: Path, case: StateCase) -> None:
    """Fields of a state, and the size of blocks that hold one."""
    described = read_model(Path(write_config(tmp_path, case.config)))
    assert described.state is not None
    layer = layer_of(case, described.state, f"layers.{described.states[0]}.mixer")
    planned = make_engine(described, PlanSettings(tp=case.tp), 16).ranks[-1]
    [*_, laid_out] = layouts([layer], Shape(tp=case.tp, blocks=planned.fields[0].pages))
    mine = [f for f in planned.fields if f.key.startswith(f"{layer.name}/")]
    assert [in_page(f) for f in mine] == [in_page(f) for f in laid_out.fields]
    for size in (16, 24, 64):
        settings = PlanSettings(tp=case.tp, block_size=size)
        assert fit_states(described, settings).block_size == aligned(described, layer, settings)


def in_page(f: Field) -> tuple[object, ...]:
    return f.key, f.offset, f.unit, f.dtype, f.shard_range, f.shard, f.inner


def aligned(described: Model, layer: State, settings: PlanSettings) -> int:
    """Return the block size to which vLLM enlarges pages of attention for states."""
    import torch
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backend import MultipleOf

    cache = SimpleNamespace(
        cache_dtype="auto",
        block_size=settings.block_size,
        mamba_cache_mode="none",
        mamba_page_size_padded=None,
    )
    heads = max(1, described.kv_heads // settings.tp)
    size = sum(described.parts.values()) // (1 if described.latent else 2)
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        use_mla=described.latent,
        architecture="",
        get_num_kv_heads=lambda parallel: heads,
        get_head_size=lambda: size,
    )
    config: Any = SimpleNamespace(cache_config=cache, model_config=model, parallel_config=None)
    states = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda config: layer.shapes,
        get_mamba_state_dtype_from_config=lambda config: layer.types,
    )
    backend: Any = SimpleNamespace(
        get_supported_kernel_block_sizes=lambda: [MultipleOf(16)], customize_spec=lambda spec: spec
    )
    resolve = "vllm.model_executor.models.ModelRegistry.resolve_model_cls"
    with (
        mock.patch(resolve, return_value=(states, "")),
        mock.patch("vllm.config.vllm.set_current_vllm_config", nullcontext),
        mock.patch.object(Platform, "_find_non_ssm_backends", return_value=[backend]),
    ):
        Platform._align_hybrid_block_size(config, backend)
    return int(cache.block_size)


@pytest.mark.parametrize("name", ["FLASH_ATTN", "TRITON_ATTN"])
def test_backends_that_store_the_layers_of_a_block_together(name: str) -> None:
    """``docs/drivers.md`` and ``kvferry doctor`` name them."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    orders = AttentionBackendEnum[name].get_class().supported_kv_cache_layouts()
    assert orders is None or "BLHNC" in [order.name for order in orders]
