"""Pages as vLLM 0.33 fills them, by its source: this vLLM has not all of these backends."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from kvferry.core.layout import GroupKind
from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.caches.attention_pages import NEWER_PACKINGS, PACKINGS, unknown
from tests.vllm.caches import recurrent, views
from tests.vllm.caches.layers import ORDERS, TWO, full, mla, planes
from tests.vllm.caches.views import Rank, Reading, group


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM ran on an NVIDIA GPU, for what holds only there."""
    Rank([group(TWO, full())], backends="FLASH_ATTN")  # vLLM chooses imports by the platform
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_cuda", lambda: True)


def test_a_backend_is_in_one_table_only() -> None:
    assert set(NEWER_PACKINGS) & set(PACKINGS) == set()


@pytest.mark.parametrize(
    "backend", [name for name, each in NEWER_PACKINGS.items() if each.fields is unknown]
)
def test_backends_that_were_not_read_are_opaque(backend: str) -> None:
    rank = Rank([group(TWO, full())], backends=backend)
    assert rank.layout.groups[0].kind is GroupKind.OPAQUE
    assert backend in rank.layout.fields[0].packing


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("backend", "spec", "reading"),
    [("FLASH_ATTN_MLA_SPARSE_FA4", mla, views.one_row), ("STEP5_DSA", full, views.split_cells)],
)
def test_backends_that_fill_pages_as_known_ones_do(
    backend: str, spec: Any, reading: Reading, order: str
) -> None:
    assert Rank([group(TWO, spec())], order, backends=backend).wrong(reading) == []


def interleaved_by_triton(cache: Any, spec: Any) -> dict[str, Any]:
    """``tgt_idx_k`` and ``tgt_idx_v`` of ``reshape_and_cache_kernel_flash`` in
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8"])
def test_interleaved_values(dtype: str) -> None:
    """Where vLLM fuses the rotation of keys with the write to the cache; the planner can copy from
    usual values into them."""
    rank, usual = (
        Rank([group(TWO, planes(dtype=dtype))], backends=backend)
        for backend in ("ROCM_ATTN/interleaved V", "ROCM_ATTN")
    )
    assert rank.wrong(interleaved_by_triton) == []
    assert [f.key for f in usual.layout.fields] == [f.key for f in rank.layout.fields]
    assert [f.inner for f in usual.layout.fields] != [f.inner for f in rank.layout.fields]


def record(cache: Any, spec: Any) -> dict[str, Any]:
    """The head of csrc/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu, V4.1."""
    rows = cache.transpose(1, 2)
    return {"latent": rows[..., :512], "scale": rows[..., 512:]}


def sliding(alignment: int | None, content: int = 528) -> Any:
    """A cache of the sliding window of DeepSeek V4 or V4.1."""
    return mla(
        block_size=32,
        alignment=512,
        block_stride_alignment=alignment,
        quant="FP8_PER_TENSOR",
        state_content_bytes=content,
    )


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("alignment", [528, 6 * 528])
@pytest.mark.parametrize("order", ["BLHNC", "BLNHC"])
def test_rows_of_deepseek_v41_are_records(order: str, alignment: int) -> None:
    rank = Rank([group(TWO, sliding(alignment))], order, backends="DEEPSEEK_SPARSE_SWA")
    assert rank.wrong(record) == []


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("alignment", "content"), [(None, 528), (512, 528), (584, 584)])
def test_other_rows_have_their_scales_behind_all_values(
    alignment: int | None, content: int
) -> None:
    spec = sliding(alignment, content)
    rank = Rank([group(TWO, spec)], "BLHNC", backends="DEEPSEEK_SPARSE_SWA")
    assert rank.wrong(views.values_then_scales({528: 512, 584: 576}[content])) == []


def test_records_on_other_processors_are_opaque() -> None:
    rank = Rank([group(TWO, sliding(528))], "BLHNC", backends="DEEPSEEK_SPARSE_SWA")
    assert rank.layout.groups[0].kind is GroupKind.OPAQUE


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


def test_opaque_pages_of_another_vllm_do_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    def packing() -> str:
        rank = Rank([group(TWO, full())], backends="FLASHMLA_SPARSE_DSV41")
        return rank.layout.fields[0].packing

    installed = packing()
    monkeypatch.setattr(versions, "vllm_version", lambda: "0.33.0")
    assert packing() != installed
    assert packing().endswith("vLLM 0.33")


@pytest.mark.parametrize(("dtype", "like_gpus"), [("float16", True), ("bfloat16", False)])
def test_gated_delta_nets_in_float16_are_stored_as_on_gpus(
    dtype: str, like_gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs, too: ``cpu_gdn_attention_core`` in ``ops/cpu/gdn_attention.py``."""
    import torch

    rank = recurrent.Rank(recurrent.Model(kind="delta"), recurrent.Setup(), 0, 0)
    group_of_one = copy(rank.group)
    spec = group_of_one.kv_cache_spec
    types = (getattr(torch, dtype), *spec.dtypes[1:])
    group_of_one.kv_cache_spec = replace(spec, dtypes=types)
    monkeypatch.setattr(recurrent.Rank, "group", group_of_one)
    here, there = (rank.layout(backend=name).fields for name in ("GDN_ATTN/cpu", "GDN_ATTN"))
    assert [field.key for field in here] == [field.key for field in there]
    assert (here == there) == like_gpus
