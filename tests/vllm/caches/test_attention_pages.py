"""What the packings say about a page is what the backends' own expressions say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvferry.core.errors import LayoutError
from kvferry.core.layout import GroupKind
from kvferry.integrations.vllm.caches.attention_pages import PACKINGS
from kvferry.integrations.vllm.caches.pages import ShardPosition
from tests.vllm.caches import census, views
from tests.vllm.caches.layers import ORDERS, TWO, full, mla, planes, uniform
from tests.vllm.caches.views import Rank, Reading, group

HALVES = [name for name, known in PACKINGS.items() if known is PACKINGS["FLASHINFER"]]
PLANES = [name for name, known in PACKINGS.items() if known is PACKINGS["B12X"]]
ROWS = [name for name, known in PACKINGS.items() if known is PACKINGS["TRITON_MLA"]]


def orders_of(backend: str) -> tuple[str, ...]:
    """Those that vLLM offers with it."""
    named = next(b.orders for b in census.backends() if b.name == backend)
    return ORDERS if census.ANY[0] in named else named


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM ran on an NVIDIA GPU, for what holds only there."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_cuda", lambda: True)


@pytest.mark.parametrize(
    ("backend", "spec", "reading"),
    [
        *[(name, full, views.split_cells) for name in ("FLASH_ATTN", *HALVES)],
        *[(name, planes, views.unbound) for name in PLANES],
        *[(name, mla, views.one_row) for name in ROWS],
    ],
)
def test_every_order_that_vllm_offers(backend: str, spec: Any, reading: Reading) -> None:
    for order in orders_of(backend):
        rank = Rank([group(TWO, spec())], order, backends=backend)
        assert rank.wrong(reading) == [], order
        assert rank.layout.groups[0].kind is GroupKind.PAGED


UNCUT, BY_HEAD = ("LBHNC", "LBNHC", "BLHNC", "BLNHC"), ("LBHNC", "LHBNC")
FP8, NVFP4 = {"quant": "FP8_PER_TENSOR"}, {"quant": "NVFP4"}


@pytest.mark.parametrize(
    ("backend", "spec", "reading", "orders"),
    [
        (
            "FLASH_ATTN",
            (full, {"page_size_padded": 3 * 32 * 128 * 2 + 4096}),
            views.split_cells,
            UNCUT,
        ),
        (
            "FLASH_ATTN_DIFFKV",
            (full, {"head_size": 192, "head_size_v": 128}),
            views.split_cells,
            ORDERS,
        ),
        # ``_gqa_sparse_fwd_kernel`` of ``minimax_m3/common/ops/sparse_attn.py`` finds K by the
        # strides of (block, head, position, element), and V ``head_dim`` elements further on.
        ("MINIMAX_M3_SPARSE", (full, {"head_size": 128}), views.split_cells, ORDERS),
        ("ROCM_ATTN", (planes, {}), views.paged_attention, BY_HEAD),
        ("ROCM_ATTN", (planes, {"dtype": "float32"}), views.paged_attention, BY_HEAD),
        ("ROCM_ATTN", (planes, {"dtype": "uint8"}), views.paged_attention, BY_HEAD),
        ("FLASH_ATTN", (planes, {"block_size": 16}), views.shuffled, BY_HEAD),
        ("FLASH_ATTN", (planes, {"block_size": 32}), views.shuffled, BY_HEAD),
        ("CPU_ATTN/vec", (full, {"dtype": "float32"}), views.columns, ["LBHNC"]),
        ("CPU_ATTN/vec", (full, {}), views.columns, ["LBHNC"]),
        ("CPU_ATTN/vec16", (full, {"dtype": "float32"}), views.columns, ["LBHNC"]),
        ("CPU_ATTN/vec16", (full, {}), views.columns, ["LBHNC"]),
        ("CPU_ATTN/amx", (full, {"block_size": 32}), views.amx, ["LBHNC"]),
        ("CPU_ATTN/amx", (full, {"block_size": 96}), views.amx, ["LBHNC"]),
        ("CPU_ATTN/amx", (full, {"block_size": 32, **FP8}), views.amx, ["LBHNC"]),
        ("CPU_ATTN/amx", (full, {"block_size": 96, **FP8}), views.amx, ["LBHNC"]),
        # Rows with scales inside.
        ("FLASHMLA_SPARSE", (mla, {**FP8, "state_content_bytes": 656}), views.one_row, ORDERS),
        (
            "FLASHMLA_SPARSE",
            (mla, {"quant": "NVFP4_DS_MLA", "state_content_bytes": 352}),
            views.one_row,
            ORDERS,
        ),
    ],
)
def test_expressions_of_backends(
    backend: str, spec: tuple[Any, dict[str, Any]], reading: Reading, orders: Sequence[str]
) -> None:
    make, options = spec
    for order in orders:
        rank = Rank([group(TWO, make(**options))], order, backends=backend)
        assert rank.wrong(reading) == [], order


@pytest.mark.parametrize("mode", ["FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD"])
@pytest.mark.parametrize("order", ORDERS)
def test_quantized_halves(order: str, mode: str) -> None:
    """Per-token-head scales stand behind the values of each half, and move with them."""
    scales: dict[str, Any] = {}
    if mode.endswith("TOKEN_HEAD"):
        scales["state_content_bytes"] = 2 * (64 + 4)
    rank = Rank([group(TWO, full(quant=mode, **scales))], order, backends="TRITON_ATTN")
    assert rank.wrong(views.split_cells) == []
    assert {f.dtype for f in rank.layout.fields} == {"uint8"}


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_indexer_with_scales_behind(order: str) -> None:
    """Beside a latent in one group, of unlike page sizes."""
    names = ("model.layers.0.self_attn.attn", "model.layers.0.self_attn.indexer.k_cache")
    specs = dict(zip(names, (mla(), mla(head_size=132, dtype="uint8")), strict=True))
    backends = dict(zip(names, ("FLASHMLA_SPARSE", "DEEPSEEK_V32_INDEXER"), strict=True))
    readings = dict(zip(names, (views.one_row, views.values_then_scales(128)), strict=True))
    rank = Rank([group(names, uniform(specs))], order, backends=backends)
    assert rank.wrong(readings) == []


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("backend", "content", "value"),
    [
        ("FLASHMLA_SPARSE_DSV4", 584, 576),
        ("DEEPSEEK_SPARSE_SWA", 584, 576),
        ("DEEPSEEK_SPARSE_SWA", 528, 512),
        ("DEEPSEEK_V4_INDEXER", 132, 128),
        ("DEEPSEEK_V4_INDEXER", 68, 64),
    ],
)
@pytest.mark.parametrize("order", ["BLHNC", "BLNHC"])
def test_compressed_entries(order: str, backend: str, content: int, value: int) -> None:
    """Several tokens per entry, scales behind all values, and pages padded to an alignment."""
    spec = mla(
        block_size=256,
        tokens_per_state=4,
        alignment=576,
        quant="FP8_PER_TENSOR",
        state_content_bytes=content,
    )
    rank = Rank([group(TWO, spec)], order, backends=backend)
    assert rank.wrong(views.values_then_scales(value)) == []
    assert {f.tokens_per_state for f in rank.layout.fields} == {4}
    assert spec.page_size_bytes > spec.unpadded_page_size_bytes


@pytest.mark.usefixtures("cuda")
def test_plain_rows_of_compressed_entries() -> None:
    spec = mla(block_size=256, tokens_per_state=4, head_size=512)
    rank = Rank([group(TWO, spec)], "BLHNC", backends="FLASHINFER_MLA_SPARSE_DSV4")
    assert rank.wrong(views.one_row) == []


@pytest.mark.parametrize(
    ("order", "backend", "spec", "reading"),
    [
        ("LBHNC", "FLASHINFER", full, views.split_cells),
        ("LBNHC", "FLASHINFER", full, views.split_cells),
        ("LBHNC", "CPU_ATTN/vec", full, views.columns),
        ("LBHNC", "FLASHMLA", mla, views.one_row),
        ("LBNHC", "FLASHMLA", mla, views.one_row),
        ("LBHNC", "B12X", planes, views.unbound),
        ("LBHNC", "ROCM_ATTN", planes, views.paged_attention),
        ("LBHNC", "FLASH_ATTN", planes, views.shuffled),
    ],
)
def test_kernel_blocks(order: str, backend: str, spec: Any, reading: Reading) -> None:
    """A page is the scheduler's block, of which the kernels make four."""
    rank = Rank([group(TWO, spec(block_size=128))], order, backends=backend, kernels=[32])
    assert rank.caches[TWO[0]].shape[0] == 4 * rank.config.num_blocks
    assert rank.wrong(reading) == []


def test_layers_of_unlike_sizes_in_one_group() -> None:
    """Also a latent of a drafter."""
    specs = {"a": full(), "b": full(num_kv_heads=1, head_size=128), "c": full(head_size=32)}
    readings, backends = dict.fromkeys(specs, views.split_cells), dict.fromkeys(specs, "FLASH_ATTN")
    for order in UNCUT:
        rank = Rank([group(specs, uniform(specs))], order, backends=backends)
        assert rank.wrong(readings) == [], order
    specs = {"a": full(), "b": full(), "draft": mla()}
    readings, backends = readings | {"draft": views.one_row}, backends | {"draft": "FLASHMLA"}
    for order in UNCUT:
        rank = Rank([group(specs, uniform(specs))], order, backends=backends)
        assert rank.wrong(readings) == [], order


@pytest.mark.parametrize("order", ORDERS)
def test_groups_that_overlay_each_other(order: str) -> None:
    """Full attention and a sliding window share their bytes, block ids apart."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    window = SlidingWindowSpec(
        block_size=32, num_kv_heads=3, head_size=64, dtype=full().dtype, sliding_window=128
    )
    rank = Rank(
        [group(["a", "b"], full()), group(["c", "d"], window)], order, backends="FLASH_ATTN"
    )
    assert rank.wrong(views.split_cells) == []
    assert len(rank.layout.regions) == 1
    by_key = {f.key: f.offset for f in rank.layout.fields}
    assert by_key["a/k"] == by_key["c/k"]


def test_cross_layer_sharing_is_described_once() -> None:
    rank = Rank([group(["a", "b"], full())], backends="FLASH_ATTN", shared={"c": "b"})
    assert [f.key for f in rank.layout.fields] == ["a/k", "a/v", "b/k", "b/v"]
    assert rank.wrong(views.split_cells) == []


def test_groups_that_are_not_transferred_are_left_out() -> None:
    groups = [group(["a"], full(), enable_kv_transfer=False), group(["b"], full())]
    rank = Rank(groups, backends="FLASH_ATTN")
    assert [(f.key, f.group) for f in rank.layout.fields] == [("b/k", 0), ("b/v", 0)]


@pytest.mark.parametrize(
    ("position", "heads", "expected"),
    [
        (ShardPosition(tp=1, tp_size=2), 6, (3, 6)),
        (ShardPosition(tp=0, tp_size=1), 3, (0, 3)),
    ],
)
def test_heads_of_this_rank(position: ShardPosition, heads: int, expected: tuple[int, int]) -> None:
    rank = Rank([group(TWO, full())], backends="FLASH_ATTN", position=position, heads=heads)
    assert {f.shard_range for f in rank.layout.fields} == {expected}
    latent = Rank([group(TWO, mla())], backends="FLASHMLA", position=position)
    assert {f.shard_range for f in latent.layout.fields} == {(0, 1)}


@pytest.mark.parametrize(
    ("backend", "make", "options"),
    [
        ("NOT_IN_THE_TABLE", full, {}),
        ("CPU_ATTN/neon", full, {}),
        ("CPU_ATTN/amx", full, {"head_size": 40}),
        ("FLASHINFER", full, {**NVFP4, "num_head_slots": 6, "state_content_bytes": 36}),
        ("FLASHINFER", full, NVFP4),
        ("FLASHMLA", mla, NVFP4),
        ("FLASH_ATTN", planes, {"dtype": "uint8", "kv_quant_mode": 1}),
        ("FLASH_ATTN", full, {"head_size_v": 0, "state_content_bytes": 128}),
        ("CPU_ATTN/vec", full, {"head_size_v": 32}),
        ("B12X", full, {}),
        ("ROCM_ATTN", full, {}),
        ("ROCM_ATTN", planes, {"head_size": 36, "state_content_bytes": 3 * 36 * 2}),
        ("TRITON_MLA", full, {}),
        ("DEEPSEEK_V32_INDEXER", mla, {"head_size": 132, "dtype": "uint8"}),
        ("FLASHMLA_SPARSE_DSV4", mla, {}),
        ("MINIMAX_M3_SPARSE", planes, {}),  # where AITER runs; the planes' inside was not read
    ],
)
def test_what_is_not_certain_is_opaque(backend: str, make: Any, options: dict[str, Any]) -> None:
    spec = make(**options)
    rank = Rank([group(TWO, spec)], backends=backend)
    assert rank.layout.groups[0].kind is GroupKind.OPAQUE
    assert [f.key for f in rank.layout.fields] == [f"{name}/page" for name in TWO]
    assert {f.unit for f in rank.layout.fields} == {spec.page_size_bytes}


def test_one_opaque_layer_makes_its_group_opaque() -> None:
    backends = dict(zip(TWO, ("FLASH_ATTN", "NOT_IN_THE_TABLE"), strict=True))
    rank = Rank([group(TWO, full())], backends=backends)
    assert rank.layout.groups[0].kind is GroupKind.OPAQUE


@pytest.mark.usefixtures("cuda")
def test_scales_behind_blocks_that_kernels_may_split_are_opaque() -> None:
    """A block of 512 tokens is two of the kernels', and the tensor does not say so."""
    spec = mla(block_size=512, tokens_per_state=4, head_size=132, dtype="uint8")
    rank = Rank([group(TWO, spec)], "BLHNC", backends="DEEPSEEK_V4_INDEXER")
    assert rank.layout.groups[0].kind is GroupKind.OPAQUE


def test_opaque_pages_of_unlike_orders_do_not_match() -> None:
    """Or of unlike processors or vLLMs: what is not known may depend on all of them."""
    packings = {
        order: Rank([group(TWO, full())], order, backends="X").layout.fields[0].packing
        for order in ("LBHNC", "LBNHC")
    }
    assert packings["LBHNC"] == "X bfloat16 1x3x32x128/8192x256x2 cpu"
    assert packings["LBNHC"] == "X bfloat16 1x3x32x128/256x768x2 cpu"


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_opaque_pages_in_several_pieces_are_refused(order: str) -> None:
    with pytest.raises(LayoutError, match=r"not described.*VLLM_KV_CACHE_LAYOUT"):
        Rank([group(TWO, full())], order, backends="X")
