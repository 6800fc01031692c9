"""Any two shapes of any model: pairs that nobody thought of, searched for."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.long.vllm.shapes import STATE_HEADS, models, shapes
from tests.vllm.geometry.crossing import cross
from tests.vllm.geometry.engine_of_ranks import Shape, engine, runs
from tests.vllm.geometry.model import Attention, Layer
from tests.vllm.geometry.scheduled import hand_over, plannable, serving


class Prompt(NamedTuple):
    """How many tokens it has, and how many of them the consumer has."""

    tokens: int
    hits: int


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[Layer], Shape, Shape]:
    """A model, and the shapes of two engines."""
    model = draw(models())
    return model, draw(shapes(model)), draw(shapes(model))


prompts = st.lists(
    st.builds(Prompt, tokens=st.integers(1, 120), hits=st.integers(0, 120)), min_size=1, max_size=3
)
traffic = st.lists(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 90)), min_size=1, max_size=2),
    min_size=1,
    max_size=4,
)
"""Prompts of two families, some at the same time."""

SEARCH = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@settings(SEARCH, max_examples=200)
@given(pair=pairs(), drafted=st.booleans(), asked=prompts)
def test_any_pair(
    pair: tuple[list[Layer], Shape, Shape], drafted: bool, asked: list[Prompt]
) -> None:
    """Hand prompts over from one engine to another, of which one may draft."""
    model, there, here = pair
    draft = Attention(name="model.layers.9.attn", draft=True, heads=STATE_HEADS, size=8)
    ours = [*model, draft] if drafted else model
    assume(runs(model, there) and runs(ours, here))
    with engine("prefill", model, there) as prefill, engine("decode", ours, here) as decode:
        for seed, prompt in enumerate(asked):
            cross(prefill, decode, prompt.tokens, hits=prompt.hits, seed=seed)


no_host_pages = st.just((0, 0))
some_host_pages = st.tuples(*[st.sampled_from([0, 72, 130])] * 2).filter(any)


@pytest.mark.parametrize("pages", [no_host_pages, some_host_pages], ids=["direct", "staged"])
@settings(SEARCH, max_examples=75)
@given(data=st.data(), pair=pairs(), asked=traffic)
def test_any_traffic(
    data: st.DataObject,
    pages: st.SearchStrategy[tuple[int, int]],
    pair: tuple[list[Layer], Shape, Shape],
    asked: list[list[tuple[int, int]]],
) -> None:
    """Hand prompts over under vLLM's scheduler, with whatever its prefix caches hold by then.

    Engines that have host pages load by way of them.
    """
    model, *both = pair
    there, here = (
        replace(shape, host_pages=count)
        for shape, count in zip(both, data.draw(pages), strict=True)
    )
    assume(all(runs(model, shape) and plannable(model, shape) for shape in (there, here)))
    with serving("prefill", model, there) as prefill, serving("decode", model, here) as decode:
        for batch in asked:
            hand_over(prefill, decode, *batch)
