"""Under vLLM's scheduler: prefix caches, chunks, preemption, and what its lists of blocks hold."""

from __future__ import annotations

import pytest

from tests.vllm.geometry import MARKS
from tests.vllm.geometry.engine_of_ranks import Shape
from tests.vllm.geometry.model import (
    Attention,
    Layer,
    Recurrent,
    attention,
    latents,
)
from tests.vllm.geometry.scheduled import hand_over, serving
from tests.vllm.geometry.test_rings import compressed, shape

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::UserWarning:torch")]

GROWING = [(0, 1), (0, 30), (1, 47), (0, 31), (0, 33), (1, 49), (0, 97), (2, 96), (0, 150), (1, 99)]
"""Prompts of three families: each is the start, or goes on from, what is in the prefix caches."""


def hybrid(window: int = 40) -> list[Layer]:
    """Windows beside full attention."""
    return [
        Attention(name=f"model.layers.{i}.attn", size=8, window=window if i % 3 else 0)
        for i in range(6)
    ]


def recurrent(*, window: int = 0, **options: int) -> list[Layer]:
    """States beside attention, which sees a window only on one of the layers."""
    layers: list[Layer] = []
    for i in range(6):
        if i % 3 == 2:
            seen = window if i == 2 else 0
            layers.append(Attention(name=f"model.layers.{i}.attn", heads=12, size=8, window=seen))
        else:
            layers.append(Recurrent(name=f"model.layers.{i}.mixer", **options))  # type: ignore[arg-type]
    return layers


def grow(layers: list[Layer], there: Shape, here: Shape) -> int:
    """All prompts, one after the other, and then several at once.

    Returns:
        How many pages of prefix caches were copied before they were written.
    """
    with (
        serving("prefill", layers, there) as prefill,
        serving("decode", layers, here, batch=48) as decode,
    ):
        for prompt in GROWING:
            hand_over(prefill, decode, prompt)
        hand_over(prefill, decode, (3, 70), (0, 180), (4, 20), (1, 101))
        assert len(decode.pulled) > len(GROWING) // 2
        return prefill.copied + decode.copied


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (Shape(tp=2), Shape(block=32)),
        (Shape(block=48), Shape(tp=2, pp=2)),
        (Shape(pp=2, block=64, kernel=16), Shape(tp=4, block=48)),
    ],
)
def test_full_attention(there: Shape, here: Shape) -> None:
    grow(attention(4, size=8), there, here)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (Shape(tp=2, dcp=2), Shape(block=32)),
        (Shape(tp=2, block=32), Shape(tp=4, dcp=4, interleave=4)),
        (Shape(tp=2, pcp=2, dcp=2, interleave=8), Shape(tp=2, dcp=2, interleave=16)),
    ],
)
def test_latents_dealt_out(there: Shape, here: Shape) -> None:
    grow(latents(2), there, here)


def test_prefill_context_ranks_that_replicate() -> None:
    """They report what they never had to hold, through the same scheduler."""
    grow(attention(2, size=8), Shape(tp=2, pcp=2), Shape(block=32))


@pytest.mark.parametrize("window", [17, 40])
@pytest.mark.parametrize(
    ("there", "here"),
    [
        (Shape(blocks=96), Shape(blocks=96)),
        (Shape(tp=2, blocks=96), Shape(block=32, blocks=96)),
        (Shape(block=64, blocks=96), Shape(pp=2, blocks=96)),
    ],
)
def test_windows_and_prefix_caches(there: Shape, here: Shape, window: int) -> None:
    """Each group has its own hits."""
    grow(hybrid(window), there, here)


ALIGN = {"mode": "align", "blocks": 96}


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (Shape(state_block=16, **ALIGN), Shape(state_block=16, **ALIGN)),  # type: ignore[arg-type]
        (
            Shape(tp=2, state_block=16, **ALIGN),  # type: ignore[arg-type]
            Shape(tp=3, block=32, state_block=32, **ALIGN),  # type: ignore[arg-type]
        ),
        (
            Shape(tp=4, block=48, state_block=48, **ALIGN),  # type: ignore[arg-type]
            Shape(tp=2, state_block=16, scratch=2, channels_first=True, **ALIGN),  # type: ignore[arg-type]
        ),
        (Shape(scratch=3, state_block=16, **ALIGN), Shape(tp=2, pp=2, state_block=16, **ALIGN)),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("window", [0, 40])
def test_states_and_prefix_caches(there: Shape, here: Shape, window: int) -> None:
    """A state's list has holes, and a hit of attention is one of states too, or none."""
    grow(recurrent(window=window), there, here)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("large", [48, 64])
def test_hits_that_end_inside_a_page(large: int, window: int) -> None:
    """A state's page is larger than what is hashed, so that hits may end in it: it is copied."""
    fine = Shape(tp=2, state_block=16, **ALIGN)  # type: ignore[arg-type]
    coarse = Shape(state_block=large, scratch=1, **ALIGN)  # type: ignore[arg-type]
    layers = recurrent(window=window)
    assert grow(layers, fine, coarse) > 0
    assert grow(layers, coarse, fine) > 0


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (Shape(tp=2, blocks=96), Shape(block=32, blocks=96)),
        (Shape(blocks=96, scratch=2), Shape(tp=3, blocks=96, channels_first=True)),
        (Shape(blocks=96), Shape(state_block=16, **ALIGN)),  # type: ignore[arg-type]
    ],
)
def test_states_without_prefix_caches(there: Shape, here: Shape) -> None:
    grow(recurrent(groups=12), there, here)


@pytest.mark.parametrize("window", [24, 40])
@pytest.mark.parametrize(
    ("there", "here"),
    [
        (shape(blocks=96), shape(blocks=96)),
        (shape(tp=2, blocks=96), shape(block=32, blocks=96)),
        (shape(block=64, blocks=96), shape(tp=4, blocks=96)),
    ],
)
def test_rings_and_bounded_replay(there: Shape, here: Shape, window: int) -> None:
    """An engine computes the window again after a hit in its own prefix cache, and only then."""
    grow(compressed(window=window), there, here)


def test_rings_after_preemption() -> None:
    """A producer that gives a ring up computes its tokens again."""
    layers = compressed()
    prompts = [(0, 200), (1, 150), (2, 170)]
    with (
        serving("prefill", layers, shape(blocks=30), batch=32, reserve=False) as prefill,
        serving("decode", layers, shape(tp=2, block=32, blocks=96)) as decode,
    ):
        own = prefill.add(3, 40, {}, 120)
        hand_over(prefill, decode, *prompts)
        computed = prefill.computed.total() - prefill.computed[own]
        assert computed > sum(length - 1 for _, length in prompts)


def test_preemption() -> None:
    """What a producer gives up for lack of pages it computes again; prompts are shortened once."""
    layers = recurrent()
    prompts = [(0, 200), (1, 150), (2, 170)]
    with (
        serving("prefill", layers, Shape(blocks=23), batch=32, reserve=False) as prefill,
        serving("decode", layers, Shape(tp=2, block=32, blocks=96)) as decode,
    ):
        own = prefill.add(3, 40, {}, 120)
        hand_over(prefill, decode, *prompts)
        computed = prefill.computed.total() - prefill.computed[own]
        assert computed > sum(length - 1 for _, length in prompts)
