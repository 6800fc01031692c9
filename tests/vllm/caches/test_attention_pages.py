"""What the packings say about a page is what the backends' own expressions say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from kvferry.core.errors import LayoutError
from kvferry.core.layout import ContextParallel, GroupKind
from kvferry.integrations.vllm import versions
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
    Rank([group(TWO, full())], backends="FLASH_ATTN")  # vLLM chooses imports by the platform
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


def interleaved_by_triton(cache: Any, spec: Any) -> dict[str, Any]:
    """``tgt_idx_k`` and ``tgt_idx_v`` of ``reshape_and_cache_kernel_flash`` in vLLM 0.33's
    ``ops/triton_reshape_and_cache_flash.py``, in elements from the beginning of a block's K or V.
    """
    import torch

    blocks, _, tokens, content = cache.shape
    heads, size, pack = spec.num_kv_heads, spec.head_size, 16 // spec.dtype.itemsize
    token, head, dim = torch.meshgrid(
        torch.arange(tokens), torch.arange(heads), torch.arange(size), indexing="ij"
    )
    of_head = head * size * tokens
    key = of_head + dim // pack * (tokens * pack) + token * pack + dim % pack
    value = of_head + token // pack * (size * pack) + dim * pack + token % pack
    planes_of = cache.reshape(blocks, 2, tokens * content)
    return {"k": planes_of[:, 0][:, key], "v": planes_of[:, 1][:, value]}


def record(cache: Any, spec: Any) -> dict[str, Any]:
    """The head of csrc/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu, V4.1."""
    rows = cache.transpose(1, 2)
    return {"latent": rows[..., :512], "scale": rows[..., 512:]}


class Page(NamedTuple):
    """A backend, a spec of a layer, and how the backend reads that layer's pages."""

    backend: str
    make: Any  # the spec, with these options
    options: dict[str, Any]
    reading: Reading
    orders: Sequence[str]
    kernels: list[int] | None = None  # tokens of a kernel's block


UNCUT, BY_HEAD, FIRST = ("LBHNC", "LBNHC", "BLHNC", "BLNHC"), ("LBHNC", "LHBNC"), ("LBHNC",)
WHOLE = "BLHNC", "BLNHC"
FP8, NVFP4 = {"quant": "FP8_PER_TENSOR"}, {"quant": "NVFP4"}
SPARSE = {"state_content_bytes": 656, **FP8}
SCALED = {"state_content_bytes": 2 * (64 + 4)}
"""Per-token-head scales stand behind the values of each half, and move with them."""
CUT = {"block_size": 128}
PAGES = [
    Page("FLASH_ATTN", full, {"page_size_padded": 28672}, views.split_cells, UNCUT),
    Page(
        "FLASH_ATTN_DIFFKV", full, {"head_size": 192, "head_size_v": 128}, views.split_cells, ORDERS
    ),
    # ``_gqa_sparse_fwd_kernel`` of ``minimax_m3/common/ops/sparse_attn.py`` finds K by the
    # strides of (block, head, position, element), and V ``head_dim`` elements further on.
    Page("MINIMAX_M3_SPARSE", full, {"head_size": 128}, views.split_cells, ORDERS),
    *(
        Page("TRITON_ATTN", full, {"quant": mode, **more}, views.split_cells, ORDERS)
        for mode, more in [
            ("FP8_PER_TENSOR", {}),
            ("INT8_PER_TOKEN_HEAD", SCALED),
            ("FP8_PER_TOKEN_HEAD", SCALED),
        ]
    ),
    *(
        Page(backend, planes, {"dtype": dtype}, reading, BY_HEAD)
        for backend, reading in [
            ("ROCM_ATTN", views.paged_attention),
            ("ROCM_ATTN/interleaved V", interleaved_by_triton),
        ]
        for dtype in ("bfloat16", "float32", "uint8")
    ),
    *(
        Page("FLASH_ATTN", planes, {"block_size": size}, views.shuffled, BY_HEAD)
        for size in (16, 32)
    ),
    *(
        Page(f"CPU_ATTN/{kernel}", full, {"dtype": dtype}, views.columns, FIRST)
        for kernel in ("vec", "vec16")
        for dtype in ("float32", "bfloat16")
    ),
    *(
        Page("CPU_ATTN/amx", full, {"block_size": size, **more}, views.amx, FIRST)
        for size in (32, 96)
        for more in ({}, FP8)
    ),
    # Rows with scales inside.
    Page("FLASHMLA_SPARSE", mla, SPARSE, views.one_row, ORDERS),
    Page(
        "FLASHMLA_SPARSE",
        mla,
        {"quant": "NVFP4_DS_MLA", "state_content_bytes": 352},
        views.one_row,
        ORDERS,
    ),
    # A page is the scheduler's block, of which the kernels make four.
    *(
        Page(backend, make, CUT, reading, orders, [32])
        for backend, make, reading, orders in [
            ("FLASHINFER", full, views.split_cells, ("LBHNC", "LBNHC")),
            ("CPU_ATTN/vec", full, views.columns, FIRST),
            ("FLASHMLA", mla, views.one_row, ("LBHNC", "LBNHC")),
            ("B12X", planes, views.unbound, FIRST),
            ("ROCM_ATTN", planes, views.paged_attention, FIRST),
            ("FLASH_ATTN", planes, views.shuffled, FIRST),
        ]
    ),
    # Of vLLM 0.33, by its source.
    Page("FLASH_ATTN_MLA_SPARSE_FA4", mla, {}, views.one_row, ORDERS),
    Page("STEP5_DSA", full, {}, views.split_cells, ORDERS),
]


def compressed(content: int, **more: Any) -> dict[str, Any]:
    """Several tokens per entry, and pages padded to an alignment."""
    shape = {"block_size": 256, "tokens_per_state": 4, "alignment": 576}
    return {**shape, **FP8, "state_content_bytes": content, **more}


def sliding(alignment: int | None, content: int = 528) -> dict[str, Any]:
    """A cache of the sliding window of DeepSeek V4 or V4.1."""
    strides = {"alignment": 512, "block_stride_alignment": alignment}
    return {**FP8, **strides, "state_content_bytes": content}


CUDA_PAGES = [
    # Scales behind all values.
    *(
        Page(backend, mla, compressed(content), views.values_then_scales(value), WHOLE)
        for backend, content, value in [
            ("FLASHMLA_SPARSE_DSV4", 584, 576),
            ("DEEPSEEK_SPARSE_SWA", 584, 576),
            ("DEEPSEEK_SPARSE_SWA", 528, 512),
            ("DEEPSEEK_V4_INDEXER", 132, 128),
            ("DEEPSEEK_V4_INDEXER", 68, 64),
        ]
    ),
    Page(
        "FLASHINFER_MLA_SPARSE_DSV4",
        mla,
        {"block_size": 256, "tokens_per_state": 4, "head_size": 512},
        views.one_row,
        WHOLE[:1],
    ),
    # Rows of DeepSeek V4.1 are records in vLLM 0.33; others have their scales behind all values.
    *(
        Page("DEEPSEEK_SPARSE_SWA", mla, sliding(alignment), record, WHOLE)
        for alignment in (528, 6 * 528)
    ),
    *(
        Page(
            "DEEPSEEK_SPARSE_SWA",
            mla,
            sliding(alignment, content),
            views.values_then_scales(value),
            WHOLE[:1],
        )
        for alignment, content, value in [(None, 528, 512), (512, 528, 512), (584, 584, 576)]
    ),
]


def name_of(page: Page) -> str:
    return " ".join(map(str, (page.backend, *page.options.values(), *(page.kernels or ()))))


def check(page: Page) -> None:
    for order in page.orders:
        spec = page.make(**page.options)
        rank = Rank([group(TWO, spec)], order, backends=page.backend, kernels=page.kernels)
        assert rank.wrong(page.reading) == [], order
        assert {f.tokens_per_state for f in rank.layout.fields} == {spec.tokens_per_state}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_expressions_of_backends(page: Page) -> None:
    check(page)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("page", CUDA_PAGES, ids=name_of)
def test_expressions_of_backends_on_cuda(page: Page) -> None:
    check(page)


INDEXED = "model.layers.0.self_attn.attn", "model.layers.0.self_attn.indexer.k_cache"


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("specs", "backends", "readings"),
    [
        (
            {"a": full, "b": {"num_kv_heads": 1, "head_size": 128}, "c": {"head_size": 32}},
            dict.fromkeys("abc", "FLASH_ATTN"),
            dict.fromkeys("abc", views.split_cells),
        ),
        # A latent of a drafter.
        (
            {"a": full, "b": full, "draft": mla},
            {"a": "FLASH_ATTN", "b": "FLASH_ATTN", "draft": "FLASHMLA"},
            {"a": views.split_cells, "b": views.split_cells, "draft": views.one_row},
        ),
        # An indexer with scales behind.
        (
            dict.fromkeys(INDEXED, mla) | {INDEXED[1]: {"head_size": 132, "dtype": "uint8"}},
            dict(zip(INDEXED, ("FLASHMLA_SPARSE", "DEEPSEEK_V32_INDEXER"), strict=True)),
            dict(zip(INDEXED, (views.one_row, views.values_then_scales(128)), strict=True)),
        ),
    ],
    ids=["heads", "draft", "indexer"],
)
def test_layers_of_unlike_sizes_in_one_group(
    specs: dict[str, Any], backends: dict[str, str], readings: Mapping[str, Reading]
) -> None:
    make = mla if specs.get(INDEXED[0]) is mla else full
    made = {n: each() if callable(each) else make(**each) for n, each in specs.items()}
    for order in UNCUT:
        rank = Rank([group(made, uniform(made))], order, backends=backends)
        assert rank.wrong(readings) == [], order


def test_context_parallel_ranks_divide_the_tokens_of_the_groups_that_say_so() -> None:
    """A drafter may keep all tokens on each rank."""
    position = ShardPosition(dcp=1, dcp_size=2, interleave=16)
    groups = [group(["a"], full()), group(["b"], full(dcp_sharded=False))]
    found = Rank(groups, backends="FLASH_ATTN", position=position).layout.groups
    assert [each.context for each in found] == [
        ContextParallel(size=2, rank=1, interleave=16),
        ContextParallel(),
    ]


def test_cross_layer_sharing_is_described_once() -> None:
    rank = Rank([group(["a", "b"], full())], backends="FLASH_ATTN", shared={"c": "b"})
    assert [f.key for f in rank.layout.fields] == ["a/k", "a/v", "b/k", "b/v"]
    assert rank.wrong(views.split_cells) == []


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
        ("ROCM_ATTN/interleaved V", planes, {"block_size": 20}),  # 8 tokens stand together
        ("ROCM_ATTN", planes, {"head_size": 36, "state_content_bytes": 3 * 36 * 2}),
        ("TRITON_MLA", full, {}),
        # As on processors that are not NVIDIA's.
        ("DEEPSEEK_V32_INDEXER", mla, {"head_size": 132, "dtype": "uint8"}),
        ("FLASHMLA_SPARSE_DSV4", mla, {}),
        ("DEEPSEEK_SPARSE_SWA", mla, sliding(528)),
        ("MINIMAX_M3_SPARSE", planes, {}),  # where AITER runs; the planes' inside was not read
    ],
)
def test_what_is_not_certain_is_opaque(backend: str, make: Any, options: dict[str, Any]) -> None:
    spec = make(**options)
    rank = Rank([group(TWO, spec)], "BLHNC", backends=backend)
    assert rank.layout.groups[0].kind is GroupKind.OPAQUE
    assert [f.key for f in rank.layout.fields] == [f"{name}/page" for name in TWO]
    assert {f.unit for f in rank.layout.fields} == {spec.page_size_bytes}
    assert all(f.packing.startswith(f"{backend} ") for f in rank.layout.fields)


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


def test_opaque_pages_of_unlike_orders_or_releases_do_not_match(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or of unlike processors: what is not known may depend on all of them."""

    def packing(order: str) -> str:
        return Rank([group(TWO, full())], order, backends="X").layout.fields[0].packing

    assert packing("LBHNC") == "X bfloat16 1x3x32x128/8192x256x2 cpu"
    assert packing("LBNHC") == "X bfloat16 1x3x32x128/256x768x2 cpu"
    monkeypatch.setattr(versions, "vllm_version", lambda: "0.33.0")
    assert packing("LBNHC") == "X bfloat16 1x3x32x128/256x768x2 cpu vLLM 0.33"


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_opaque_pages_in_several_pieces_are_refused(order: str) -> None:
    with pytest.raises(LayoutError, match=r"not described.*VLLM_KV_CACHE_LAYOUT"):
        Rank([group(TWO, full())], order, backends="X")


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("packed", "size", "encoding"),
    [(True, 132, "scale in 4 bytes of UE8M0"), (False, 132, ""), (True, 68, ""), (None, 132, "")],
)
def test_the_format_of_an_indexer_s_scale_is_named(
    packed: bool | None, size: int, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with one float32 per row and one with four bytes must not exchange rows."""
    from vllm.utils import deep_gemm

    monkeypatch.delattr(deep_gemm, "mqa_logits_use_mx_scales", raising=False)
    if packed is not None:
        monkeypatch.setattr(deep_gemm, "mqa_logits_use_mx_scales", lambda: packed, raising=False)
    spec = mla(head_size=size, dtype="uint8")
    rank = Rank([group(TWO, spec)], "BLHNC", backends="DEEPSEEK_V32_INDEXER")
    assert rank.wrong(views.values_then_scales({132: 128, 68: 64}[size])) == []
    encodings = {f.key.rpartition("/")[2]: f.encoding for f in rank.layout.fields}
    assert encodings == {"latent": "", "scale": encoding}
