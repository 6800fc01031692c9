"""Pairs that do not fit: refused by name before a byte moves, and nobody else is affected."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from kvferry.core.endpoint import Load
from kvferry.core.errors import KVFerryError, PageError, PlanError
from tests.vllm.geometry.crossing import Listed, cross, lists, load, offer
from tests.vllm.geometry.engine_of_ranks import Engine, Shape, engine
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


def outcomes(decode: Engine, order: Load) -> list[KVFerryError]:
    """Why the load failed on each rank."""
    errors = []
    decode.local.directory.begin(order.request, order.ticket)
    for rank in decode.workers:
        assert rank.endpoint is not None
        rank.endpoint.load(order)
        failed: Mapping[str, KVFerryError] = {}
        while order.request not in failed:
            assert rank.endpoint.wait(60.0), "the load was never reported"
            results = rank.endpoint.results()
            assert order.request not in results.received - set(results.failed)
            failed = {str(request): error for request, error in results.failed.items()}
        errors.append(failed[order.request])
    return errors


def refused(prefill: Engine, decode: Engine, tokens: int = 40) -> list[KVFerryError]:
    """Hand a request over that cannot be: no byte of the consumer changes, and the producer keeps
    its pages until it is told that nobody comes."""
    rng = np.random.default_rng(0)
    theirs, ours = lists(prefill, tokens, rng), lists(decode, tokens, rng)
    ticket = offer(prefill, "refused", tokens, theirs)
    before = [rank.memory.copy() for rank in decode.ranks]
    errors = outcomes(decode, load(decode, "refused here", ticket, ours))
    for rank, memory in zip(decode.ranks, before, strict=True):
        assert np.array_equal(rank.memory, memory)
    for rank in prefill.workers:
        rank.poll()
        assert rank.sent.count("refused") == 0
    prefill.local.scheduler_holds.reset()
    prefill.hear(orders=prefill.local.scheduler_holds.drain())
    for rank in prefill.workers:
        rank.await_sent("refused")
        assert rank.words == 0
    return errors


def attn(**options: object) -> list[Layer]:
    return attention(2, **({"size": 8} | options))


def state(**options: object) -> list[Layer]:
    return [Attention(name="model.layers.1.attn"), Recurrent(name=STATE, **options)]  # type: ignore[arg-type]


def ring(**options: object) -> list[Layer]:
    return [Latent(name="model.layers.0.attn"), Ring(name="model.layers.0.ring", **options)]  # type: ignore[arg-type]


def drafted(**options: object) -> list[Layer]:
    return [*attn(), Attention(name=DRAFT, **({"draft": True, "size": 8} | options))]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("theirs", "ours", "named"),
    [
        (attn(heads=8), attn(), r"layers\.0.*\[4, 8\)"),
        (attn(dtype="float16"), attn(), r"layers\.0.*bfloat16.*float16"),
        (attention(3, size=8), attn(), r"layers\.2.*no local rank"),
        (latents(1, size=32), latents(1), r"bytes of one entry is 48 on .* 64"),
        (latents(1, per_entry=4), latents(1), "tokens per entry is 1 on .* 4"),
        (
            drafted(),
            [*attn(), Latent(name=DRAFT, draft=True)],
            r"draft field 'model\.layers\.9",
        ),
        (drafted(), drafted(draft=False), r"layers\.9.* of draft layers on remote"),
        (state(kernel=4), state(kernel=3), r"0\.mixer/conv.*bytes of one entry is 4 on .* 6"),
        (state(heads=8), state(), r"0\.mixer"),
        (state(), state(groups=12), r"0\.mixer/conv/B"),
        (state(), [Attention(name="model.layers.1.attn"), Attention(name=STATE)], r"0\.mixer"),
    ],
)
def test_models_that_differ(theirs: list[Layer], ours: list[Layer], named: str) -> None:
    """On either side, on several ranks; each names the field and what both sides have."""
    with (
        engine("prefill", theirs, Shape(tp=2)) as prefill,
        engine("decode", ours, Shape(block=32)) as decode,
    ):
        check_named(refused(prefill, decode), named)


def check_named(errors: list[KVFerryError], named: str) -> None:
    for error in errors:
        with pytest.raises(PlanError, match=named):
            raise error


def test_others_are_not_affected() -> None:
    with (
        engine("prefill", attn(heads=8), Shape(tp=2)) as prefill,
        engine("decode", attn(), Shape(block=32)) as decode,
        engine("likewise", attn(), Shape(tp=2)) as likewise,
    ):
        cross(likewise, decode, 40)
        check_named(refused(prefill, decode), r"layers\.0")
        cross(likewise, decode, 33)


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        (ring(capacity=16), r"ring\[.* (8|16) slots of float32 1x6"),
        (ring(slots=2), r"ring\[.* 8 slots of float32 (1x6|2x6)"),
        (ring(backend="KPOOL_TAIL"), r"ring\[(KPOOL_TAIL|CompressorBackend): "),
    ],
)
def test_rings_that_differ(theirs: list[Layer], named: str) -> None:
    with (
        engine("prefill", theirs, Shape(tp=2, order="BLHNC")) as prefill,
        engine("decode", ring(), Shape(block=32, order="BLHNC")) as decode,
    ):
        check_named(refused(prefill, decode), named)


def test_rings_that_vllm_stretched() -> None:
    """To one size for all pages, in an order in which layers are outermost: capacities differ."""
    with (
        engine("prefill", ring(), Shape(order="LBNHC")) as prefill,
        engine("decode", ring(), Shape(order="LBNHC", block=32)) as decode,
    ):
        check_named(refused(prefill, decode), r"ring\[.* (64|128) slots of float32")


@pytest.mark.parametrize(
    ("there", "here"),
    [(Shape(), Shape(block=32)), (Shape(), Shape(tp=2)), (Shape(order="LBNHC"), Shape())],
)
def test_packing_that_is_not_known(there: Shape, here: Shape) -> None:
    """Pages of kernels that are in no table move between equals, and only there."""
    layers = attention(2, backend="OF_TOMORROW")
    with (
        engine("prefill", layers, there) as prefill,
        engine("decode", layers, here) as decode,
    ):
        check_named(refused(prefill, decode), "OF_TOMORROW|tokens of a block")


def test_hole_where_a_token_is_wanted() -> None:
    layers = attn()
    rng = np.random.default_rng(0)
    with engine("prefill", layers) as prefill, engine("decode", layers) as decode:
        theirs, ours = lists(prefill, 60, rng), lists(decode, 60, rng)
        [listed] = theirs
        theirs = [Listed(ids=(*listed.ids[:2], 0, *listed.ids[3:]))]
        ticket = offer(prefill, "refused", 60, theirs)
        [error] = outcomes(decode, load(decode, "here", ticket, ours))
        with pytest.raises(PageError, match=r"remote group 0: block index 2 .* a hole"):
            raise error
        prefill.ranks[0].await_sent("refused")
        cross(prefill, decode, 60)
