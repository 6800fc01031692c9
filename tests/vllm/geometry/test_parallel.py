"""Unlike parallelism on the two sides: heads, layers, replicas."""

from __future__ import annotations

import pytest

from tests.vllm.geometry import MARKS
from tests.vllm.geometry.crossing import cross
from tests.vllm.geometry.engine_of_ranks import Shape, engine
from tests.vllm.geometry.model import attention, latents

pytestmark = MARKS


@pytest.mark.parametrize(
    ("there", "here", "heads"),
    [
        (1, 1, 4),
        (1, 2, 4),
        (2, 1, 4),
        (2, 2, 4),
        (4, 2, 4),
        (2, 4, 4),
        (3, 2, 6),
        (2, 3, 6),
        (8, 1, 8),
        (1, 8, 8),
        (8, 1, 2),
        (1, 8, 2),
        (4, 8, 2),
        (8, 4, 2),
        (4, 4, 1),
    ],
)
def test_tensor_parallelism(there: int, here: int, heads: int) -> None:
    """Heads that are divided otherwise, and replicas of heads on either side or both."""
    layers = attention(2, heads=heads, size=8)
    with (
        engine("prefill", layers, Shape(tp=there)) as prefill,
        engine("decode", layers, Shape(tp=here)) as decode,
    ):
        for tokens in (1, 16, 41):
            cross(prefill, decode, tokens)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (Shape(pp=2), Shape()),
        (Shape(), Shape(pp=2)),
        (Shape(pp=2), Shape(pp=2)),
        (Shape(pp=4), Shape(pp=3)),
        (Shape(pp=2, tp=2), Shape(tp=4)),
        (Shape(tp=4), Shape(pp=2, tp=2)),
        (Shape(pp=2, tp=1, block=32), Shape(pp=3, tp=2)),
        (Shape(pp=3, tp=2), Shape(pp=2, tp=4, order="BLNHC")),
    ],
)
def test_pipelines(there: Shape, here: Shape) -> None:
    """Layers on other ranks, and on several where tensor parallelism joins in."""
    layers = attention(5, size=8)
    with (
        engine("prefill", layers, there) as prefill,
        engine("decode", layers, here) as decode,
    ):
        for tokens in (5, 64):
            cross(prefill, decode, tokens)


@pytest.mark.parametrize(("there", "here"), [(1, 3), (4, 1), (4, 3), (2, 2)])
def test_latents_are_on_every_rank(there: int, here: int) -> None:
    """Nobody reads some of the producer's ranks; they are told so."""
    layers = latents(3)
    with (
        engine("prefill", layers, Shape(tp=there)) as prefill,
        engine("decode", layers, Shape(tp=here, pp=2)) as decode,
    ):
        for tokens in (17, 48):
            cross(prefill, decode, tokens)


def test_several_consumers_of_one_producer() -> None:
    """Engines of one deployment have ids and side channels of their own."""
    layers = attention(2, size=8)
    shapes = Shape(), Shape(tp=2, block=32), Shape(pp=2)
    with (
        engine("prefill 0", layers, Shape(tp=2)) as first,
        engine("prefill 1", layers, Shape(tp=4)) as second,
    ):
        for number, shape in enumerate(shapes):
            with engine(f"decode {number}", layers, shape) as decode:
                for tokens, prefill in ((20, first), (33, second), (7, first)):
                    cross(prefill, decode, tokens, seed=number)
