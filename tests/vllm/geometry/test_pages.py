"""Unlike pages on the two sides: their size, their order in memory, what kernels make of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.vllm.geometry import MARKS
from tests.vllm.geometry.crossing import cross
from tests.vllm.geometry.engine_of_ranks import Shape, engine
from tests.vllm.geometry.model import Attention, Layer, attention, latents

pytestmark = MARKS

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
BLOCKS = (16, 32, 48, 64)


def both_ways(layers: list[Layer], there: Shape, here: Shape, *prompts: int) -> None:
    with (
        engine("prefill", layers, there) as prefill,
        engine("decode", layers, here) as decode,
    ):
        for tokens in prompts:
            cross(prefill, decode, tokens)
            cross(prefill, decode, tokens, hits=tokens // 2)
            cross(decode, prefill, tokens)


@pytest.mark.parametrize(("there", "here"), [*itertools.combinations_with_replacement(BLOCKS, 2)])
def test_blocks(there: int, here: int) -> None:
    """Larger, smaller and not a multiple; prompts that end before, on and after a border."""
    layers = attention(2, size=8)
    both_ways(layers, Shape(block=there), Shape(block=here, tp=2), 15, 48, 65, 200)


@pytest.mark.parametrize(("there", "here"), [*itertools.combinations_with_replacement(ORDERS, 2)])
def test_orders(there: str, here: str) -> None:
    """All that ``VLLM_KV_CACHE_LAYOUT`` offers."""
    layers = attention(3, size=8)
    both_ways(layers, Shape(order=there, block=32), Shape(order=here, tp=2), 50)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("FLASH_ATTN", "CPU_ATTN/vec"),
        ("CPU_ATTN/vec", "CPU_ATTN/vec"),
        ("B12X", "FLASHINFER"),
        ("ROCM_ATTN", "TRITON_ATTN"),
        ("ROCM_ATTN", "B12X"),
        ("B12X", "CPU_ATTN/vec"),
    ],
)
def test_backends(there: str, here: str) -> None:
    """Keys and values in one cell, apart, in rows, in columns and in vectors."""
    layers = attention(2)
    both_ways(layers, Shape(backend=there, block=32), Shape(backend=here, tp=2), 31, 80)


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "CPU_ATTN/vec"])
@pytest.mark.parametrize(
    ("there", "here"),
    [
        (Shape(block=64, kernel=16), Shape(block=64)),
        (Shape(block=64, kernel=16), Shape(block=64, kernel=32)),
        (Shape(block=48, kernel=16), Shape(block=32, kernel=16, tp=2)),
        (Shape(block=64, kernel=32), Shape(block=16, tp=4)),
        (Shape(block=96, kernel=48), Shape(block=64, kernel=16)),
    ],
)
def test_kernels_cut_blocks(there: Shape, here: Shape, backend: str) -> None:
    """A page is the scheduler's block, whatever its kernels make of it."""
    layers = attention(2, size=8)
    both_ways(layers, replace(there, backend=backend), replace(here, backend=backend), 33, 64, 100)


@pytest.mark.parametrize(("there", "here"), [("LBNHC", "LBNHC"), ("LBHNC", "LBNHC")])
def test_kernels_cut_blocks_of_either_order(there: str, here: str) -> None:
    layers = attention(2, size=8)
    both_ways(layers, Shape(order=there, block=64, kernel=16), Shape(order=here, block=32), 70)


@pytest.mark.parametrize(("there", "here"), [(16, 16), (64, 16), (32, 48)])
@pytest.mark.parametrize("kernel", [0, 16])
def test_latents(there: int, here: int, kernel: int) -> None:
    both_ways(latents(2), Shape(block=there, kernel=kernel), Shape(block=here, tp=2), 40, 64)


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
def test_values_of_another_size(order: str) -> None:
    layers = attention(2, size=16, size_v=8, backend="FLASH_ATTN_DIFFKV")
    both_ways(layers, Shape(order=order, block=32), Shape(tp=2), 40)


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC", "BLNHC"])
def test_padded_pages(order: str) -> None:
    """Pages of one size are padded to the size of others, which do not divide."""
    layers: list[Layer] = [
        Attention(name="model.layers.0.attn", size=16),
        Attention(name="model.layers.1.attn", size=24, window=40),
    ]
    both_ways(layers, Shape(order=order), Shape(tp=2, block=32), 30, 70)


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_element_types(dtype: str) -> None:
    layers = attention(2, dtype=dtype)
    both_ways(layers, Shape(block=32), Shape(tp=2, order="LBNHC"), 50)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("tp", [1, 2])
def test_unknown_kernels(order: str, tp: int) -> None:
    """Pages whose inside is in no table move whole, between equals."""
    layers = attention(2, backend="OF_TOMORROW")
    both_ways(layers, Shape(order=order, tp=tp), Shape(order=order, tp=tp), 16, 40)
