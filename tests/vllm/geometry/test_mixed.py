"""Caches of several kinds in one engine, and layers that only one engine has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.vllm.geometry import MARKS
from tests.vllm.geometry.crossing import cross
from tests.vllm.geometry.engine_of_ranks import Shape, engine
from tests.vllm.geometry.model import Attention, Latent, Layer, attention, latents

pytestmark = MARKS

PROMPTS = (1, 16, 40, 100)


def both_ways(there: Shape, here: Shape, theirs: list[Layer], ours: list[Layer]) -> None:
    with (
        engine("prefill", theirs, there) as prefill,
        engine("decode", ours, here) as decode,
    ):
        for tokens in PROMPTS:
            cross(prefill, decode, tokens)
            cross(prefill, decode, tokens, hits=tokens // 2)
            cross(decode, prefill, tokens)


SHAPES = [
    (Shape(), Shape()),
    (Shape(tp=2), Shape(block=32)),
    (Shape(order="BLHNC", block=48), Shape(tp=2, order="BLNHC")),
]

DRAFT = "model.layers.9.attn"


@pytest.mark.parametrize(("there", "here"), SHAPES)
def test_layers_of_unlike_size(there: Shape, here: Shape) -> None:
    """``UniformTypeKVCacheSpecs``: one group, whose layers differ in all but their tokens."""
    layers: list[Layer] = [
        Attention(name="model.layers.0.attn", size=8),
        Attention(name="model.layers.1.attn", size=24, heads=2),
        Attention(name="model.layers.2.attn", size=8),
    ]
    both_ways(there, here, layers, layers)


@pytest.mark.parametrize(("there", "here"), SHAPES)
def test_latents_and_a_draft_of_keys_and_values(there: Shape, here: Shape) -> None:
    """The draft is on both sides, and of another kind than the model."""
    layers = [*latents(2), Attention(name=DRAFT, draft=True, size=8)]
    both_ways(there, here, layers, layers)


@pytest.mark.parametrize(("there", "here"), SHAPES)
def test_keys_and_values_and_a_draft_of_latents(there: Shape, here: Shape) -> None:
    layers = [*attention(2, size=8), Latent(name=DRAFT, draft=True)]
    both_ways(there, here, layers, layers)


@pytest.mark.parametrize("drafting", ["prefill", "decode"])
@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize(("there", "here"), SHAPES)
def test_draft_on_one_side(there: Shape, here: Shape, window: int, drafting: str) -> None:
    """In a group with the model's layers, or in one of its own that has no match."""
    model = attention(2, size=8)
    draft = [*model, Attention(name=DRAFT, draft=True, size=8, window=window)]
    theirs, ours = (draft, model) if drafting == "prefill" else (model, draft)
    both_ways(there, here, theirs, ours)


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "CPU_ATTN/vec"])
def test_layers_that_use_anothers_cache(backend: str) -> None:
    """Cross-layer sharing, on both sides or on one."""
    model = attention(3, size=8)
    sharing = Shape(shares=((model[2].name, model[0].name),), backend=backend)
    both_ways(sharing, replace(sharing, tp=2, block=32), model, model)


def test_group_that_is_not_transferred() -> None:
    """Its layers' caches are what each engine makes of them."""
    model: list[Layer] = [
        Attention(name="model.layers.0.attn", size=8),
        Attention(name="model.layers.1.attn", size=8, window=32),
    ]
    left_out = model[0].name
    there = Shape(untransferred=(left_out,))
    here = Shape(untransferred=(left_out,), tp=2, block=32)
    both_ways(there, here, model, model)


def test_group_that_one_side_does_not_have() -> None:
    """One engine keeps a group to itself that the other one has not at all."""
    model: list[Layer] = [
        Attention(name="model.layers.0.attn", size=8, window=32),
        Attention(name="model.layers.1.attn", size=8),
    ]
    here = Shape(untransferred=(model[1].name,), tp=2, block=32)
    both_ways(Shape(), here, model[:1], model)


@pytest.mark.parametrize(("there", "here"), [(16, 16), (64, 16), (32, 48)])
@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
def test_entries_of_several_tokens(there: int, here: int, order: str) -> None:
    """Compressed latents beside plain ones."""
    layers: list[Layer] = [
        Latent(name="model.layers.0.attn"),
        Latent(name="model.layers.0.compressed", per_entry=4),
        Latent(name="model.layers.1.compressed", per_entry=4),
    ]
    both_ways(Shape(block=there, order=order), Shape(block=here, tp=2), layers, layers)


def test_entries_of_several_tokens_dealt_out() -> None:
    layers: list[Layer] = [
        Latent(name="model.layers.0.attn"),
        Latent(name="model.layers.0.compressed", per_entry=4),
    ]
    both_ways(
        Shape(tp=2, dcp=2, interleave=8),
        Shape(tp=4, dcp=4, interleave=4, block=32),
        layers,
        layers,
    )
