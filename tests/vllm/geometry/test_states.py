"""States beside attention: their parts on other ranks, and which page holds them."""

from __future__ import annotations

import pytest

from tests.vllm.geometry import MARKS
from tests.vllm.geometry.crossing import cross
from tests.vllm.geometry.engine_of_ranks import Shape, engine
from tests.vllm.geometry.model import Attention, Layer, Recurrent

pytestmark = MARKS


def hybrid(*, window: int = 0, **options: object) -> list[Layer]:
    """Three recurrent layers for each with keys and values, of which some see a window only."""
    layers: list[Layer] = []
    for i in range(6):
        if i % 3 == 2:
            seen = window if i == 2 else 0
            layers.append(Attention(name=f"model.layers.{i}.attn", heads=12, size=8, window=seen))
        else:
            layers.append(Recurrent(name=f"model.layers.{i}.mixer", **options))  # type: ignore[arg-type]
    return layers


def handed_over(layers: list[Layer], there: Shape, here: Shape, *prompts: int) -> None:
    with (
        engine("prefill", layers, there) as prefill,
        engine("decode", layers, here) as decode,
    ):
        for tokens in prompts:
            cross(prefill, decode, tokens)


@pytest.mark.parametrize(
    ("there", "here"),
    [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (3, 2), (2, 3), (6, 1), (1, 6)],
)
@pytest.mark.parametrize("groups", [1, 12])
def test_tensor_parallelism(there: int, here: int, groups: int) -> None:
    """B and C divided like the heads, or one group of them that every rank has."""
    layers = hybrid(groups=groups)
    handed_over(layers, Shape(tp=there), Shape(tp=here, block=32), 1, 31, 100)


@pytest.mark.parametrize(("there", "here"), [(1, 2), (4, 2), (3, 2)])
def test_gated_delta_net(there: int, here: int) -> None:
    layers = hybrid(delta=True, groups=12)
    handed_over(layers, Shape(tp=there), Shape(tp=here, pp=2), 1, 50)


@pytest.mark.parametrize(("there", "here"), [(False, True), (True, False), (True, True)])
def test_layouts_of_convolutions(there: bool, here: bool) -> None:
    """SD and DS, on the two sides."""
    layers = hybrid(groups=1)
    shapes = Shape(tp=2, channels_first=there), Shape(channels_first=here, order="BLHNC")
    handed_over(layers, *shapes, 1, 50)


@pytest.mark.parametrize(("there", "here"), [(0, 3), (3, 0), (2, 5)])
@pytest.mark.parametrize("mode", ["none", "align"])
def test_scratch_of_speculation(there: int, here: int, mode: str) -> None:
    """Pages and columns of a state that only one side has, or more of; they are left alone."""
    layers = hybrid(groups=1)
    block = {"none": {}, "align": {"state_block": 16, "mode": "align"}}[mode]
    handed_over(
        layers,
        Shape(tp=2, scratch=there, **block),  # type: ignore[arg-type]
        Shape(scratch=here, channels_first=True, **block),  # type: ignore[arg-type]
        1,
        16,
        50,
    )


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (Shape(mode="align", state_block=16), Shape(mode="align", state_block=16)),
        (Shape(mode="align", state_block=16), Shape()),
        (Shape(tp=2), Shape(mode="align", state_block=32, block=32)),
        (Shape(mode="align", state_block=48, block=48), Shape(tp=3, mode="align", state_block=16)),
    ],
)
def test_states_that_are_cached_by_position(there: Shape, here: Shape) -> None:
    """With prefix caching a state's page stands behind holes, elsewhere on the two sides."""
    handed_over(hybrid(groups=1), there, here, 1, 15, 16, 17, 48, 49, 150)


@pytest.mark.parametrize(
    ("there", "here"),
    [(Shape(pp=2), Shape()), (Shape(pp=3, tp=2), Shape(pp=2)), (Shape(), Shape(pp=6))],
)
def test_ranks_without_states_or_without_attention(there: Shape, here: Shape) -> None:
    """A pipeline rank may have no layer of a group."""
    handed_over(hybrid(groups=1), there, here, 1, 40)


def test_states_windows_and_full_attention() -> None:
    layers = hybrid(window=24, groups=1)
    shapes = Shape(tp=3, block=32), Shape(tp=2, order="BLHNC")
    handed_over(layers, *shapes, 1, 23, 24, 25, 130)
