"""Unlike engines hand requests over, one at a time: every byte, every report, every hold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.vllm.geometry.crossing import cross
from tests.vllm.geometry.engine_of_ranks import Shape, engine
from tests.vllm.geometry.model import (
    Attention,
    Latent,
    Layer,
    Ring,
    attention,
    compressed,
    latents,
    recurrent,
    windows,
)

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")

Models = Sequence[Layer]


def both_ways(
    layers: Models, there: Shape, here: Shape, *prompts: int, theirs: Models | None = None
) -> None:
    """Prompts of these lengths; of some, half is in the prefix cache.

    ``theirs`` are the layers of the engine ``there`` if they are others.
    """
    with (
        engine("prefill", theirs or layers, there) as prefill,
        engine("decode", layers, here) as decode,
    ):
        for tokens in prompts:
            cross(prefill, decode, tokens)
            cross(prefill, decode, tokens, hits=tokens // 2)
            cross(decode, prefill, tokens)


def check_orders(there: str, here: str) -> None:
    """All pairs are in ``tests/long/vllm``."""
    both_ways(attention(3, size=8), Shape(order=there, block=32), Shape(order=here, tp=2), 50)


TWO = attention(2, size=8)
DRAFT = "model.layers.9.attn"
COLUMNS = "CPU_ATTN/vec"
UNKNOWN = attention(2, backend="OF_TOMORROW")
"""Kernels whose pages are in no table; they move whole, between equals."""
PADDED: Models = [
    Attention(name="model.layers.0.attn", size=16),
    Attention(name="model.layers.1.attn", size=24, window=40),
]
"""Pages of one size are padded to the size of others, which do not divide."""
UNLIKE_SIZES: Models = [
    Attention(name="model.layers.0.attn", size=8),
    Attention(name="model.layers.1.attn", size=24, heads=2),
    Attention(name="model.layers.2.attn", size=8),
]
"""One group of ``UniformTypeKVCacheSpecs``, as are the next two."""
LATENTS_AND_DRAFT = [*latents(2), Attention(name=DRAFT, draft=True, size=8)]
LATENT_DRAFT = [*TWO, Latent(name=DRAFT, draft=True)]
DRAFTING = [*TWO, Attention(name=DRAFT, draft=True, size=8)]
DRAFTING_A_WINDOW = [*TWO, Attention(name=DRAFT, draft=True, size=8, window=24)]
SHARING = Shape(shares=(("model.layers.2.self_attn.attn", TWO[0].name),), backend=COLUMNS)
"""A layer uses another's cache."""
FULL_AND_WINDOW: Models = [
    Attention(name="model.layers.0.attn", size=8),
    Attention(name="model.layers.1.attn", size=8, window=32),
]
OWN = Shape(untransferred=(FULL_AND_WINDOW[0].name,))
"""A group is not transferred: its layers' caches are what each engine makes of them."""
SEVERAL_TOKENS: Models = [
    Latent(name="model.layers.0.attn"),
    Latent(name="model.layers.0.compressed", per_entry=4),
    Latent(name="model.layers.1.compressed", per_entry=4),
]
"""Compressed latents beside plain ones."""

Pair = tuple[Models, Shape, Shape, tuple[int, ...]]
AROUND = (1, 16, 40, 100)

BOTH_WAYS: dict[str, list[Pair]] = {
    # Heads that are divided otherwise, and replicas of heads on either side or both.
    "tensor parallelism": [
        (attention(2, heads=heads, size=8), Shape(tp=one), Shape(tp=other), (1, 16, 41))
        for one, other, heads in [(1, 2, 4), (3, 2, 6), (8, 1, 2), (4, 8, 2)]
    ],
    # Layers on other ranks, and on several where tensor parallelism joins in.
    "pipelines": [
        (attention(5, size=8), one, other, (5, 64))
        for one, other in [
            (Shape(pp=2, block=32), Shape()),
            (Shape(pp=4), Shape(pp=3)),
            (Shape(pp=3, tp=2), Shape(pp=2, tp=4, order="BLNHC")),
        ]
    ],
    # Larger, smaller and not a multiple; prompts that end before, on and after a border.
    "blocks": [
        (TWO, Shape(block=there), Shape(block=here, tp=2), (15, 48, 65, 200))
        for there, here in [(16, 64), (32, 48)]
    ],
    # Keys and values in one cell, apart, in rows, in columns and in vectors; all pairs are in
    # ``caches/test_attention_page_copies.py``, without engines.
    "backends": [
        (attention(2), Shape(backend=there, block=32), Shape(backend=here, tp=2), (31, 80))
        for there, here in [("FLASH_ATTN", COLUMNS), ("ROCM_ATTN", "B12X")]
    ],
    # A page is the scheduler's block, whatever its kernels make of it.
    "kernels": [
        (TWO, there, here, (33, 64, 100))
        for there, here in [
            (Shape(block=64, kernel=16), Shape(block=64)),
            (
                Shape(block=96, kernel=48, backend=COLUMNS),
                Shape(block=64, kernel=16, backend=COLUMNS),
            ),
            (Shape(block=48, kernel=16), Shape(block=32, kernel=16, tp=2)),
            (Shape(block=64, kernel=16, order="LBNHC"), Shape(block=32)),
        ]
    ],
    "latents": [
        (latents(2), Shape(block=16), Shape(block=16, tp=2), (40, 64)),
        (latents(2), Shape(block=64, kernel=16), Shape(block=16, tp=2), (40, 64)),
    ],
    "sizes of entries": [
        (layers, Shape(order=order), Shape(tp=2, block=32), (30, 70))
        for layers, order in [
            (attention(2, size=16, size_v=8, backend="FLASH_ATTN_DIFFKV"), "BLHNC"),
            (PADDED, "LBHNC"),
            (PADDED, "BLNHC"),
            (attention(2, dtype="float8_e4m3fn"), "LBNHC"),
        ]
    ],
    "unknown kernels": [
        (UNKNOWN, Shape(order="LBNHC", tp=2), Shape(order="LBNHC", tp=2), (16, 40))
    ],
    "nothing but windows": [
        (windows(size, size), Shape(), Shape(block=32, tp=2), (1, 15, 16, 17, 47, 48, 49, 130))
        for size in (1, 17, 500)
    ],
    "windows of two sizes": [
        (windows(20, 0, 70, 20, 0, 70), Shape(block=32), Shape(tp=2), (19, 90, 200))
    ],
    # A prompt's tokens all stay (``RSWASpec``), so their pages go as those of full attention.
    "windows over generated tokens": [
        (attention(2, size=8, generated=20), Shape(block=32), Shape(tp=2), (1, 20, 64, 150))
    ],
    "unlike layers in one group": [
        (layers, Shape(order="BLHNC", block=48), Shape(tp=2, order="BLNHC"), AROUND)
        for layers in (UNLIKE_SIZES, LATENTS_AND_DRAFT, LATENT_DRAFT)
    ],
    "a layer that uses another's cache": [
        (attention(3, size=8), SHARING, replace(SHARING, tp=2, block=32), AROUND)
    ],
    "a group that is not transferred": [
        (FULL_AND_WINDOW, OWN, replace(OWN, tp=2, block=32), AROUND)
    ],
    "entries of several tokens": [
        (SEVERAL_TOKENS, there, here, AROUND)
        for there, here in [
            (Shape(block=64), Shape(tp=2)),
            (Shape(block=32, order="BLHNC"), Shape(block=48, tp=2)),
            (Shape(tp=2, dcp=2, interleave=8), Shape(tp=4, dcp=4, interleave=4, block=32)),
        ]
    ],
}


@pytest.mark.parametrize(
    ("layers", "there", "here", "prompts"),
    [pytest.param(*pair, id=name) for name, pairs in BOTH_WAYS.items() for pair in pairs],
)
def test_both_ways(layers: Models, there: Shape, here: Shape, prompts: tuple[int, ...]) -> None:
    both_ways(layers, there, here, *prompts)


@pytest.mark.parametrize(("there", "here"), list(itertools.pairwise(ORDERS))[::2])
def test_orders(there: str, here: str) -> None:
    check_orders(there, here)


@pytest.mark.parametrize(
    ("ours", "theirs", "there", "here"),
    [
        # A draft on one side, in a group with the model's layers, or in one that has no match.
        (TWO, DRAFTING, Shape(order="BLHNC", block=48), Shape(tp=2, order="BLNHC")),
        (TWO, DRAFTING_A_WINDOW, Shape(order="BLHNC", block=48), Shape(tp=2, order="BLNHC")),
        # One engine keeps a group to itself that the other one has not at all.
        (FULL_AND_WINDOW, FULL_AND_WINDOW[1:], Shape(), replace(OWN, tp=2, block=32)),
    ],
)
def test_layers_on_one_side(ours: Models, theirs: Models, there: Shape, here: Shape) -> None:
    both_ways(ours, there, here, *AROUND, theirs=theirs)


LATENTS, REPLICATED = latents(2), attention(2, heads=2, size=8)
CHUNKS: list[Models] = [
    [Attention(name="model.layers.0.attn", size=8, chunk=size), *windows(0, 0)[1:]]
    for size in (20, 64)
]
"""A chunk that has just begun needs nothing, and its page is none of what it was before."""
ALIGN: dict[str, Any] = {"mode": "align", "state_block": 16}
"""With prefix caching a state's page stands behind holes."""
GLM: Models = [
    *[Latent(name=f"model.layers.{i}.attn") for i in range(2)],
    *[Latent(name=f"model.layers.{i}.k_cache", per_entry=4, size=12) for i in range(2)],
    *[Ring(name=f"model.layers.{i}.tail_cache", slots=2, backend="KPOOL_TAIL") for i in range(2)],
]
"""GLM-5-Next's rings have several head slots."""
QWEN: Models = [
    Attention(name="model.layers.0.attn", size=8),
    Latent(name="model.layers.0.indexer.compressed", per_entry=4),
    Ring(name="model.layers.0.indexer.raw_key_cache", backend="QWEN4_EXP_EXP_QSA_STATE"),
]
"""Qwen4-Exp's stand beside keys and values."""
WHOLE = compressed(indexer="CPU_V4_INDEXER")
"""Its indexer's pages are not described, and move whole; every rank has the same."""

ONE_WAY: dict[str, list[Pair]] = {
    # Nobody reads some of the producer's ranks; they are told so.
    "latents on every rank": [
        (latents(3), Shape(tp=there), Shape(tp=here, pp=2), (17, 48))
        for there, here in [(1, 3), (4, 3)]
    ],
    # Unlike sizes and interleaves, either side or both.
    "tokens dealt out to context ranks": [
        (layers, there, here, (1, 15, 33, 64, 150))
        for layers, there, here in [
            (LATENTS, Shape(tp=2, dcp=2), Shape()),
            (LATENTS, Shape(), Shape(tp=2, dcp=2)),
            (LATENTS, Shape(tp=4, dcp=4, interleave=4), Shape(tp=2, dcp=2, interleave=8)),
            (
                LATENTS,
                Shape(tp=3, dcp=3, interleave=4, block=12),
                Shape(tp=2, dcp=2, interleave=6, block=18),
            ),
            (
                LATENTS,
                Shape(tp=2, dcp=2, interleave=16, block=64, kernel=16),
                Shape(tp=2, block=32),
            ),
            (LATENTS, Shape(tp=2, dcp=2, pp=2), Shape(tp=2, dcp=2, interleave=16)),
            # Two heads on four ranks: the two ranks of a head have half of its tokens each.
            (REPLICATED, Shape(tp=4, dcp=2, order="LBNHC"), Shape()),
            (REPLICATED, Shape(tp=4, dcp=2, interleave=16), Shape(tp=8, dcp=4, interleave=1)),
            # Prefill context parallelism deals tokens out, too.
            (LATENTS, Shape(tp=2, pcp=2, dcp=4, interleave=4), Shape(tp=4)),
            (TWO, Shape(tp=2, pcp=2, dcp=2, interleave=4), Shape(tp=8, dcp=2, interleave=8)),
        ]
    ],
    "chunks": [
        (layers, there, here, (1, 20, 40, 63, 64, 65, 150))
        for layers in CHUNKS
        for there, here in itertools.permutations((Shape(block=32), Shape(tp=2)))
    ],
    # B and C divided like the heads, or one group of them that every rank has.
    "states on other ranks": [
        (recurrent(groups=groups), Shape(tp=there), Shape(tp=here, block=32), (1, 31, 100))
        for there, here, groups in [(1, 2, 1), (3, 2, 1), (2, 3, 12), (6, 1, 12)]
    ],
    "states": [
        (recurrent(), there, here, (1, 15, 16, 17, 48, 50, 150))
        for there, here in [
            (Shape(tp=2), Shape(channels_first=True, order="BLHNC")),
            (Shape(tp=2, channels_first=True), Shape(order="BLHNC")),
            # Pages and columns of a state for speculation are left alone.
            (Shape(tp=2, scratch=2), Shape(scratch=5, channels_first=True)),
            (Shape(tp=2, scratch=3, **ALIGN), Shape(channels_first=True, **ALIGN)),
            (Shape(**ALIGN), Shape()),
            (Shape(tp=2), Shape(mode="align", state_block=32, block=32)),
            (Shape(mode="align", state_block=48, block=48), Shape(tp=3, **ALIGN)),
            # A pipeline rank may have no layer of a group.
            (Shape(pp=3, tp=2), Shape(pp=2)),
        ]
    ],
    "a gated delta net": [
        (recurrent(delta=True, groups=12), Shape(tp=there), Shape(tp=here, pp=2), (1, 50))
        for there, here in [(4, 2), (3, 2)]
    ],
    "states, windows and full attention": [
        (
            recurrent(window=24),
            Shape(tp=3, block=32),
            Shape(tp=2, order="BLHNC"),
            (1, 23, 24, 25, 130),
        )
    ],
    # Fewer tokens than a ring has slots, as many, and more.
    "rings": [
        (layers, there, here, (1, 3, 4, 7, 8, 9, 31, 32, 100))
        for layers, *shapes in [
            (compressed(), Shape(tp=2, order="BLHNC"), Shape(block=32, order="BLHNC")),
            (compressed(), Shape(order="BLNHC"), Shape(tp=4, block=48, order="BLHNC")),
            (compressed(), Shape(order="LBNHC"), Shape(order="LBNHC", tp=2)),
            (compressed(), Shape(pp=2, order="BLHNC"), Shape(tp=2, block=32, order="BLHNC")),
            (WHOLE, Shape(tp=2, order="BLHNC"), Shape(order="BLHNC")),
            (
                GLM,
                Shape(tp=2, dcp=2, interleave=16, order="BLHNC"),
                Shape(block=32, order="BLHNC"),
            ),
            (QWEN, Shape(tp=2, order="BLHNC"), Shape(block=32, order="BLHNC")),
        ]
        for there, here in itertools.permutations(shapes)
    ],
}


@pytest.mark.parametrize(
    ("layers", "there", "here", "prompts"),
    [pytest.param(*pair, id=name) for name, pairs in ONE_WAY.items() for pair in pairs],
)
def test_one_way(layers: Models, there: Shape, here: Shape, prompts: tuple[int, ...]) -> None:
    """Where tokens are dealt out, some are in the consumer's prefix cache, too."""
    with engine("prefill", layers, there) as prefill, engine("decode", layers, here) as decode:
        for tokens in prompts:
            cross(prefill, decode, tokens)
            if there.dcp * here.dcp > 1:
                cross(prefill, decode, tokens, hits=40)


def test_several_consumers_of_one_producer() -> None:
    """Engines of one deployment have ids and side channels of their own."""
    with (
        engine("prefill 0", TWO, Shape(tp=2)) as first,
        engine("prefill 1", TWO, Shape(tp=4)) as second,
    ):
        for number, shape in enumerate((Shape(), Shape(tp=2, block=32), Shape(pp=2))):
            with engine(f"decode {number}", TWO, shape) as decode:
                for tokens, prefill in ((20, first), (33, second), (7, first)):
                    cross(prefill, decode, tokens, seed=number)


def test_prefill_context_ranks_that_replicate() -> None:
    """The first serves; the others report at once, refusals too, and nobody knows of them.

    vLLM waits for all ranks before it ends a request whose ticket was refused.
    """
    with (
        engine("prefill", TWO, Shape(tp=2, pcp=3)) as prefill,
        engine("decode", TWO, Shape(tp=2, block=32)) as decode,
    ):
        assert len(prefill.ranks) == 6
        assert len(prefill.workers) == 2
        for tokens in (1, 33, 150):
            cross(prefill, decode, tokens)
        for rank in prefill.ranks:
            rank.hear(refused=(("r", "it may not load"),))
            rank.poll()
            rank.poll()
            assert (rank.received, rank.failed) == (["r"], ["r"])


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (Shape(), Shape()),
        (Shape(block=32, kernel=16), Shape(block=48, pp=2)),
        (Shape(block=16, pp=2, tp=2), Shape(block=64, tp=4, order="BLNHC")),
    ],
)
def test_windows_beside_full_attention(there: Shape, here: Shape) -> None:
    """A window begins inside of any block; hits end inside a page there, and elsewhere in each
    group."""
    layers = windows(40, 0, 40, 40, 0, 40)
    with engine("prefill", layers, there) as prefill, engine("decode", layers, here) as decode:
        for tokens in (1, 38, 39, 40, 41, 95, 96, 97, 210):
            cross(prefill, decode, tokens)
        for tokens, hits in ((97, 16), (97, 64), (210, 32), (210, 180), (210, 209)):
            cross(prefill, decode, tokens, hits=hits)
