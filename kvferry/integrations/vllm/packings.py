"""How attention backends keep keys and values inside a page: one table, ``PACKINGS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvferry.core.errors import LayoutError
from kvferry.core.layout import Field
from kvferry.integrations.vllm.pages import Page

Packing = Callable[[Page], tuple[Field, ...]]


def keys_in_columns(page: Page) -> tuple[Field, ...]:
    """In each head first all of K, a column per token, then all of V, a row per token.

    K's element (d, t) is at ``d * tokens + t``, V's at ``t * size + d``. This is how vLLM's
    ``cpu_attn.py`` splits a page and how its ``vec`` kernels (csrc/cpu/cpu_attn_vec.hpp) fill it.

    Raises:
        LayoutError: the page has gaps, or no two equal halves.
    """
    heads, tokens, content = page.shape
    if content % 2 or not page.dense:
        raise LayoutError(
            f"layer {page.layer!r}: {page.facts.backend} has dense pages of K and V of one size, "
            f"not shape {page.shape} with strides {page.strides}"
        )
    size, item = content // 2, page.itemsize
    per_head = (heads, page.strides[0])
    key = page.field(
        "k", unit=item, tokens=((tokens, item),), heads=(per_head,), inner=((size, tokens * item),)
    )
    value = page.field(
        "v",
        offset=tokens * size * item,
        unit=size * item,
        tokens=((tokens, size * item),),
        heads=(per_head,),
    )
    return key, value


def latent(page: Page) -> tuple[Field, ...]:
    """One latent of ``content`` elements per entry, the same on every rank."""
    _, entries, content = page.shape
    unit = content * page.itemsize
    return (page.field("latent", unit=unit, tokens=((entries, page.strides[1]),)),)


PACKINGS: Mapping[str, Packing] = {
    "CPU_ATTN/vec": keys_in_columns,
    "CPU_ATTN/vec16": keys_in_columns,
    "CPU_MLA": latent,
}
"""What is known about the inside of a page, by attention backend (and kernel, on a CPU)."""


def opaque(page: Page) -> tuple[Field, ...]:
    """A page whose inside is unknown: it moves as a whole, between equals.

    Raises:
        LayoutError: the page has gaps, which another layer may fill.
    """
    if not page.dense or (page.kernels > 1 and page.kernel_stride != page.nbytes):
        raise LayoutError(
            f"layer {page.layer!r}: the pages of {page.facts.backend} are not described, and with "
            f"strides {page.strides} for shape {page.shape} they are not one run of bytes either"
        )
    shape = "x".join(map(str, (page.kernels, *page.shape)))
    packing = f"{page.facts.backend} {page.dtype} {shape}"
    return (page.field("page", unit=page.kernels * page.nbytes, packing=packing),)
