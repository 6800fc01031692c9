"""How attention backends fill a page: the table ``PACKINGS``.

A packing is the order in which a backend's kernels store values in a page; its function returns the
fields of a page (such as K and V) and their strides. Backends that store the same values in
different orders have fields with the same keys, so pages can move between them. The functions
follow the source of vLLM 0.32, whose files their docstrings name; what differs in 0.33 is named
too. A function returns ``None`` for a page that is not filled as it expects: it is opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvferry.core.errors import LayoutError
from kvferry.core.layout import Field, GroupKind
from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.caches.pages import Page

if TYPE_CHECKING:
    import torch

Fields = tuple[Field, ...] | None
"""The fields of a page, or ``None`` if the content of the page is not known."""

Packing = Callable[[Page], Fields]

VECTOR_BYTES = 16
"""Of the vectors of keys that ROCm's kernels read: ``PagedAttention.split_kv_cache``."""

TILE = 16
"""Number of columns of the matrices that AMX multiplies."""

INDEXER_ROW_BYTES = {132: (128, 4), 68: (64, 4)}
"""By the bytes of an indexer's row: those of its 128 values (fp8 or packed fp4), and of scales."""

SPARSE_ROW_BYTES = {584: (576, 8), 528: (512, 16)}
"""Likewise of a row in ``fp8_ds_mla`` of DeepSeek V4 and V4.1."""

SPLIT_TOKENS = 256
"""Block size in tokens at which kernels never split a block of compressed entries.

From ``get_supported_kernel_block_sizes`` in ``deepseek_v4/sparse_mla.py`` and ``mla/indexer.py``.
"""


def pack(pages: Sequence[Page]) -> tuple[GroupKind, tuple[Field, ...]]:
    """Return the kind of a cache group, and the fields of its layers' pages.

    All are opaque if the content of one layer's is not known. Raises ``LayoutError`` as ``opaque``.
    """
    packings = {**NEWER_PACKINGS, **PACKINGS}
    fields: list[Field] = []
    for page in pages:
        packing = packings.get(page.facts.backend)
        described = packing(page) if packing else None
        if described is None:
            return GroupKind.OPAQUE, tuple(opaque(page) for page in pages)
        fields += described
    return GroupKind.PAGED, tuple(fields)


def opaque(page: Page) -> Field:
    """Return a single field that covers a whole page, whose content is not known.

    Two engines can exchange the field only if ``Field.packing`` is equal: it names everything that
    may decide where kernels put a value. vLLM 0.33 fills some pages in other ways than 0.32 does,
    such as those of ``FLASHMLA_SPARSE_DSV41``, whose shape and strides are the same.

    Raises ``LayoutError`` if the page has gaps, which may belong to another layer.
    """
    if not _is_contiguous(page):
        raise LayoutError(
            f"layer {page.layer!r}: the pages of {page.facts.backend} are not described, and with "
            f"strides {page.strides} for shape {tuple(page.block.shape)} they are not one run of "
            "bytes either: set VLLM_KV_CACHE_LAYOUT to an order whose blocks are in one piece, "
            "such as LBHNC"
        )
    shape, strides = ("x".join(map(str, axes)) for axes in (page.block.shape, page.strides))
    dtype = str(page.block.dtype).removeprefix("torch.")
    packing = (
        f"{page.facts.backend} {dtype} {page.kernels}x{shape}/{strides} {processor()}"
        f"{versions.opaque_release()}"
    )
    return page.field("page", page.whole, "unit unit unit unit", packing=packing)


def processor() -> str:
    """Return the name of the processor, with a GPU's compute capability."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    version = f" {capability.as_version_str()}" if capability else ""
    return f"{current_platform.device_name}{version}"


def _is_contiguous(page: Page) -> bool:
    """Return whether a page has no gaps, whatever the order of a kernel block's axes."""
    extent = page.block.element_size()
    for stride, count in sorted(zip(page.strides, page.block.shape, strict=True)):
        if count > 1 and stride != extent:
            return False
        extent *= count
    return page.kernels == 1 or page.kernel_stride == extent


def halves(page: Page) -> Fields:
    """Return the fields of a page that holds, for each head and token, K and right after it V.

    See ``kv_cache.transpose(1, 2).split(head_size, dim=-1)`` in ``flash_attn.py``,
    ``flash_attn_diffkv.py``, ``flashinfer.py``, ``flex_attention.py``, ``hpc_attn.py``,
    ``rocm_aiter_unified_attn.py`` and ``triton_attn.py``; the last keeps the scales of its
    per-token-head modes behind the values of each half (``_ensure_scale_caches``).
    """
    sizes = _halves(page)
    if sizes is None:
        return None
    key, value = page.block.split(sizes, dim=2)
    return page.field("k", key, "head token unit"), page.field("v", value, "head token unit")


def planes(page: Page) -> Fields:
    """Return the fields of a page that holds first all of K, then all of V, token by token.

    See ``kv_cache.unbind(1)`` and ``unflatten(-1, (num_kv_heads, head_size))`` in ``b12x.py`` and
    ``rocm_segmented_attn.py``.
    """
    if not _plain(page) or not _is_planes(page):
        return None
    key, value = page.block.unflatten(2, (page.spec.num_kv_heads, -1)).unbind(0)
    return page.field("k", key, "token head unit"), page.field("v", value, "token head unit")


def vectors(page: Page) -> Fields:
    """Return the fields of a page that holds first all of K in vectors, then all of V in columns.

    K is ``[heads, size/x, tokens, x]`` and V ``[heads, size, tokens]``; x is the number of elements
    in ``VECTOR_BYTES``. See ``PagedAttention.split_kv_cache`` in ``ops/paged_attn.py``, for
    ``rocm_attn.py``.
    """
    return _vectors(page, (page.spec.head_size, -1), "head inner token") if _plain(page) else None


def flash_or_shuffled(page: Page) -> Fields:
    """Return the fields of a page that is filled as in ``halves``, or shuffled by AITER.

    In a shuffled page, K is as in ``vectors``, and V is ``[heads, tokens/x, size, x]``
    (``reshape_and_cache_shuffle_kernel`` in ``rocm_aiter_fa.py``, whose backend has
    FlashAttention's name). In vLLM 0.32, AITER's kernels ignore the layer's scales in shuffled fp8
    pages, so the same bytes mean other values in other backends, and in vLLM 0.33.
    """
    if page.spec.num_head_slots is None:
        return halves(page)
    return None if page.spec.kv_quant_mode else _shuffled(page)


def interleaved(page: Page) -> Fields:
    """Return the fields of a page of ROCM_ATTN whose V is interleaved, as vLLM 0.33 has it.

    That is so where vLLM fuses the normalisation and rotation of queries and keys with the write to
    the cache (``set_interleaved_v_cache`` in ``rocm_attn.py``). The page is as AITER shuffles it;
    see ``INTERLEAVED_V_PACK_FACTOR`` in ``ops/triton_reshape_and_cache_flash.py``.
    """
    return _shuffled(page) if _plain(page) else None


def _shuffled(page: Page) -> Fields:
    """Return the fields of a page with K in vectors, and V in runs of tokens."""
    vector = VECTOR_BYTES // page.block.element_size()
    if page.block.shape[1] % vector:
        return None
    return _vectors(page, (-1, page.spec.head_size, vector), "head token inner token")


def _vectors(page: Page, shape: tuple[int, ...], axes: str) -> Fields:
    """Return the fields of a page with K in vectors, and V in this shape for each head.

    ``None`` unless K and V are each contiguous, head after head, and heads are whole vectors.
    """
    vector, size = VECTOR_BYTES // page.block.element_size(), page.spec.head_size
    is_contiguous = page.block.stride(1) == page.block.shape[2]
    if not _is_planes(page) or not is_contiguous or size % vector:
        return None
    key, value = page.block.view(2, page.spec.num_kv_heads, -1).unbind(0)
    key, value = key.unflatten(1, (size // vector, -1, vector)), value.unflatten(1, shape)
    return page.field("k", key, "head inner token unit"), page.field("v", value, axes)


def columns(page: Page) -> Fields:
    """Return the fields of a page that holds, for each head, K in columns, then V in rows.

    Element d of token t is at ``d * tokens + t`` in K and at ``t * size + d`` in V. See
    ``cpu_attn.py``, which splits the page, and its ``vec`` kernels (csrc/cpu/cpu_attn_vec.hpp).
    """
    parts = _equal_parts(page)
    if parts is None:
        return None
    (key, value), (tokens, size) = parts, (page.block.shape[1], page.spec.head_size)
    return (
        page.field("k", key.unflatten(1, (size, tokens)), "head inner token"),
        page.field("v", value.unflatten(1, (tokens, size)), "head token unit"),
    )


def tiles(page: Page) -> Fields:
    """Return the fields of a page that holds, for each head, K and then V in tiles for AMX.

    Each row of a tile has 16 pairs of elements: in K, for each of 16 tokens, two neighbouring
    elements of that token; in V, for each of 16 indices d, element d of one token and of the next.
    See ``reshape_and_cache`` in csrc/cpu/cpu_attn_amx.hpp.
    """
    parts, tokens, size = _equal_parts(page), page.block.shape[1], page.spec.head_size
    if parts is None or tokens % TILE or size % TILE:
        return None
    key, value = parts
    key = key.unflatten(1, (tokens // TILE, size // 2, TILE, 2))
    value = value.unflatten(1, (size // TILE, tokens // 2, TILE, 2))
    return (
        page.field("k", key, "head token inner token unit"),
        page.field("v", value, "head inner token inner token"),
    )


def rows(page: Page) -> Fields:
    """Return the field of a page that holds one row per entry, with any scales in the row.

    See ``concat_and_cache_mla``; for ``fp8_ds_mla`` the head of ``mla/flashmla_sparse.py``; for
    per-token-head scales ``MLACommonBackend``; for caches other than MLA's
    ``minimax_m3/common/indexer.py``, ``qwen4_exp/common/qsa_cache.py``, and
    ``deepseek_v4/common/ops/save_partial_states.py``.
    """
    mode = page.spec.kv_quant_mode
    is_known = _plain(page) or mode.is_per_token_head or mode.name == "NVFP4_DS_MLA"
    if not is_known or page.block.shape[0] != 1 or page.block.stride(2) != 1:
        return None
    return (page.field("latent", page.block[0], "token unit"),)


def indexer(page: Page) -> Fields:
    """Return the fields of a page of an indexer: first all rows' values, then all rows' scales.

    The format of the scales of fp8 values depends on vLLM's version and the GPU. On ROCm, some
    kernels store the values in tiles.

    See ``_fp8_quant_and_cache_write`` in ``deepseek_v32/common/kernels.py`` and
    ``deepseek_v4/common/ops/fused_compress_quant_cache.py``.
    """
    values, _ = INDEXER_ROW_BYTES.get(page.block.shape[2], (0, 0))
    scales = versions.indexer_scales() if values == 128 else ""  # the values are fp8
    return _scaled_rows(page, INDEXER_ROW_BYTES, scales)


def sparse_rows(page: Page) -> Fields:
    """Return the fields of a page of DeepSeek's sparse attention.

    In ``fp8_ds_mla``, the page holds the values of all rows, then the scales of all rows; the rows
    of V4.1 have their own scales behind their values in vLLM 0.33. In other formats, it is as in
    ``rows``.

    See the head of ``mla/flashmla_sparse.py``, ``_fused_compress`` in
    ``deepseek_v4/common/ops/fused_compress_quant_cache.py``, and the head of
    csrc/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu.
    """
    from vllm.platforms import current_platform

    if versions.has_records(page.spec):
        return _scaled_rows(page, SPARSE_ROW_BYTES, in_row=True)
    if page.spec.state_content_bytes is not None:
        return _scaled_rows(page, SPARSE_ROW_BYTES)
    return rows(page) if current_platform.is_cuda() else None


def _plain(page: Page) -> bool:
    """Return whether a page holds plain values: no packed values, and no scales in the page."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    return page.spec.kv_quant_mode in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)


def _halves(page: Page) -> list[int] | None:
    """Return the elements of K and of V for a head and token, ``None`` if not as in ``halves``."""
    spec, content = page.spec, page.block.shape[2]
    if spec.num_head_slots is not None or page.block.stride(2) != 1:
        return None
    if spec.kv_quant_mode.is_per_token_head:
        return [content // 2, content // 2] if spec.head_size == spec.head_size_v else None
    plain = _plain(page) and spec.state_content_bytes is None
    sizes = [spec.head_size, spec.head_size_v]
    return sizes if plain and spec.head_size_v and sum(sizes) == content else None


def _equal_parts(page: Page) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (heads, elements) of K and of V, of a page that has these head by head."""
    sizes = _halves(page)
    if sizes is None or sizes[0] != sizes[1] or not page.block.is_contiguous():
        return None
    key, value = page.block.view(page.block.shape[0], 2, -1).unbind(1)
    return key, value


def _is_planes(page: Page) -> bool:
    """Return whether a page has two head slots: one for all heads' K, one for all heads' V."""
    spec = page.spec
    found = spec.num_head_slots, page.block.shape[2], page.block.stride(2)
    return found == (2, spec.num_kv_heads * spec.head_size, 1)


def _scaled_rows(
    page: Page, row_bytes: dict[int, tuple[int, int]], scales: str = "", *, in_row: bool = False
) -> Fields:
    """Return the fields of a page of rows' values and scales; these are in each row, or behind all.

    ``row_bytes`` is as ``INDEXER_ROW_BYTES``, ``scales`` the encoding of the scales if not that of
    the layer. ``None`` also if kernels may split a block into smaller ones.
    """
    from vllm.platforms import current_platform

    heads, entries, content = page.block.shape
    whole = in_row or page.spec.tokens_per_state == 1 or page.spec.block_size == SPLIT_TOKENS
    is_contiguous = (heads, *page.strides[1:]) == (1, content, 1)
    if not (current_platform.is_cuda() and whole and is_contiguous and content in row_bytes):
        return None
    sizes = list(row_bytes[content])
    if in_row:
        values, scale = page.block[0].split(sizes, dim=1)
    else:
        values, scale = page.block.view(-1).split([entries * size for size in sizes])
        values, scale = values.view(entries, -1), scale.view(entries, -1)
    return (
        page.field("latent", values, "token unit"),
        page.field("scale", scale, "token unit", encoding=scales),
    )


_BACKENDS: Mapping[Packing, str] = {
    halves: (
        "CUTLASS_MSA FLASHINFER FLASH_ATTN_DIFFKV FLEX_ATTENTION HPC_ATTN MINIMAX_M3_SPARSE "
        "QWEN4_EXP_QSA_TRITON ROCM_AITER_UNIFIED_ATTN TRITON_ATTN TRITON_ATTN_DIFFKV "
        "TRITON_FLASHINFER TRITON_FLASH_ATTN TRITON_MSA"
    ),
    flash_or_shuffled: "FLASH_ATTN",
    planes: "B12X ROCM_SEGMENTED_ATTN",
    vectors: "ROCM_ATTN",
    columns: "CPU_ATTN/vec CPU_ATTN/vec16",
    tiles: "CPU_ATTN/amx",
    rows: (
        "AITER_TRITON_MLA AMX_MLA CPU_MLA CUTLASS_MLA CompressorBackend "
        "DOTS3_NOTE_PADDED_MLA_SPARSE FLASHINFER_MLA FLASHINFER_MLA_SPARSE "
        "FLASHINFER_MLA_SPARSE_SM120 FLASHINFER_MLA_SPARSE_SM90 FLASHMLA FLASHMLA_SPARSE "
        "FLASH_ATTN_MLA FLASH_ATTN_MLA_SPARSE MINIMAX_M3_SPARSE_INDEXER QWEN4_EXP_EXP_QSA_STATE "
        "ROCM_AITER_MLA ROCM_AITER_MLA_SPARSE TOKENSPEED_MLA TRITON_MLA XPU_MLA_SPARSE"
    ),
    indexer: "DEEPSEEK_V32_INDEXER DEEPSEEK_V4_INDEXER",
    sparse_rows: "DEEPSEEK_SPARSE_SWA FLASHINFER_MLA_SPARSE_DSV4 FLASHMLA_SPARSE_DSV4",
}

PACKINGS: Mapping[str, Packing] = {
    name: packing for packing, names in _BACKENDS.items() for name in names.split()
}
"""Packings by ``LayerFacts.backend``. The pages of backends in no table are opaque; for each that
vLLM has, docs/coverage.md says why.
"""

NEWER_PACKINGS: Mapping[str, Packing] = {
    "FLASH_ATTN_MLA_SPARSE_FA4": rows,
    "ROCM_ATTN/interleaved V": interleaved,
    "STEP5_DSA": halves,
}
"""Packings of backends that vLLM 0.32 does not have, read in the source of 0.33."""
