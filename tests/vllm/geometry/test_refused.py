"""Pairs that do not fit: every rank's plan is refused, by the name of what differs."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core.errors import PlanError
from kvferry.core.planner.plan import make_plan
from tests.vllm.geometry.engine_of_ranks import Shape, layouts
from tests.vllm.geometry.model import (
    Attention,
    Latent,
    Layer,
    Recurrent,
    Ring,
    attention,
    latents,
)

DRAFT = "model.layers.9.attn"
STATE = "model.layers.0.mixer"
B: dict[str, Any] = {"order": "BLHNC"}


def attn(**options: Any) -> list[Layer]:
    return attention(2, **({"size": 8} | options))


def state(**options: Any) -> list[Layer]:
    return [Attention(name="model.layers.1.attn"), Recurrent(name=STATE, **options)]


def ring(**options: Any) -> list[Layer]:
    return [Latent(name="model.layers.0.attn"), Ring(name="model.layers.0.ring", **options)]


def drafted(**options: Any) -> list[Layer]:
    return [*attn(), Attention(name=DRAFT, **({"draft": True, "size": 8} | options))]


@pytest.mark.parametrize(
    ("theirs", "ours", "named"),
    [
        (attn(heads=8), attn(), r"layers\.0.*\[4, 8\)"),
        (attn(dtype="float16"), attn(), r"layers\.0.*bfloat16.*float16"),
        (attention(3, size=8), attn(), r"layers\.2.*no local rank"),
        (latents(1, size=32), latents(1), r"bytes of one entry is 48 on .* 64"),
        (latents(1, per_entry=4), latents(1), "tokens per entry is 1 on .* 4"),
        (drafted(), [*attn(), Latent(name=DRAFT, draft=True)], r"draft field 'model\.layers\.9"),
        (drafted(), drafted(draft=False), r"layers\.9.* of draft layers on remote"),
        (state(kernel=4), state(kernel=3), r"0\.mixer/conv.*bytes of one entry is 4 on .* 6"),
        (state(heads=8), state(), r"0\.mixer"),
        (state(), state(groups=12), r"0\.mixer/conv/B"),
        (state(), [Attention(name="model.layers.1.attn"), Attention(name=STATE)], r"0\.mixer"),
    ],
)
def test_models_that_differ(theirs: list[Layer], ours: list[Layer], named: str) -> None:
    check_refused(theirs, Shape(tp=2), ours, Shape(block=32), named)


@pytest.mark.parametrize(
    ("theirs", "there", "here", "named"),
    [
        (ring(capacity=16), Shape(tp=2, **B), Shape(block=32, **B), "(8|16) slots of float32 1x6"),
        (ring(slots=2), Shape(tp=2, **B), Shape(block=32, **B), "8 slots of float32 (1x6|2x6)"),
        (ring(backend="KPOOL_TAIL"), Shape(**B), Shape(**B), "(KPOOL_TAIL|CompressorBackend): "),
        # vLLM stretches them to one size for all pages where layers are outermost.
        (ring(), Shape(), Shape(block=32), "(64|128) slots of float32"),
    ],
)
def test_rings_that_differ(theirs: list[Layer], there: Shape, here: Shape, named: str) -> None:
    check_refused(theirs, there, ring(), here, rf"ring\[.*{named}")


@pytest.mark.parametrize(
    ("there", "here"),
    [(Shape(), Shape(block=32)), (Shape(), Shape(tp=2)), (Shape(order="LBNHC"), Shape())],
)
def test_packing_that_is_not_known(there: Shape, here: Shape) -> None:
    """Pages of kernels that are in no table move between equals, and only there."""
    layers = attention(2, backend="OF_TOMORROW")
    check_refused(layers, there, layers, here, "OF_TOMORROW|tokens of a block")


def check_refused(
    theirs: list[Layer], there: Shape, ours: list[Layer], here: Shape, named: str
) -> None:
    remote, local = layouts(theirs, there), layouts(ours, here)
    for rank in range(len(local)):
        with pytest.raises(PlanError, match=named):
            make_plan(local, remote, rank)
