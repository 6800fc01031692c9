"""Any two shapes of any model: pairs that nobody thought of, searched for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.vllm.geometry.engine_of_ranks import LONGEST, Shape, runs
from tests.vllm.geometry.model import Attention, Latent, Layer, Recurrent
from tests.vllm.geometry.scheduled import Server, hand_over, plannable, serving
from tests.vllm.geometry.test_hand_over import ORDERS

SPLITTABLE = ORDERS[:2]
"""The orders in which vLLM lets kernels cut a block."""
BACKENDS = {
    "FLASH_ATTN": ORDERS,
    "TRITON_ATTN": ORDERS,
    "B12X": ("LBHNC", "BLHNC"),
    "ROCM_ATTN": ("LBHNC", "BLHNC"),
    "CPU_ATTN/vec": ("LBHNC", "BLHNC"),
}
"""With the orders in which their kernels find their pages."""
STATE_HEADS = 12


@st.composite
def models(draw: st.DrawFn) -> list[Layer]:
    """Two to six layers of up to three kinds."""
    heads, size = draw(st.sampled_from([1, 2, 4, 12])), draw(st.sampled_from([8, 16]))
    window = draw(st.integers(1, 90))
    offered: list[Layer] = [
        Attention(name="full", heads=heads, size=size),
        Attention(name="window", heads=heads, size=size, window=window),
        Attention(name="wide", heads=heads, size=24),
        Latent(name="latent"),
        Latent(name="compressed", per_entry=4),
        Recurrent(name="mixer", groups=draw(st.sampled_from([1, STATE_HEADS]))),
        Recurrent(name="delta", groups=STATE_HEADS, delta=True),
    ]
    kinds = draw(st.lists(st.sampled_from(offered), min_size=1, max_size=2, unique=True))
    some = [kinds[i % len(kinds)] for i in range(draw(st.integers(2, 6)))]
    return [replace(kind, name=f"model.layers.{i}.{kind.name}") for i, kind in enumerate(some)]


@st.composite
def shapes(draw: st.DrawFn, model: list[Layer]) -> Shape:
    """An engine that vLLM might run the model on."""
    heads = {layer.heads for layer in model if isinstance(layer, Attention | Recurrent)}
    fits = [tp for tp in (1, 2, 3, 4, 6) if all(h % tp == 0 or tp % h == 0 for h in heads)]
    if any(isinstance(layer, Recurrent) for layer in model):
        fits = [tp for tp in fits if STATE_HEADS % tp == 0]
    tp, block = draw(st.sampled_from(fits)), draw(st.sampled_from([16, 32, 48, 64]))
    backend = draw(st.sampled_from(sorted(BACKENDS)))
    order = draw(st.sampled_from(BACKENDS[backend]))
    latent = all(isinstance(layer, Latent) for layer in model)
    dcp = draw(st.sampled_from([n for n in (1, 2, 3, 4) if tp % n == 0])) if latent else 1
    align = draw(st.booleans())
    return Shape(
        tp=tp,
        pp=draw(st.integers(1, min(3, len(model)))),
        dcp=dcp,
        interleave=draw(st.sampled_from([n for n in (4, 8, 16) if block % n == 0])),
        block=block,
        kernel=draw(st.sampled_from([0, 16])) if order in SPLITTABLE else 0,
        order=order,
        backend=backend,
        channels_first=draw(st.booleans()),
        mode="align" if align else "none",
        state_block=draw(st.sampled_from([16, block])) if align else LONGEST,
        scratch=draw(st.integers(0, 2)),
        blocks=72,
    )


def needs_exact_length(server: Server) -> bool:
    """Whether its caches are of a state or window after one number of tokens."""
    return any(group.needs_exact_length for group in server.engine.groups)


traffic = st.lists(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 120)), min_size=1, max_size=2),
    min_size=1,
    max_size=4,
)
"""Prompts of two families, some at the same time."""

no_host_pages = st.just((0, 0))
some_host_pages = st.tuples(*[st.sampled_from([0, 72, 130])] * 2).filter(any)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("pages", "count"), [(no_host_pages, 150), (some_host_pages, 75)], ids=["direct", "staged"]
)
def test_any_traffic(pages: st.SearchStrategy[tuple[int, int]], count: int) -> None:
    """Hand prompts over under vLLM's scheduler, with whatever its prefix caches hold by then.

    Engines that have host pages load by way of them. Prefill may have a drafter.
    """

    @settings(
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        max_examples=count,
    )
    @given(data=st.data(), model=models(), drafted=st.booleans(), asked=traffic)
    def search(
        data: st.DataObject, model: list[Layer], drafted: bool, asked: list[list[tuple[int, int]]]
    ) -> None:
        there, here = (
            replace(data.draw(shapes(model)), host_pages=count) for count in data.draw(pages)
        )
        draft = Attention(name="model.layers.9.attn", draft=True, heads=STATE_HEADS, size=8)
        theirs = [*model, draft] if drafted else model
        for layers, shape in ((theirs, there), (model, here)):
            assume(runs(layers, shape) and plannable(layers, shape))
        with serving("prefill", theirs, there) as prefill, serving("decode", model, here) as decode:
            # Which groups vLLM makes depends on the order. A prefill engine that has no group of
            # windows makes tickets for a token more than one that has.
            assume(needs_exact_length(prefill) or not needs_exact_length(decode))
            for batch in asked:
                hand_over(prefill, decode, *batch)

    search()
