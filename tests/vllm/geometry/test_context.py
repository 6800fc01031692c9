"""Context parallelism: a request's tokens dealt out, or replicated, among ranks."""

from __future__ import annotations

import pytest

from tests.vllm.geometry import MARKS
from tests.vllm.geometry.crossing import cross
from tests.vllm.geometry.engine_of_ranks import Shape, engine
from tests.vllm.geometry.model import Layer, attention, latents

pytestmark = MARKS

PROMPTS = (1, 15, 33, 64, 150)


def handed_over(layers: list[Layer], there: Shape, here: Shape, *, hits: int = 0) -> None:
    with (
        engine("prefill", layers, there) as prefill,
        engine("decode", layers, here) as decode,
    ):
        for tokens in PROMPTS:
            cross(prefill, decode, tokens)
            if hits:
                cross(prefill, decode, tokens, hits=hits)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (Shape(tp=2, dcp=2), Shape()),
        (Shape(), Shape(tp=2, dcp=2)),
        (Shape(tp=2, dcp=2), Shape(tp=4, dcp=4)),
        (Shape(tp=4, dcp=4, interleave=4), Shape(tp=2, dcp=2, interleave=8)),
        (Shape(tp=4, dcp=2, interleave=16), Shape(tp=3, block=48)),
        (Shape(tp=2, dcp=2, interleave=2, block=32), Shape(tp=8, dcp=4, interleave=1)),
        (Shape(tp=3, dcp=3, interleave=4, block=12), Shape(tp=2, dcp=2, interleave=6, block=18)),
        (Shape(tp=2, dcp=2, interleave=16, block=64, kernel=16), Shape(tp=2, block=32)),
        (Shape(tp=2, dcp=2, pp=2), Shape(tp=2, dcp=2, interleave=16)),
    ],
)
def test_latents_are_dealt_out(there: Shape, here: Shape) -> None:
    """Unlike sizes and interleaves, either side or both."""
    handed_over(latents(2), there, here, hits=40)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (Shape(tp=4, dcp=2), Shape()),
        (Shape(tp=2), Shape(tp=4, dcp=2, interleave=4)),
        (Shape(tp=4, dcp=2, interleave=16), Shape(tp=8, dcp=4, interleave=1)),
        (Shape(tp=4, dcp=2, order="LBNHC"), Shape(tp=4, dcp=2, interleave=8, block=32)),
    ],
)
def test_replicated_heads_share_out_tokens(there: Shape, here: Shape) -> None:
    """Two heads on four ranks: the two ranks of a head have half of its tokens each."""
    handed_over(attention(2, heads=2, size=8), there, here, hits=40)


@pytest.mark.parametrize("here", [Shape(), Shape(tp=2, dcp=2, interleave=8), Shape(tp=4)])
@pytest.mark.parametrize("dcp", [2, 4])
def test_prefill_context_ranks_deal_latents_out(dcp: int, here: Shape) -> None:
    """Across the prefill context ranks alone, or across those of tensor parallelism too."""
    handed_over(latents(2), Shape(tp=2, pcp=2, dcp=dcp, interleave=4), here)


@pytest.mark.parametrize("here", [Shape(), Shape(tp=4), Shape(tp=8, dcp=2, interleave=8)])
def test_prefill_context_ranks_deal_heads_tokens_out(here: Shape) -> None:
    handed_over(attention(2, size=8), Shape(tp=2, pcp=2, dcp=2, interleave=4), here)


@pytest.mark.parametrize("tp", [1, 2])
def test_prefill_context_ranks_that_replicate(tp: int) -> None:
    """The first serves; the others report at once, and nobody knows of them."""
    layers = attention(2, size=8)
    with (
        engine("prefill", layers, Shape(tp=tp, pcp=3)) as prefill,
        engine("decode", layers, Shape(tp=2, block=32)) as decode,
    ):
        assert len(prefill.ranks) == 3 * tp
        assert len(prefill.workers) == tp
        for tokens in PROMPTS:
            cross(prefill, decode, tokens)


def test_prefill_context_ranks_that_replicate_report_refusals() -> None:
    """vLLM waits for all ranks before it ends a request whose ticket was refused."""
    with engine("prefill", attention(2, size=8), Shape(pcp=2)) as prefill:
        for rank in prefill.ranks:
            rank.hear(refused=(("r", "it may not load"),))
            rank.poll()
            rank.poll()
            assert (rank.received, rank.failed) == (["r"], ["r"])
