"""Unlike engines hand requests over: whatever kernels read on either side is what was computed.

Each pair of engines has the same traffic, under vLLM's scheduler: prompts that end before, on and
after borders, prefix caches that have a part of them, several at once, and both engines prefill.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvferry.core.metrics import COPY_SECONDS
from tests.vllm.geometry.engine_of_ranks import POISON, Rank, Shape
from tests.vllm.geometry.model import (
    Attention,
    Latent,
    Layer,
    Ring,
    attention,
    compressed,
    hybrid,
    latents,
    recurrent,
    windows,
)
from tests.vllm.geometry.scheduled import PREFILL, hand_over, serving, wait

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")

Models = Sequence[Layer]
Pair = tuple[Models, Shape, Shape]

THERE = [(0, 1), (0, 31), (1, 33), (0, 40), (1, 41), (0, 97), (2, 96), (0, 150), (1, 99)]
"""Prompts of families, and how many of their tokens: some go on from what a prefix cache has."""
HERE = [(5, 17), (5, 64), (6, 48)]
"""Prompts that are handed over the other way."""


def trade(layers: Models, there: Shape, here: Shape, *, ours: Models | None = None) -> int:
    """Hand prompts over, in both directions unless the layers of the engine ``here`` are others.

    Returns how many pages of prefix caches were copied before they were written.
    """
    with (
        serving("prefill", layers, there) as prefill,
        serving("decode", ours or layers, here, batch=48) as decode,
    ):
        for prompt in THERE:
            hand_over(prefill, decode, prompt)
        replicated = any(rank.endpoint is None for rank in prefill.engine.ranks)  # these never load
        for prompt in () if ours or replicated else HERE:
            hand_over(decode, prefill, prompt)
        hand_over(prefill, decode, (3, 70), (0, 180), (4, 20), (1, 101))
        assert len(decode.pulled) > len(THERE) // 2
        return prefill.copied + decode.copied


TWO, LATENTS = attention(2, size=8), latents(2)
COLUMNS = "CPU_ATTN/vec"
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
"""One group of ``UniformTypeKVCacheSpecs``, as are latents beside attention."""
DRAFT = "model.layers.9.attn"
DRAFTING = [*TWO, Attention(name=DRAFT, draft=True, size=8)]
DRAFTING_A_WINDOW = [*TWO, Attention(name=DRAFT, draft=True, size=8, window=24)]
LATENT_DRAFT = [*TWO, Latent(name=DRAFT, draft=True)]
LATENTS_AND_DRAFT = [*LATENTS, Attention(name=DRAFT, draft=True, size=8)]
SHARING = Shape(shares=(("model.layers.2.self_attn.attn", TWO[0].name),), backend=COLUMNS)
"""A layer uses another's cache."""
FULL_AND_WINDOW = windows(0, 32)
OWN = Shape(untransferred=(FULL_AND_WINDOW[0].name,))
"""A group is not transferred: its layers' caches are what each engine makes of them."""
SEVERAL_TOKENS: Models = [
    Latent(name="model.layers.0.attn"),
    Latent(name="model.layers.0.compressed", per_entry=4),
    Latent(name="model.layers.1.compressed", per_entry=4),
]
"""Compressed latents beside plain ones."""
CHUNKS: list[Models] = [
    [Attention(name="model.layers.0.attn", size=8, chunk=size), *windows(0, 0)[1:]]
    for size in (20, 64)
]
"""A chunk that has just begun needs nothing, and its page is none of what it was before."""
ALIGN: dict[str, Any] = {"mode": "align", "state_block": 16}
"""With prefix caching a state's page stands behind holes, and a hit is one of states, too."""
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

PAIRS: dict[str, list[Pair]] = {
    # Heads that are divided otherwise, and replicas of heads on either side or both.
    "tensor parallelism": [
        (attention(2, heads=heads, size=8), Shape(tp=one), Shape(tp=other))
        for one, other, heads in [(1, 2, 4), (3, 2, 6), (8, 1, 2), (4, 8, 2)]
    ],
    # Layers on other ranks, and on several where tensor parallelism joins in.
    "pipelines": [
        (attention(5, size=8), one, other)
        for one, other in [
            (Shape(pp=2, block=32), Shape()),
            (Shape(pp=4), Shape(pp=3)),
            (Shape(pp=3, tp=2), Shape(pp=2, tp=4, order="BLNHC")),
        ]
    ],
    # Larger, smaller and not a multiple.
    "blocks": [
        (TWO, Shape(block=there), Shape(block=here, tp=2)) for there, here in [(16, 64), (32, 48)]
    ],
    # Keys and values in one cell, apart, in rows, in columns and in vectors.
    "backends": [
        (attention(2), Shape(backend=there, block=32), Shape(backend=here, tp=2))
        for there, here in itertools.pairwise(["FLASH_ATTN", COLUMNS, "ROCM_ATTN", "B12X"])
    ],
    # A page is the scheduler's block, whatever its kernels make of it.
    "kernels": [
        (TWO, there, here)
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
    "orders": [
        (attention(3, size=8), Shape(order=there, block=32), Shape(order=here, tp=2))
        for there, here in list(itertools.pairwise(ORDERS))[::2]
    ],
    # Nobody reads some of the producer's ranks; they are told so.
    "latents": [
        (LATENTS, Shape(), Shape(tp=2)),
        (LATENTS, Shape(block=64, kernel=16), Shape(tp=2)),
        (latents(3), Shape(tp=4), Shape(tp=3, pp=2)),
    ],
    "sizes of entries": [
        (layers, Shape(order=order), Shape(tp=2, block=32))
        for layers, order in [
            (attention(2, size=16, size_v=8, backend="FLASH_ATTN_DIFFKV"), "BLHNC"),
            (PADDED, "LBHNC"),
            (PADDED, "BLNHC"),
            (attention(2, dtype="float8_e4m3fn"), "LBNHC"),
        ]
    ],
    # Pages of kernels that are in no table move whole, between equals.
    "unknown kernels": [
        (layers, shape, shape)
        for layers, shape in [(attention(2, backend="OF_TOMORROW"), Shape(order="LBNHC", tp=2))]
    ],
    # A window begins inside of any block, and each group has its own hits.
    "windows": [
        *((windows(size, size), Shape(), Shape(block=32, tp=2)) for size in (1, 17, 500)),
        (windows(20, 0, 70, 20, 0, 70), Shape(block=32), Shape(tp=2)),
        (hybrid(17), Shape(tp=2), Shape(block=32)),
        (hybrid(40), Shape(), Shape()),
        (hybrid(40), Shape(block=32, kernel=16), Shape(block=48, pp=2)),
        (hybrid(40), Shape(pp=2, tp=2), Shape(block=64, tp=4, order="BLNHC")),
    ],
    # A prompt's tokens all stay (``RSWASpec``), so their pages go as those of full attention.
    "windows over generated tokens": [
        (attention(2, size=8, generated=20), Shape(block=32), Shape(tp=2))
    ],
    "chunks": [(layers, Shape(block=32), Shape(tp=2)) for layers in CHUNKS],
    "unlike layers in one group": [
        (layers, Shape(order="BLHNC", block=48), Shape(tp=2, order="BLNHC"))
        for layers in (UNLIKE_SIZES, LATENTS_AND_DRAFT, LATENT_DRAFT)
    ],
    "a layer that uses another's cache": [
        (attention(3, size=8), SHARING, replace(SHARING, tp=2, block=32))
    ],
    "a group that is not transferred": [(FULL_AND_WINDOW, OWN, replace(OWN, tp=2, block=32))],
    "entries of several tokens": [
        (SEVERAL_TOKENS, there, here)
        for there, here in [
            (Shape(block=64), Shape(tp=2)),
            (Shape(block=32, order="BLHNC"), Shape(block=48, tp=2)),
            (Shape(tp=2, dcp=2, interleave=8), Shape(tp=4, dcp=4, interleave=4, block=32)),
        ]
    ],
    # Unlike sizes and interleaves, either side or both.
    "tokens dealt out to context ranks": [
        (LATENTS, Shape(tp=2, dcp=2), Shape()),
        (LATENTS, Shape(tp=4, dcp=4, interleave=4), Shape(tp=2, dcp=2, interleave=8)),
        (
            LATENTS,
            Shape(tp=3, dcp=3, interleave=4, block=12),
            Shape(tp=2, dcp=2, interleave=6, block=18),
        ),
        (LATENTS, Shape(tp=2, dcp=2, interleave=16, block=64, kernel=16), Shape(tp=2, block=32)),
        (LATENTS, Shape(tp=2, dcp=2, pp=2), Shape(tp=2, dcp=2, interleave=16)),
        # Two heads on four ranks: the two ranks of a head have half of its tokens each.
        (attention(2, heads=2, size=8), Shape(tp=4, dcp=2, order="LBNHC"), Shape()),
        (
            attention(2, heads=2, size=8),
            Shape(tp=4, dcp=2, interleave=16),
            Shape(tp=8, dcp=4, interleave=1),
        ),
        # Prefill context parallelism deals tokens out, too; ranks that replicate report what they
        # never had to hold.
        (TWO, Shape(tp=2, pcp=2, dcp=2, interleave=4), Shape(tp=8, dcp=2, interleave=8)),
        (TWO, Shape(tp=2, pcp=3), Shape(block=32)),
    ],
    # B and C divided like the heads, or one group of them that every rank has.
    "states on other ranks": [
        (recurrent(groups=groups), Shape(tp=there), Shape(tp=here, block=32))
        for there, here, groups in [(1, 2, 1), (3, 2, 1), (2, 3, 12), (6, 1, 12)]
    ],
    "states": [
        (recurrent(), there, here)
        for there, here in [
            (Shape(tp=2), Shape(channels_first=True, order="BLHNC")),
            # Pages and columns of a state for speculation are left alone.
            (Shape(tp=2, scratch=2), Shape(scratch=5, channels_first=True)),
            (Shape(tp=2, scratch=3, **ALIGN), Shape(channels_first=True, **ALIGN)),
            (Shape(**ALIGN), Shape()),
            (Shape(mode="align", state_block=48, block=48), Shape(tp=3, **ALIGN)),
            # A pipeline rank may have no layer of a group.
            (Shape(pp=3, tp=2), Shape(pp=2)),
        ]
    ],
    "a gated delta net": [
        (recurrent(delta=True, groups=12), Shape(tp=there), Shape(tp=2, pp=2)) for there in (4, 3)
    ],
    "states, windows and full attention": [
        (recurrent(window=24), Shape(tp=3, block=32), Shape(tp=2, order="BLHNC")),
        (
            recurrent(window=40),
            Shape(tp=2, **ALIGN),
            Shape(tp=3, block=32, mode="align", state_block=32),
        ),
    ],
    # With bounded replay, an engine computes the window again after a hit in its own prefix cache,
    # and only then.
    "rings": [
        (compressed(), Shape(tp=2, order="BLHNC"), Shape(block=32, order="BLHNC")),
        (compressed(window=40), Shape(order="BLNHC"), Shape(tp=4, block=48, order="BLHNC")),
        (compressed(), Shape(order="LBNHC"), Shape(order="LBNHC", tp=2)),
        (compressed(), Shape(pp=2, order="BLHNC"), Shape(tp=2, block=32, order="BLHNC")),
        (WHOLE, Shape(tp=2, order="BLHNC"), Shape(order="BLHNC")),
        (GLM, Shape(tp=2, dcp=2, interleave=16, order="BLHNC"), Shape(block=32, order="BLHNC")),
        (QWEN, Shape(tp=2, order="BLHNC"), Shape(block=32, order="BLHNC")),
    ],
}


@pytest.mark.parametrize(
    ("layers", "there", "here"),
    [pytest.param(*pair, id=name) for name, pairs in PAIRS.items() for pair in pairs],
)
def test_pairs(layers: Models, there: Shape, here: Shape) -> None:
    trade(layers, there, here)


@pytest.mark.parametrize(
    ("theirs", "ours", "here"),
    [
        # A draft, in a group with the model's layers, or in one that has no match.
        (DRAFTING, TWO, Shape(order="BLHNC", block=48)),
        (DRAFTING_A_WINDOW, TWO, Shape(order="BLHNC", block=48)),
        # A group that the other engine keeps to itself.
        (FULL_AND_WINDOW[1:], FULL_AND_WINDOW, OWN),
    ],
)
def test_layers_that_one_engine_has(theirs: Models, ours: Models, here: Shape) -> None:
    trade(theirs, Shape(tp=2, order="BLNHC"), here, ours=ours)


def test_hits_that_end_inside_a_page() -> None:
    """A state's page is larger than what is hashed, so that hits may end in it: it is copied."""
    coarse = Shape(scratch=1, mode="align", block=48, state_block=48, unit=16)
    assert trade(recurrent(), Shape(tp=2, **ALIGN), coarse) > 0


@pytest.mark.parametrize(
    ("layers", "blocks", "order"),
    [(recurrent(), 23, "LBHNC"), (compressed(), 30, "BLHNC")],
    ids=["states", "rings"],
)
def test_preemption(layers: list[Layer], blocks: int, order: str) -> None:
    """What a producer gives up for lack of pages it computes again; prompts are shortened once."""
    prompts = [(0, 200), (1, 150), (2, 170)]
    there, here = Shape(blocks=blocks, order=order), Shape(tp=2, block=32, order=order)
    with (
        serving("prefill", layers, there, batch=32, reserve=False) as prefill,
        serving("decode", layers, here) as decode,
    ):
        own = prefill.add(3, 40, {}, 120)
        hand_over(prefill, decode, *prompts)
        computed = prefill.computed.total() - prefill.computed[own]
        assert computed > sum(length - 1 for _, length in prompts)


FULL = attention(3)
HOST_PAGES = 64
STAGED: dict[str, Models] = {
    "full": FULL,
    "hybrid": windows(0, 0, 0, 40),
    "states": recurrent()[2:4],
    "latent": LATENTS,
}


@pytest.mark.parametrize(
    ("name", "staged"),
    [("full", "producer"), ("hybrid", "consumer"), ("states", "both"), ("latent", "both")],
)
def test_either_side_may_stage(name: str, staged: str) -> None:
    there, here = (
        Shape(tp=tp, block=block, host_pages=HOST_PAGES if staged in (side, "both") else 0)
        for side, tp, block in (("producer", 1, 16), ("consumer", 2, 32))
    )
    layers = STAGED[name]
    with serving("prefill", layers, there) as prefill, serving("decode", layers, here) as decode:
        hand_over(prefill, decode, (0, 17), (1, 90))
        hand_over(prefill, decode, (0, 64), (2, 33), (1, 95))
        for side, server in (("producer", prefill), ("consumer", decode)):
            for rank in server.engine.ranks:
                assert copied(rank) == (staged in (side, "both"))


def copied(rank: Rank) -> bool:
    """Whether a rank has copied pages between its cache and host pages."""
    assert rank.endpoint is not None
    return COPY_SECONDS.name in str(rank.endpoint.take_figures())


def test_blocks_are_free_when_they_are_copied() -> None:
    """Long before decode reads the host pages; and others may write into the blocks."""
    staging = Shape(host_pages=HOST_PAGES)
    with serving("prefill", FULL, staging) as prefill, serving("decode", FULL, Shape()) as decode:
        pool = prefill.scheduler.kv_cache_manager.block_pool
        there = prefill.add(0, 90, dict(PREFILL))
        wait(lambda: there in prefill.params, prefill)
        wait(lambda: pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, prefill)
        prefill.engine.ranks[0].memory[:] = POISON
        here = decode.add(0, 90, prefill.params[there], 3)
        wait(lambda: here in decode.params, prefill, decode)
        assert here in decode.pulled


def test_requests_wait_for_host_pages() -> None:
    """There are enough for one at a time, on either side."""
    shape = Shape(host_pages=1 + 2 * 6)
    with serving("prefill", FULL, shape) as prefill, serving("decode", FULL, shape) as decode:
        hand_over(prefill, decode, *((family, 80 + family) for family in range(6)))
