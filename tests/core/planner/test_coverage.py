"""How elements stand for numbers is compared wherever a tensor is held."""

from __future__ import annotations

import pytest
from msgspec.structs import replace as replace_field

from kvferry.core.errors import LayoutError, PlanError
from kvferry.core.layout import MAX_ENCODING, Layout
from kvferry.core.planner.plan import make_plan
from tests.core.layouts import heads, layout

HALF, WHOLE = "fp8_e4m3, k 0.5, v 0.25", "fp8_e4m3, k 1.0, v 1.0"


def ranks(*encodings: str, draft: bool = False) -> list[Layout]:
    """One rank per encoding, each with a head; with ``draft``, beside a layer that has none."""
    found = []
    for index, encoding in enumerate(encodings):
        shard = (index, index + 1)
        own = replace_field(heads(shard=shard), encoding=encoding, draft=draft)
        found.append(layout(own, heads("plain", shard=shard, region=1)))
    return found


def test_equal_encodings_are_read() -> None:
    assert make_plan(ranks(HALF), ranks(HALF), 0).sources


def test_refuses_other_encodings_with_both_values_the_field_and_the_rank() -> None:
    message = f"field 'k': encoding is '{HALF}' on local rank 0 and '{WHOLE}' on remote rank 1"
    with pytest.raises(PlanError, match=message):
        make_plan(ranks(HALF, HALF), ranks(HALF, WHOLE), 0)


def test_draft_layers_that_are_left_out_are_not_compared() -> None:
    bare = [layout(heads("plain", shard=(0, 1)))]
    assert make_plan(bare, ranks(WHOLE, draft=True), 0).sources
    assert make_plan(ranks(WHOLE, draft=True), bare, 0).sources


def test_an_encoding_is_bounded() -> None:
    with pytest.raises(LayoutError, match=f"up to {MAX_ENCODING} characters"):
        layout(replace_field(heads(), encoding="x" * (MAX_ENCODING + 1)))
