"""Write the tables of caches in ``docs/coverage.md``: which are described, opaque or refused.

``python -m tests.vllm.caches.coverage_page`` makes them from those that an engine uses, from what
is said here of each, and from the source of the installed vLLM. The text and the table of
architectures are written by hand.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from kvferry.integrations.vllm.caches import attention_pages, state_pages
from kvferry.integrations.vllm.caches.attention_pages import PACKINGS, Packing
from kvferry.integrations.vllm.caches.cache_kinds import HANDLED, REFUSED
from kvferry.integrations.vllm.caches.state_pages import STATE_PACKINGS
from tests.vllm.caches import census

PAGE = Path(__file__).parents[3] / "docs" / "coverage.md"
COMMAND = "python -m tests.vllm.caches.coverage_page"

KINDS = {
    "FullAttentionSpec": "every token has its place",
    "MLAAttentionSpec": "every token, or every few, has its place; the same on every rank",
    "RSWASpec": "a prompt's tokens are never given up, only generated ones are",
    "SlidingWindowSpec": "the tokens before the window are holes",
    "SlidingWindowMLASpec": "the tokens before the window are holes",
    "ChunkedLocalAttentionSpec": "the tokens before the chunk are holes",
    "MambaSpec": "one page per request",
    "CircularBufferSpec": "one page per request, of its last tokens; engines need rings of equal "
    "length",
    "UniformTypeKVCacheSpecs": "each layer has its own",
}
"""Why caches of a class of ``KVCacheSpec`` are handled so."""

SPLIT = "not on CUDA, or blocks that the kernels split"

INSIDE: Mapping[Packing, tuple[str, str]] = {
    attention_pages.halves: ("K, then V, in the cell of each head and token", "NVFP4"),
    attention_pages.flash_or_shuffled: (
        "K, then V, in the cell of each head and token; where AITER shuffles, all of K in vectors "
        "of 16 bytes, then all of V in runs of tokens",
        "shuffled fp8",
    ),
    attention_pages.planes: (
        "all of K, then all of V; in each, the heads of a token in a row",
        "",
    ),
    attention_pages.vectors: (
        "all of K in vectors of 16 bytes, then all of V in columns",
        "",
    ),
    attention_pages.columns: ("per head all of K in columns, then all of V in rows", ""),
    attention_pages.tiles: ("per head all of K, then all of V, both in AMX's tiles", ""),
    attention_pages.rows: ("one row per entry, scales included", ""),
    attention_pages.sparse_rows: (
        "one row per entry, or (fp8_ds_mla) all rows' values, then all rows' scales",
        SPLIT,
    ),
    attention_pages.indexer: ("all rows' values, then all rows' scales", SPLIT),
}
"""What a page holds that is described, and where it is opaque nevertheless."""

OPAQUE: Mapping[str, str] = {
    name: why
    for why, names in {
        "depends on the kernel, which is not known": "CPU_ATTN",
        "depends on the GPU: scales in each cell, or behind all of them": "TURBOQUANT",
        "not known: how the kernels split a block, on which it depends, is not in the tensor": (
            "DEEPSEEK_V41_INDEXER DEEPSEEK_V41_SPARSE_INDEXER FLASHINFER_MLA_SPARSE_DSV41 "
            "FLASHMLA_MEGA_ATTN_DSV41 FLASHMLA_SPARSE_DSV41"
        ),
        "not known: these kernels run on processors that they were not checked on": (
            "CPU_ATTN/neon CPU_ATTN/rvv CPU_ATTN/vsx CPU_ATTN/vxe DEEPSEEK_V41_ROCM_MXFP4_INDEXER "
            "ROCM_FLASHMLA_SPARSE_DSV4 XPU_V4_MLA_SPARSE"
        ),
        "not known: these kernels were not read": (
            "CACHE_ONLY_ATTN CPU_V4_INDEXER CPU_V4_MLA_SPARSE INKLING_SCONV_SWA ULTRAQUANT"
        ),
        "rings, which always move whole": "KPOOL_TAIL",
    }.items()
    for name in names.split()
}
"""Why the pages of a backend are always opaque."""

STATES: Mapping[object, str] = {
    state_pages.mamba1: "Mamba 1: channels of the convolution's input, and for each a row of "
    "state.",
    state_pages.mamba2: "Mamba 2: the convolution's x by heads, B and C by groups, and a state for "
    "each head.",
    state_pages.short_conv: "Nothing but a convolution's input.",
    state_pages.linear: "Linear attention: nothing but a matrix for each head.",
    state_pages.delta: "Delta rules (gated delta net, KDA): q, k and v channels, and a (v, k) "
    "state for each head.",
    state_pages.delta_transposed: "The same, each head's state stored as (k, v), whatever the "
    "spec's shape says.",
}
"""What a state consists of."""


def with_caches(page: str) -> str:
    """Return a page whose version and tables of caches are as they should be."""
    page = re.sub(r"(?<=the source of vLLM )\d+\.\d+\.\d+", _version(), page)
    for head, rows in (
        (("spec", "handling", "why"), _kinds()),
        (("verdict", "a page holds", "opaque where", "orders", "backends"), _backends()),
        (("verdict", "a page holds", "backends"), _states()),
    ):
        page = with_table(page, head, rows)
    return page


def _version() -> str:
    import vllm

    return str(vllm.__version__).partition("+")[0]


def with_table(page: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, ruler, *body = (
        f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows)
    )
    before, found, rest = page.partition(f"\n{first}")
    assert found, f"the page has no table with the head {first}"
    after = re.sub(r"\A(\|.*\n)*", "", rest)
    return "".join((before, "\n", first, ruler, *body, after))


def _kinds() -> Iterator[Sequence[str]]:
    kinds = {name: (handling.value, KINDS[name]) for name, handling in HANDLED.items()}
    kinds |= {name: ("refused", why) for name, why in REFUSED.items()}
    for name, said in sorted(kinds.items()):
        yield f"`{name}`", *said


def _backends() -> Iterator[Sequence[str]]:
    orders = {backend.name: " ".join(backend.orders) for backend in census.backends()}
    about = {name: ("described", *INSIDE[packing]) for name, packing in PACKINGS.items()}
    about |= {name: ("opaque", why, "") for name, why in OPAQUE.items()}
    rows = ((name, (*said, orders.get(name.partition("/")[0], ""))) for name, said in about.items())
    return _grouped(sorted(rows, key=lambda row: row[1]))


def _states() -> Iterator[Sequence[str]]:
    return _grouped(
        (name, ("described", STATES[STATE_PACKINGS[name]])) for name in sorted(STATE_PACKINGS)
    )


def _grouped(about: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[Sequence[str]]:
    """Yield a row for all names of which the same is said: that, and the names."""
    alike = defaultdict(list)
    for name, said in about:
        alike[said].append(name)
    for said, names in alike.items():
        yield *said, ", ".join(f"`{name}`" for name in sorted(names, key=str.casefold))


if __name__ == "__main__":
    PAGE.write_text(with_caches(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
