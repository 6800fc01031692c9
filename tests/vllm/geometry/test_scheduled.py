"""Under vLLM's scheduler: prefix caches, chunks, preemption, and what its lists of blocks hold."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.geometry.engine_of_ranks import Shape
from tests.vllm.geometry.model import Layer, attention, compressed, hybrid, latents, recurrent
from tests.vllm.geometry.scheduled import hand_over, serving

GROWING = [(0, 1), (0, 30), (1, 47), (0, 31), (0, 33), (1, 49), (0, 97), (2, 96), (0, 150), (1, 99)]
"""Prompts of three families: each is the start, or goes on from, what is in the prefix caches."""


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


WIDE: dict[str, Any] = {"blocks": 96}
ALIGN: dict[str, Any] = {"mode": "align", "blocks": 96, "state_block": 16}
RINGS: dict[str, Any] = {"order": "BLHNC", "blocks": 96}


@pytest.mark.parametrize(
    ("layers", "there", "here"),
    [
        (attention(4, size=8), Shape(pp=2, block=64, kernel=16), Shape(tp=4, block=48)),
        (latents(2), Shape(tp=2, block=32), Shape(tp=4, dcp=4, interleave=4)),
        (
            latents(2),
            Shape(tp=2, pcp=2, dcp=2, interleave=8),
            Shape(tp=2, dcp=2, interleave=16),
        ),
        # Ranks that replicate report what they never had to hold, through the same scheduler.
        (attention(2, size=8), Shape(tp=2, pcp=2), Shape(block=32)),
        # Each group has its own hits.
        (hybrid(17), Shape(tp=2, **WIDE), Shape(block=32, **WIDE)),
        (hybrid(40), Shape(block=64, **WIDE), Shape(pp=2, **WIDE)),
        # A state's list has holes, and a hit of attention is one of states too, or none.
        (
            recurrent(window=40),
            Shape(tp=2, **ALIGN),
            Shape(tp=3, block=32, **ALIGN | {"state_block": 32}),
        ),
        (
            recurrent(),
            Shape(tp=4, block=48, **ALIGN | {"state_block": 48}),
            Shape(tp=2, scratch=2, channels_first=True, **ALIGN),
        ),
        # States without prefix caches.
        (
            recurrent(groups=12),
            Shape(scratch=2, **WIDE),
            Shape(tp=3, channels_first=True, **WIDE),
        ),
        (recurrent(groups=12), Shape(**WIDE), Shape(**ALIGN)),
        # With bounded replay, an engine computes the window again after a hit in its own prefix
        # cache, and only then.
        (compressed(window=40), Shape(tp=2, **RINGS), Shape(block=32, **RINGS)),
    ],
)
def test_prefix_caches(layers: list[Layer], there: Shape, here: Shape) -> None:
    grow(layers, there, here)


def test_hits_that_end_inside_a_page() -> None:
    """A state's page is larger than what is hashed, so that hits may end in it: it is copied."""
    fine = Shape(tp=2, **ALIGN)
    coarse = Shape(scratch=1, **ALIGN | {"state_block": 48})
    layers = recurrent(window=40)
    assert grow(layers, fine, coarse) > 0
    assert grow(layers, coarse, fine) > 0


@pytest.mark.parametrize(
    ("layers", "blocks", "order"),
    [(recurrent(), 23, "LBHNC"), (compressed(), 30, "BLHNC")],
    ids=["states", "rings"],
)
def test_preemption(layers: list[Layer], blocks: int, order: str) -> None:
    """What a producer gives up for lack of pages it computes again; prompts are shortened once."""
    prompts = [(0, 200), (1, 150), (2, 170)]
    there, here = Shape(blocks=blocks, order=order), Shape(tp=2, block=32, blocks=96, order=order)
    with (
        serving("prefill", layers, there, batch=32, reserve=False) as prefill,
        serving("decode", layers, here) as decode,
    ):
        own = prefill.add(3, 40, {}, 120)
        hand_over(prefill, decode, *prompts)
        computed = prefill.computed.total() - prefill.computed[own]
        assert computed > sum(length - 1 for _, length in prompts)
