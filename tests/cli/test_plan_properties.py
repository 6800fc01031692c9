"""Any engines: what ``kvferry plan`` draws can be written and read, and its bytes add up."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvferry.cli.plan.engines import (
    ORDERS,
    Engine,
    EngineError,
    PlanSettings,
    SettingsError,
    make_engine,
    parse,
    read_engine,
    write_engine,
)
from kvferry.cli.plan.estimate import estimate_reads
from kvferry.cli.plan.model import Model
from kvferry.core.layout import axis_length
from kvferry.core.planner.build_copies import Pages, ReadRequest, build_copies
from kvferry.core.planner.plan import make_plan

QUICK = settings(max_examples=60, deadline=None)


@st.composite
def models(draw_from: st.DrawFn) -> Model:
    layers = draw_from(st.integers(1, 7))
    windows = st.sampled_from([0, 0, 5, 40])
    latent = draw_from(st.booleans())
    return Model(
        layers=layers,
        windows={layer: draw_from(windows) for layer in range(layers)},
        attention_heads=24,
        kv_heads=1 if latent else draw_from(st.sampled_from([1, 2, 3, 6, 12])),
        parts={"latent": 6} if latent else {"k": 4, "v": 4},
        dtype="float16",
    )


@st.composite
def set_up(draw_from: st.DrawFn, model: Model) -> PlanSettings:
    """Settings that the model can be run with."""
    tp = draw_from(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    shared = max(1, tp // model.kv_heads)
    dcp = draw_from(st.sampled_from([n for n in (1, 2, 4) if shared % n == 0 == tp % n]))
    interleave = draw_from(st.sampled_from([1, 2, 4])) if dcp > 1 else 1
    order = draw_from(st.sampled_from(ORDERS))
    blocks = st.sampled_from([4, 8, 12, 16, 20])
    cut = draw_from(st.sampled_from([0, 4])) if order.startswith("LB") else 0
    assume(tp % model.kv_heads == 0 or model.kv_heads % tp == 0)
    return PlanSettings(
        tp=tp,
        pp=draw_from(st.integers(1, min(3, model.layers))),
        dcp=dcp,
        interleave=interleave,
        block_size=draw_from(blocks),
        layout=order,
        kernel_block=cut,
    )


@st.composite
def pairs(draw_from: st.DrawFn) -> tuple[Model, PlanSettings, PlanSettings]:
    model = draw_from(models())
    return model, draw_from(set_up(model)), draw_from(set_up(model))


@QUICK
@given(pairs())
def test_an_engine_written_is_the_engine_read(
    tmp_path_factory: pytest.TempPathFactory, given_: tuple[Model, PlanSettings, PlanSettings]
) -> None:
    model, one, _ = given_
    engine = make_engine(model, one, 50)
    file = tmp_path_factory.getbasetemp() / "engine.json"
    write_engine(file, engine)
    assert read_engine(file) == engine


@QUICK
@given(pairs())
def test_settings_are_read_as_they_are_written(
    given_: tuple[Model, PlanSettings, PlanSettings],
) -> None:
    assert parse(str(given_[1]), "--decode") == given_[1]


@QUICK
@given(pairs())
def test_every_byte_that_decode_holds_of_a_request_is_read_once(
    given_: tuple[Model, PlanSettings, PlanSettings],
) -> None:
    model, one, other = given_
    model = replace(model, windows=dict.fromkeys(model.windows, 0))
    tokens = 2 * math.lcm(*(side.block_size * side.dcp for side in (one, other)))
    prefill, decode = make_engine(model, one, tokens), make_engine(model, other, tokens)
    found = estimate_reads(prefill, decode, tokens)
    for rank, layout in enumerate(decode.ranks):
        held = (
            sum(f.entry_bytes * axis_length(f.shard) for f in layout.fields) * tokens // other.dcp
        )
        assert found.sizes_of(found.of_decode(rank)).total == held
    everything = sum(found.sizes_of(found.of_prefill(n)).total for n in range(len(prefill.ranks)))
    assert everything == found.sizes.total
    assert {read.prefill for read in found.reads} | set(found.told) == set(range(one.ranks))


@QUICK
@given(pairs(), st.integers(1, 200))
def test_stretches_stand_for_all_the_copies_of_a_request(
    given_: tuple[Model, PlanSettings, PlanSettings], tokens: int
) -> None:
    model, one, other = given_
    prefill, decode = make_engine(model, one, tokens), make_engine(model, other, tokens)
    for read in estimate_reads(prefill, decode, tokens, ranks=[0]).reads:
        nbytes, counts = np.unique(
            _at_once(prefill, decode, tokens, read.prefill), return_counts=True
        )
        assert read.sizes.nbytes.tolist() == nbytes.tolist()
        assert read.sizes.counts.tolist() == counts.tolist()


def _at_once(prefill: Engine, decode: Engine, tokens: int, source: int) -> list[int]:
    """The sizes of the copies of decode rank 0, of all groups and tokens in one call."""
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


@QUICK
@given(st.text("tpdc=,0123456789LBHN_ block_size", max_size=40))
def test_any_text_is_settings_or_refused(text: str) -> None:
    with suppress(SettingsError):
        found = parse(text, "--prefill")
        assert parse(str(found), "--prefill") == found


@QUICK
@given(st.binary(max_size=60))
def test_any_bytes_are_no_engine(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file: Path = tmp_path_factory.getbasetemp() / "bytes.json"
    file.write_bytes(data)
    with pytest.raises(EngineError):
        read_engine(file)
