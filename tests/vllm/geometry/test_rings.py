"""Rings: the last tokens of a request, which later ones overwrite in place, in one page."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.geometry import MARKS
from tests.vllm.geometry.crossing import cross
from tests.vllm.geometry.engine_of_ranks import Shape, engine
from tests.vllm.geometry.model import Attention, Latent, Layer, Ring

pytestmark = MARKS

LENGTHS = (1, 3, 4, 7, 8, 9, 31, 32, 100)
"""Fewer tokens than a ring has slots, as many, and more."""


def shape(**options: Any) -> Shape:
    """A shape in the order of these models.

    They have backends that only offer orders in which blocks are outermost. In the other orders,
    vLLM makes all pages of one size, and a ring's capacity with them.
    """
    return Shape(**({"order": "BLHNC"} | options))


def compressed(*, per_entry: int = 4, window: int = 24, indexer: str = "TRITON_MLA") -> list[Layer]:
    """As DeepSeek V4.1: windows, compressed entries with an indexer's, and rings in front."""
    layers: list[Layer] = []
    for i in range(2):
        name = f"model.layers.{i}.attn"
        layers += [
            Latent(name=f"{name}.swa_cache", window=window, replay=True),
            Latent(name=f"{name}.mla_attn", per_entry=per_entry),
            Latent(name=f"{name}.indexer.k_cache", per_entry=per_entry, size=12, backend=indexer),
            Ring(name=f"{name}.compressor.state_cache", ratio=per_entry),
        ]
    return layers


def handed_over(layers: list[Layer], there: Shape, here: Shape) -> None:
    with engine("prefill", layers, there) as prefill, engine("decode", layers, here) as decode:
        for tokens in LENGTHS:
            cross(prefill, decode, tokens)
            cross(decode, prefill, tokens)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (shape(), shape()),
        (shape(tp=2), shape(block=32)),
        (shape(), shape(tp=4, block=48)),
        (shape(order="BLNHC"), shape()),
        (shape(order="LBNHC"), shape(order="LBNHC", tp=2)),
        (shape(pp=2), shape(tp=2, block=32)),
    ],
)
def test_rings_beside_compressed_entries(there: Shape, here: Shape) -> None:
    handed_over(compressed(), there, here)


@pytest.mark.parametrize(("there", "here"), [(shape(), shape()), (shape(tp=2), shape())])
def test_rings_beside_indexers_that_move_whole(there: Shape, here: Shape) -> None:
    """The pages of an indexer that is not described; every rank has the same."""
    handed_over(compressed(indexer="CPU_V4_INDEXER"), there, here)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (shape(), shape(tp=2)),
        (shape(tp=2), shape(block=32)),
        (shape(tp=2, dcp=2, interleave=16), shape(block=32)),
    ],
)
def test_rings_with_several_head_slots(there: Shape, here: Shape) -> None:
    """As GLM-5-Next: keys and scores."""
    layers = [
        *[Latent(name=f"model.layers.{i}.attn") for i in range(2)],
        *[Latent(name=f"model.layers.{i}.k_cache", per_entry=4, size=12) for i in range(2)],
        *[
            Ring(name=f"model.layers.{i}.tail_cache", slots=2, backend="KPOOL_TAIL")
            for i in range(2)
        ],
    ]
    handed_over(layers, there, here)


@pytest.mark.parametrize(
    ("there", "here"), [(shape(tp=2), shape()), (shape(), shape(tp=2, block=32))]
)
def test_rings_beside_keys_and_values(there: Shape, here: Shape) -> None:
    """As Qwen4-Exp."""
    layers: list[Layer] = [
        Attention(name="model.layers.0.attn", size=8),
        Latent(name="model.layers.0.indexer.compressed", per_entry=4),
        Ring(name="model.layers.0.indexer.raw_key_cache", backend="QWEN4_EXP_EXP_QSA_STATE"),
    ]
    handed_over(layers, there, here)
