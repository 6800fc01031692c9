"""What is known about the inside of a page, by attention backend: one table, ``PACKINGS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.core.errors import LayoutError
from kvferry.core.layout import Field, GroupKind
from kvferry.integrations.vllm.caches import attention_pages as insides
from kvferry.integrations.vllm.caches.pages import Page


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """What is known about one backend's pages.

    Attributes:
        inside: what a page holds, or why that is not known; for people.
        fields: describes a page, or returns ``None`` where it is not known after all.
        unless: when ``fields`` does not know; for people.
    """

    inside: str
    fields: Callable[[Page], insides.Fields] = insides.unknown
    unless: str = ""


HALVES = Packing(
    inside="K, then V, in the cell of each head and token", fields=insides.halves, unless="NVFP4"
)
PLANES = Packing(
    inside="all of K, then all of V; in each, the heads of a token in a row", fields=insides.planes
)
ROWS = Packing(inside="one row per entry, scales included", fields=insides.rows)
SPARSE_ROWS = Packing(
    inside="one row per entry, or (fp8_ds_mla) all rows' values, then all rows' scales",
    fields=insides.sparse_rows,
    unless="not on CUDA, or blocks that the kernels split",
)
INDEXER = Packing(
    inside="all rows' values, then all rows' scales",
    fields=insides.indexer,
    unless="not on CUDA, or blocks that the kernels split",
)
COLUMNS = Packing(
    inside="per head all of K in columns, then all of V in rows", fields=insides.columns
)
ELSEWHERE = "not known: these kernels run on processors that they were not checked on"
UNREAD = "not known: these kernels were not read"
BEHIND = "not known: how the kernels split a block, on which it depends, is not in the tensor"

PACKINGS: Mapping[str, Packing] = {
    "FLASH_ATTN": Packing(
        inside="K, then V, in the cell of each head and token; where AITER shuffles, all of K in "
        "vectors of 16 bytes, then all of V in runs of tokens",
        fields=insides.flash_or_shuffled,
        unless="shuffled fp8",
    ),
    "FLASH_ATTN_DIFFKV": HALVES,
    "FLASHINFER": HALVES,
    "FLEX_ATTENTION": HALVES,
    "HPC_ATTN": HALVES,
    "ROCM_AITER_UNIFIED_ATTN": HALVES,
    "TRITON_ATTN": HALVES,
    "TRITON_ATTN_DIFFKV": HALVES,
    "TRITON_FLASH_ATTN": HALVES,
    "TRITON_FLASHINFER": HALVES,
    "B12X": PLANES,
    "ROCM_SEGMENTED_ATTN": PLANES,
    "ROCM_ATTN": Packing(
        inside="all of K in vectors of 16 bytes, then all of V in columns", fields=insides.vectors
    ),
    "CPU_ATTN": Packing(inside="depends on the kernel, which is not known"),
    "CPU_ATTN/vec": COLUMNS,
    "CPU_ATTN/vec16": COLUMNS,
    "CPU_ATTN/amx": Packing(
        inside="per head all of K, then all of V, both in AMX's tiles", fields=insides.tiles
    ),
    "CPU_ATTN/neon": Packing(inside=ELSEWHERE),
    "CPU_ATTN/rvv": Packing(inside=ELSEWHERE),
    "CPU_ATTN/vsx": Packing(inside=ELSEWHERE),
    "CPU_ATTN/vxe": Packing(inside=ELSEWHERE),
    "TURBOQUANT": Packing(inside="depends on the GPU: scales in each cell, or behind all of them"),
    "ULTRAQUANT": Packing(inside=UNREAD),
    "CUTLASS_MSA": HALVES,
    "QWEN4_EXP_QSA_TRITON": HALVES,
    "TRITON_MSA": HALVES,
    "AITER_TRITON_MLA": ROWS,
    "AMX_MLA": ROWS,
    "CPU_MLA": ROWS,
    "CUTLASS_MLA": ROWS,
    "DOTS3_NOTE_PADDED_MLA_SPARSE": ROWS,
    "FLASH_ATTN_MLA": ROWS,
    "FLASH_ATTN_MLA_SPARSE": ROWS,
    "FLASHINFER_MLA": ROWS,
    "FLASHINFER_MLA_SPARSE": ROWS,
    "FLASHINFER_MLA_SPARSE_SM120": ROWS,
    "FLASHINFER_MLA_SPARSE_SM90": ROWS,
    "FLASHMLA": ROWS,
    "FLASHMLA_SPARSE": ROWS,
    "ROCM_AITER_MLA": ROWS,
    "ROCM_AITER_MLA_SPARSE": ROWS,
    "TOKENSPEED_MLA": ROWS,
    "TRITON_MLA": ROWS,
    "XPU_MLA_SPARSE": ROWS,
    "DEEPSEEK_V32_INDEXER": INDEXER,
    "DEEPSEEK_V4_INDEXER": INDEXER,
    "DEEPSEEK_SPARSE_SWA": SPARSE_ROWS,
    "FLASHINFER_MLA_SPARSE_DSV4": SPARSE_ROWS,
    "FLASHMLA_SPARSE_DSV4": SPARSE_ROWS,
    "CompressorBackend": ROWS,
    "MINIMAX_M3_SPARSE_INDEXER": ROWS,
    "QWEN4_EXP_EXP_QSA_STATE": ROWS,
    "CACHE_ONLY_ATTN": Packing(inside=UNREAD),
    "CPU_V4_INDEXER": Packing(inside=UNREAD),
    "CPU_V4_MLA_SPARSE": Packing(inside=UNREAD),
    "DEEPSEEK_V41_INDEXER": Packing(inside=BEHIND),
    "DEEPSEEK_V41_ROCM_MXFP4_INDEXER": Packing(inside=ELSEWHERE),
    "DEEPSEEK_V41_SPARSE_INDEXER": Packing(inside=BEHIND),
    "FLASHINFER_MLA_SPARSE_DSV41": Packing(inside=BEHIND),
    "FLASHMLA_MEGA_ATTN_DSV41": Packing(inside=BEHIND),
    "FLASHMLA_SPARSE_DSV41": Packing(inside=BEHIND),
    "INKLING_SCONV_SWA": Packing(inside=UNREAD),
    "KPOOL_TAIL": Packing(inside=UNREAD),
    "MINIMAX_M3_SPARSE": HALVES,
    "ROCM_FLASHMLA_SPARSE_DSV4": Packing(inside=ELSEWHERE),
    "XPU_V4_MLA_SPARSE": Packing(inside=ELSEWHERE),
}
"""By the backend's ``get_name()``, on a CPU with the kernel. What is not here is opaque."""


def pack(pages: Sequence[Page]) -> tuple[GroupKind, tuple[Field, ...]]:
    """The fields of a group's pages: opaque ones, all of them, where the inside of one is unknown.

    Raises:
        LayoutError: an opaque page has gaps, which another layer may fill.
    """
    known = [_inside(page) for page in pages]
    described = [fields for fields in known if fields is not None]
    if len(described) == len(known):
        return GroupKind.PAGED, tuple(f for fields in described for f in fields)
    return GroupKind.OPAQUE, tuple(opaque(page) for page in pages)


def _inside(page: Page) -> insides.Fields:
    packing = PACKINGS.get(page.facts.backend)
    return packing.fields(page) if packing else None


def opaque(page: Page) -> Field:
    """A page whose inside is unknown: it moves as a whole, between equals.

    Where the kernels put what may depend on all that the packing's name holds, on the strides and
    the processor too.

    Raises:
        LayoutError: the page has gaps, which another layer may fill.
    """
    if not _is_run(page):
        raise LayoutError(
            f"layer {page.layer!r}: the pages of {page.facts.backend} are not described, and with "
            f"strides {page.strides} for shape {page.shape} they are not one run of bytes either: "
            "set VLLM_KV_CACHE_LAYOUT to an order whose blocks are in one piece, such as LBHNC"
        )
    shape, strides = ("x".join(map(str, each)) for each in (page.shape, page.strides))
    packing = f"{page.facts.backend} {page.dtype} {page.kernels}x{shape}/{strides} {processor()}"
    return page.field("page", unit=page.kernels * page.nbytes, packing=packing)


def processor() -> str:
    """The kind of processor that the kernels run on, as exactly as kernels may depend on it."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    version = f" {capability.as_version_str()}" if capability else ""
    return f"{current_platform.device_name}{version}"


def _is_run(page: Page) -> bool:
    """Whether a page has no gaps, in whichever order its axes are."""
    extent = page.itemsize
    for stride, count in sorted(zip(page.strides, page.shape, strict=True)):
        if count > 1 and stride != extent:
            return False
        extent *= count
    return page.kernels == 1 or page.kernel_stride == extent
