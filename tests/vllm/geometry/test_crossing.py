"""Unlike engines hand requests over, one at a time: every byte, every report, every hold."""

from __future__ import annotations

import itertools
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

DRAFT = "model.layers.9.attn"
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
COLUMNS = "CPU_ATTN/vec"
UNLIKE = Shape(order="BLHNC", block=48), Shape(tp=2, order="BLNHC")
FULL_AND_WINDOW: list[Layer] = [
    Attention(name="model.layers.0.attn", size=8),
    Attention(name="model.layers.1.attn", size=8, window=32),
]


def one_way(layers: list[Layer], there: Shape, here: Shape, *prompts: int, hits: int = 0) -> None:
    """Prompts of these lengths, also with so many tokens in the consumer's prefix cache."""
    with engine("prefill", layers, there) as prefill, engine("decode", layers, here) as decode:
        for tokens in prompts:
            cross(prefill, decode, tokens)
            if hits:
                cross(prefill, decode, tokens, hits=hits)


def both_ways(
    layers: list[Layer],
    there: Shape,
    here: Shape,
    *prompts: int,
    theirs: list[Layer] | None = None,
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


@pytest.mark.parametrize(("one", "other", "heads"), [(1, 2, 4), (3, 2, 6), (8, 1, 2), (4, 8, 2)])
def test_tensor_parallelism(one: int, other: int, heads: int) -> None:
    """Heads that are divided otherwise, and replicas of heads on either side or both."""
    both_ways(attention(2, heads=heads, size=8), Shape(tp=one), Shape(tp=other), 1, 16, 41)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Shape(pp=2, block=32), Shape()),
        (Shape(pp=4), Shape(pp=3)),
        (Shape(pp=3, tp=2), Shape(pp=2, tp=4, order="BLNHC")),
    ],
)
def test_pipelines(one: Shape, other: Shape) -> None:
    """Layers on other ranks, and on several where tensor parallelism joins in."""
    both_ways(attention(5, size=8), one, other, 5, 64)


@pytest.mark.parametrize(("there", "here"), [(1, 3), (4, 3)])
def test_latents_are_on_every_rank(there: int, here: int) -> None:
    """Nobody reads some of the producer's ranks; they are told so."""
    one_way(latents(3), Shape(tp=there), Shape(tp=here, pp=2), 17, 48)


def test_several_consumers_of_one_producer() -> None:
    """Engines of one deployment have ids and side channels of their own."""
    layers = attention(2, size=8)
    with (
        engine("prefill 0", layers, Shape(tp=2)) as first,
        engine("prefill 1", layers, Shape(tp=4)) as second,
    ):
        for number, shape in enumerate((Shape(), Shape(tp=2, block=32), Shape(pp=2))):
            with engine(f"decode {number}", layers, shape) as decode:
                for tokens, prefill in ((20, first), (33, second), (7, first)):
                    cross(prefill, decode, tokens, seed=number)


@pytest.mark.parametrize(("there", "here"), [(16, 64), (32, 48)])
def test_blocks(there: int, here: int) -> None:
    """Larger, smaller and not a multiple; prompts that end before, on and after a border."""
    layers = attention(2, size=8)
    both_ways(layers, Shape(block=there), Shape(block=here, tp=2), 15, 48, 65, 200)


@pytest.mark.parametrize(("there", "here"), list(itertools.pairwise(ORDERS))[::2])
def test_orders(there: str, here: str) -> None:
    check_orders(there, here)


def check_orders(there: str, here: str) -> None:
    """All pairs are in ``tests/long/vllm``."""
    both_ways(attention(3, size=8), Shape(order=there, block=32), Shape(order=here, tp=2), 50)


@pytest.mark.parametrize(("there", "here"), [("FLASH_ATTN", "CPU_ATTN/vec"), ("ROCM_ATTN", "B12X")])
def test_backends(there: str, here: str) -> None:
    """Keys and values in one cell, apart, in rows, in columns and in vectors.

    ``caches/test_attention_page_copies.py`` has all pairs, without engines.
    """
    both_ways(attention(2), Shape(backend=there, block=32), Shape(backend=here, tp=2), 31, 80)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (Shape(block=64, kernel=16), Shape(block=64)),
        (Shape(block=96, kernel=48, backend=COLUMNS), Shape(block=64, kernel=16, backend=COLUMNS)),
        (Shape(block=48, kernel=16), Shape(block=32, kernel=16, tp=2)),
        (Shape(block=64, kernel=16, order="LBNHC"), Shape(block=32)),
    ],
)
def test_kernels_cut_blocks(there: Shape, here: Shape) -> None:
    """A page is the scheduler's block, whatever its kernels make of it."""
    both_ways(attention(2, size=8), there, here, 33, 64, 100)


@pytest.mark.parametrize(("there", "here", "kernel"), [(16, 16, 0), (64, 16, 16)])
def test_latents(there: int, here: int, kernel: int) -> None:
    both_ways(latents(2), Shape(block=there, kernel=kernel), Shape(block=here, tp=2), 40, 64)


PADDED: list[Layer] = [
    Attention(name="model.layers.0.attn", size=16),
    Attention(name="model.layers.1.attn", size=24, window=40),
]
"""Pages of one size are padded to the size of others, which do not divide."""


@pytest.mark.parametrize(
    ("layers", "orders"),
    [
        (attention(2, size=16, size_v=8, backend="FLASH_ATTN_DIFFKV"), ("BLHNC",)),
        (PADDED, ("LBHNC", "BLNHC")),
        (attention(2, dtype="float8_e4m3fn"), ("LBNHC",)),
    ],
    ids=["values of another size", "padded pages", "fp8"],
)
def test_sizes_of_entries(layers: list[Layer], orders: tuple[str, ...]) -> None:
    for order in orders:
        both_ways(layers, Shape(order=order), Shape(tp=2, block=32), 30, 70)


def test_unknown_kernels() -> None:
    """Pages whose inside is in no table move whole, between equals."""
    shape = Shape(order="LBNHC", tp=2)
    both_ways(attention(2, backend="OF_TOMORROW"), shape, shape, 16, 40)


LATENTS, REPLICATED, HEADS = latents(2), attention(2, heads=2, size=8), attention(2, size=8)


@pytest.mark.parametrize(
    ("layers", "there", "here"),
    [
        (LATENTS, Shape(tp=2, dcp=2), Shape()),
        (LATENTS, Shape(), Shape(tp=2, dcp=2)),
        (LATENTS, Shape(tp=4, dcp=4, interleave=4), Shape(tp=2, dcp=2, interleave=8)),
        (
            LATENTS,
            Shape(tp=3, dcp=3, interleave=4, block=12),
            Shape(tp=2, dcp=2, interleave=6, block=18),
        ),
        (LATENTS, Shape(tp=2, dcp=2, interleave=16, block=64, kernel=16), Shape(tp=2, block=32)),
        (LATENTS, Shape(tp=2, dcp=2, pp=2), Shape(tp=2, dcp=2, interleave=16)),
        # Two heads on four ranks: the two ranks of a head have half of its tokens each.
        (REPLICATED, Shape(tp=4, dcp=2, order="LBNHC"), Shape()),
        (REPLICATED, Shape(tp=4, dcp=2, interleave=16), Shape(tp=8, dcp=4, interleave=1)),
        # Prefill context parallelism deals tokens out, too.
        (LATENTS, Shape(tp=2, pcp=2, dcp=4, interleave=4), Shape(tp=4)),
        (HEADS, Shape(tp=2, pcp=2, dcp=2, interleave=4), Shape(tp=8, dcp=2, interleave=8)),
    ],
)
def test_tokens_are_dealt_out_to_context_ranks(
    layers: list[Layer], there: Shape, here: Shape
) -> None:
    """Unlike sizes and interleaves, either side or both."""
    one_way(layers, there, here, 1, 15, 33, 64, 150, hits=40)


def test_prefill_context_ranks_that_replicate() -> None:
    """The first serves; the others report at once, refusals too, and nobody knows of them.

    vLLM waits for all ranks before it ends a request whose ticket was refused.
    """
    layers = attention(2, size=8)
    with (
        engine("prefill", layers, Shape(tp=2, pcp=3)) as prefill,
        engine("decode", layers, Shape(tp=2, block=32)) as decode,
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


@pytest.mark.parametrize("window", [1, 17, 500])
def test_nothing_but_windows(window: int) -> None:
    prompts = 1, 15, 16, 17, 47, 48, 49, 130
    both_ways(windows(window, window), Shape(), Shape(block=32, tp=2), *prompts)


def test_windows_of_two_sizes() -> None:
    both_ways(windows(20, 0, 70, 20, 0, 70), Shape(block=32), Shape(tp=2), 19, 90, 200)


def test_windows_over_generated_tokens() -> None:
    """A prompt's tokens all stay (``RSWASpec``), so their pages go as those of full attention."""
    layers = attention(2, size=8, generated=20)
    both_ways(layers, Shape(block=32), Shape(tp=2), 1, 20, 64, 150)


@pytest.mark.parametrize("chunk", [20, 64])
def test_chunks(chunk: int) -> None:
    """A chunk that has just begun needs nothing, and its page is none of what it was before."""
    layers: list[Layer] = [
        Attention(name="model.layers.0.attn", size=8, chunk=chunk),
        Attention(name="model.layers.1.attn", size=8),
    ]
    for there, here in itertools.permutations((Shape(block=32), Shape(tp=2))):
        one_way(layers, there, here, 1, 20, 40, 63, 64, 65, 150)


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(
            [
                Attention(name="model.layers.0.attn", size=8),
                Attention(name="model.layers.1.attn", size=24, heads=2),
                Attention(name="model.layers.2.attn", size=8),
            ],
            id="layers of unlike size",  # one group of ``UniformTypeKVCacheSpecs``
        ),
        pytest.param(
            [*latents(2), Attention(name=DRAFT, draft=True, size=8)],
            id="latents and a draft of keys and values",
        ),
        pytest.param(
            [*attention(2, size=8), Latent(name=DRAFT, draft=True)],
            id="keys and values and a draft of latents",
        ),
    ],
)
def test_unlike_layers_in_one_group(layers: list[Layer]) -> None:
    both_ways(layers, *UNLIKE, 1, 16, 40, 100)


@pytest.mark.parametrize("window", [0, 24])
def test_draft_on_one_side(window: int) -> None:
    """In a group with the model's layers, or in one of its own that has no match."""
    model = attention(2, size=8)
    draft = [*model, Attention(name=DRAFT, draft=True, size=8, window=window)]
    both_ways(model, *UNLIKE, 1, 16, 40, 100, theirs=draft)


def test_layers_that_use_anothers_cache() -> None:
    model = attention(3, size=8)
    sharing = Shape(shares=((model[2].name, model[0].name),), backend="CPU_ATTN/vec")
    both_ways(model, sharing, replace(sharing, tp=2, block=32), 1, 16, 40, 100)


def test_group_that_is_not_transferred() -> None:
    """Its layers' caches are what each engine makes of them."""
    there = Shape(untransferred=(FULL_AND_WINDOW[0].name,))
    both_ways(FULL_AND_WINDOW, there, replace(there, tp=2, block=32), 1, 16, 40, 100)


def test_group_that_one_side_does_not_have() -> None:
    """One engine keeps a group to itself that the other one has not at all."""
    here = Shape(untransferred=(FULL_AND_WINDOW[0].name,), tp=2, block=32)
    both_ways(FULL_AND_WINDOW, Shape(), here, 1, 16, 40, 100, theirs=FULL_AND_WINDOW[1:])


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (Shape(block=64), Shape(tp=2)),
        (Shape(block=32, order="BLHNC"), Shape(block=48, tp=2)),
        (Shape(tp=2, dcp=2, interleave=8), Shape(tp=4, dcp=4, interleave=4, block=32)),
    ],
)
def test_entries_of_several_tokens(there: Shape, here: Shape) -> None:
    """Compressed latents beside plain ones."""
    layers: list[Layer] = [
        Latent(name="model.layers.0.attn"),
        Latent(name="model.layers.0.compressed", per_entry=4),
        Latent(name="model.layers.1.compressed", per_entry=4),
    ]
    both_ways(layers, there, here, 1, 16, 40, 100)


@pytest.mark.parametrize(
    ("there", "here", "groups"), [(1, 2, 1), (3, 2, 1), (2, 3, 12), (6, 1, 12)]
)
def test_states_on_other_ranks(there: int, here: int, groups: int) -> None:
    """B and C divided like the heads, or one group of them that every rank has."""
    one_way(recurrent(groups=groups), Shape(tp=there), Shape(tp=here, block=32), 1, 31, 100)


ALIGN: dict[str, Any] = {"mode": "align", "state_block": 16}
"""With prefix caching a state's page stands behind holes."""


@pytest.mark.parametrize(
    ("there", "here"),
    [
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
    ],
)
def test_states(there: Shape, here: Shape) -> None:
    one_way(recurrent(), there, here, 1, 15, 16, 17, 48, 50, 150)


@pytest.mark.parametrize(("there", "here"), [(4, 2), (3, 2)])
def test_gated_delta_net(there: int, here: int) -> None:
    one_way(recurrent(delta=True, groups=12), Shape(tp=there), Shape(tp=here, pp=2), 1, 50)


def test_states_windows_and_full_attention() -> None:
    shapes = Shape(tp=3, block=32), Shape(tp=2, order="BLHNC")
    one_way(recurrent(window=24), *shapes, 1, 23, 24, 25, 130)


GLM: list[Layer] = [
    *[Latent(name=f"model.layers.{i}.attn") for i in range(2)],
    *[Latent(name=f"model.layers.{i}.k_cache", per_entry=4, size=12) for i in range(2)],
    *[Ring(name=f"model.layers.{i}.tail_cache", slots=2, backend="KPOOL_TAIL") for i in range(2)],
]
QWEN: list[Layer] = [
    Attention(name="model.layers.0.attn", size=8),
    Latent(name="model.layers.0.indexer.compressed", per_entry=4),
    Ring(name="model.layers.0.indexer.raw_key_cache", backend="QWEN4_EXP_EXP_QSA_STATE"),
]
WHOLE = compressed(indexer="CPU_V4_INDEXER")
"""Its indexer's pages are not described, and move whole; every rank has the same."""


@pytest.mark.parametrize(
    ("layers", "one", "other"),
    [
        (compressed(), Shape(tp=2), Shape(block=32)),
        (compressed(), Shape(order="BLNHC"), Shape(tp=4, block=48)),
        (compressed(), Shape(order="LBNHC"), Shape(order="LBNHC", tp=2)),
        (compressed(), Shape(pp=2), Shape(tp=2, block=32)),
        (WHOLE, Shape(tp=2), Shape()),
        (GLM, Shape(tp=2, dcp=2, interleave=16), Shape(block=32)),
        (QWEN, Shape(tp=2), Shape(block=32)),
    ],
)
def test_rings(layers: list[Layer], one: Shape, other: Shape) -> None:
    """Fewer tokens than a ring has slots, as many, and more; GLM-5-Next's have several head slots,
    those of Qwen4-Exp stand beside keys and values."""
    shapes = [replace(s, order="BLHNC") if s.order == "LBHNC" else s for s in (one, other)]
    for there, here in itertools.permutations(shapes):
        one_way(layers, there, here, 1, 3, 4, 7, 8, 9, 31, 32, 100)
