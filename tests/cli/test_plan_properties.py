"""Properties of ``kvferry plan`` for any engines: files round-trip, and all bytes are counted."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from statistics import median_low

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvferry.cli.plan.engines import (
    ORDERS,
    Engine,
    PlanSettings,
    SettingsError,
    make_engine,
    parse,
)
from kvferry.cli.plan.estimate import estimate_reads, figures
from kvferry.cli.plan.model import Model
from kvferry.core.layout import axis_length
from kvferry.core.planner.build_copies import Pages, ReadRequest, build_copies
from kvferry.core.planner.plan import make_plan

FEW_EXAMPLES = settings(max_examples=25, deadline=None)


@st.composite
def models(draw: st.DrawFn) -> Model:
    layers = draw(st.integers(1, 7))
    windows = st.sampled_from([0, 0, 5, 40])
    latent = draw(st.booleans())
    return Model(
        layers=layers,
        windows={layer: draw(windows) for layer in range(layers)},
        attention_heads=24,
        kv_heads=1 if latent else draw(st.sampled_from([1, 2, 3, 6, 12])),
        parts={"latent": 6} if latent else {"k": 4, "v": 4},
        dtype="float16",
    )


@st.composite
def plan_settings(draw: st.DrawFn, model: Model) -> PlanSettings:
    """Draw settings with which the model can run."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    shared = max(1, tp // model.kv_heads)
    dcp = draw(st.sampled_from([n for n in (1, 2, 4) if shared % n == 0 == tp % n]))
    interleave = draw(st.sampled_from([1, 2, 4])) if dcp > 1 else 1
    order = draw(st.sampled_from(ORDERS))
    blocks = st.sampled_from([4, 8, 12, 16, 20])
    cut = draw(st.sampled_from([0, 4])) if order.startswith("LB") else 0
    assume(tp % model.kv_heads == 0 or model.kv_heads % tp == 0)
    return PlanSettings(
        tp=tp,
        pp=draw(st.integers(1, min(3, model.layers))),
        dcp=dcp,
        interleave=interleave,
        block_size=draw(blocks),
        layout=order,
        kernel_block=cut,
    )


@st.composite
def models_with_settings(draw: st.DrawFn) -> tuple[Model, PlanSettings, PlanSettings]:
    model = draw(models())
    return model, draw(plan_settings(model)), draw(plan_settings(model))


@FEW_EXAMPLES
@given(models_with_settings())
def test_every_byte_of_decode_is_read_once(drawn: tuple[Model, PlanSettings, PlanSettings]) -> None:
    model, one, other = drawn
    assert (parse(str(one)), parse(str(other))) == (one, other)
    model = replace(model, windows=dict.fromkeys(model.windows, 0))
    tokens = 2 * math.lcm(*(side.block_size * side.dcp for side in (one, other)))
    prefill, decode = make_engine(model, one, tokens), make_engine(model, other, tokens)
    found = estimate_reads(prefill, decode, tokens)
    for rank, layout in enumerate(decode.ranks):
        held = (
            sum(f.entry_bytes * axis_length(f.shard) for f in layout.fields) * tokens // other.dcp
        )
        assert figures(found.of_decode(rank))["bytes"] == held
    assert {read.prefill for read in found.reads} | set(found.told) == set(
        range(len(prefill.ranks))
    )


@FEW_EXAMPLES
@given(models_with_settings(), st.integers(1, 200))
def test_estimate_equals_all_copies_of_a_request(
    drawn: tuple[Model, PlanSettings, PlanSettings], tokens: int
) -> None:
    model, one, other = drawn
    prefill, decode = make_engine(model, one, tokens), make_engine(model, other, tokens)
    for read in estimate_reads(prefill, decode, tokens, ranks=[0]).reads:
        sizes = _copy_sizes(prefill, decode, tokens, read.prefill)
        assert read.sizes == Counter(sizes)
        assert figures([read]) == {
            "copies": len(sizes),
            "bytes": sum(sizes),
            "smallest": min(sizes, default=0),
            "median": median_low(sizes) if sizes else 0,
            "largest": max(sizes, default=0),
        }


def _copy_sizes(prefill: Engine, decode: Engine, tokens: int, source: int) -> list[int]:
    """Return the sizes of all copies of decode rank 0, built in one call."""
    made = make_plan(decode.ranks, prefill.ranks, 0)
    request = ReadRequest(
        ranges=tuple(
            (decode.first_token(group, tokens), tokens) for group in range(len(decode.windows))
        ),
        local=_pages(decode, tokens),
        remote=_pages(prefill, tokens),
    )
    [mine] = [one for one in made.sources if one.remote == source]
    sizes: list[int] = build_copies(mine, request).nbytes.tolist()
    return sizes


def _pages(engine: Engine, tokens: int) -> tuple[Pages, ...]:
    return tuple(
        Pages(ids=np.arange(-(-tokens // (group.block_tokens * group.context.size)), 0, -1))
        for group in engine.ranks[0].groups
    )


@FEW_EXAMPLES
@given(st.text("tpdc=,0123456789LBHN_ block_size", max_size=40))
def test_arbitrary_text_is_parsed_or_refused(text: str) -> None:
    with suppress(SettingsError):
        found = parse(text)
        assert parse(str(found)) == found
