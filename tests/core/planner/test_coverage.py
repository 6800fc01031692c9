"""Encodings must be equal on every rank of both engines that holds a field."""

from __future__ import annotations

import pytest
from msgspec.structs import replace as replace_field

from kvferry.core.errors import LayoutError, PlanError
from kvferry.core.layout import MAX_ENCODING, Layout
from kvferry.core.planner.plan import make_plan
from tests.core.layouts import heads, layout

ENCODING, OTHER_ENCODING = "fp8_e4m3, k 0.5, v 0.25", "fp8_e4m3, k 1.0, v 1.0"


def ranks(*encodings: str, draft: bool = False) -> list[Layout]:
    """Return one rank per encoding, each with a head of that encoding and one without."""
    layouts = []
    for index, encoding in enumerate(encodings):
        shard = (index, index + 1)
        field = replace_field(heads(shard=shard), encoding=encoding, draft=draft)
        layouts.append(layout(field, heads("plain", shard=shard, region=1)))
    return layouts


def test_equal_encodings_are_read() -> None:
    assert make_plan(ranks(ENCODING), ranks(ENCODING), 0).sources


def test_different_encodings_are_refused_naming_field_ranks_and_values() -> None:
    message = (
        f"field 'k': encoding is '{ENCODING}' on local rank 0 and '{OTHER_ENCODING}' on remote "
        "rank 1"
    )
    with pytest.raises(PlanError, match=message):
        make_plan(ranks(ENCODING, ENCODING), ranks(ENCODING, OTHER_ENCODING), 0)


def test_encodings_of_draft_layers_that_are_not_read_are_not_compared() -> None:
    bare = [layout(heads("plain", shard=(0, 1)))]
    assert make_plan(bare, ranks(OTHER_ENCODING, draft=True), 0).sources
    assert make_plan(ranks(OTHER_ENCODING, draft=True), bare, 0).sources


def test_the_length_of_an_encoding_is_bounded() -> None:
    with pytest.raises(LayoutError, match=f"up to {MAX_ENCODING} characters"):
        layout(replace_field(heads(), encoding="x" * (MAX_ENCODING + 1)))
