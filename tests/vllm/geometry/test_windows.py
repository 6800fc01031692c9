"""Several groups: sliding windows beside full attention, each with its own pages and hits."""

from __future__ import annotations

import pytest

from tests.vllm.geometry import MARKS
from tests.vllm.geometry.crossing import cross
from tests.vllm.geometry.engine_of_ranks import Shape, engine
from tests.vllm.geometry.model import Attention, Layer

pytestmark = MARKS

WINDOW = 40
"""Not a multiple of any block, so that it starts inside of one."""


def hybrid(*windows: int) -> list[Layer]:
    """A layer for each window, 0 for full attention."""
    return [
        Attention(name=f"model.layers.{i}.attn", size=8, window=window)
        for i, window in enumerate(windows)
    ]


PAIRS = [
    (Shape(), Shape()),
    (Shape(), Shape(block=32)),
    (Shape(block=64), Shape(block=16, tp=2)),
    (Shape(block=48, tp=2), Shape(block=32)),
    (Shape(block=32, kernel=16), Shape(block=48, pp=2)),
    (Shape(block=16, pp=2, tp=2), Shape(block=64, tp=4, order="BLNHC")),
]


@pytest.mark.parametrize(("there", "here"), PAIRS)
def test_windows_beside_full_attention(there: Shape, here: Shape) -> None:
    """Windows whose pages start at other places on the two sides."""
    layers = hybrid(WINDOW, 0, WINDOW, WINDOW, 0, WINDOW)
    with (
        engine("prefill", layers, there) as prefill,
        engine("decode", layers, here) as decode,
    ):
        for tokens in (1, 38, 39, 40, 41, 95, 96, 97, 210):
            cross(prefill, decode, tokens)


@pytest.mark.parametrize(("there", "here"), PAIRS)
def test_hits_of_different_length(there: Shape, here: Shape) -> None:
    """What is cached here ends inside a page there, and elsewhere in each group."""
    layers = hybrid(WINDOW, 0, WINDOW, WINDOW, 0, WINDOW)
    with (
        engine("prefill", layers, there) as prefill,
        engine("decode", layers, here) as decode,
    ):
        for tokens, hits in ((97, 16), (97, 64), (210, 32), (210, 180), (210, 209)):
            cross(prefill, decode, tokens, hits=hits)


@pytest.mark.parametrize("window", [1, 16, 17, 31, 33, 500])
def test_nothing_but_windows(window: int) -> None:
    layers = hybrid(window, window)
    with (
        engine("prefill", layers, Shape(block=16)) as prefill,
        engine("decode", layers, Shape(block=32, tp=2)) as decode,
    ):
        for tokens in (1, 15, 16, 17, 47, 48, 49, 130):
            cross(prefill, decode, tokens)
            cross(decode, prefill, tokens)


def test_windows_of_two_sizes() -> None:
    layers = hybrid(20, 0, 70, 20, 0, 70)
    with (
        engine("prefill", layers, Shape(block=32)) as prefill,
        engine("decode", layers, Shape(tp=2)) as decode,
    ):
        for tokens in (19, 90, 200):
            cross(prefill, decode, tokens)
            cross(prefill, decode, tokens, hits=tokens // 2)


@pytest.mark.parametrize(
    ("there", "here"), [(Shape(block=32), Shape(tp=2)), (Shape(order="BLHNC"), Shape(block=48))]
)
def test_windows_over_generated_tokens(there: Shape, here: Shape) -> None:
    """A prompt's tokens all stay (``RSWASpec``), so their pages go as those of full attention."""
    layers: list[Layer] = [
        Attention(name=f"model.layers.{i}.attn", size=8, generated=20) for i in range(2)
    ]
    with engine("prefill", layers, there) as prefill, engine("decode", layers, here) as decode:
        for tokens in (1, 20, 64, 150):
            cross(prefill, decode, tokens)
            cross(prefill, decode, tokens, hits=tokens // 2)


@pytest.mark.parametrize("chunk", [16, 20, 64])
def test_chunks(chunk: int) -> None:
    """A chunk that has just begun needs nothing, and its page is none of what it was before."""
    layers: list[Layer] = [
        Attention(name="model.layers.0.attn", size=8, chunk=chunk),
        Attention(name="model.layers.1.attn", size=8),
    ]
    with (
        engine("prefill", layers, Shape(block=32)) as prefill,
        engine("decode", layers, Shape(tp=2)) as decode,
    ):
        for tokens in (1, 20, 40, 63, 64, 65, 150):
            cross(prefill, decode, tokens)
            cross(decode, prefill, tokens)
