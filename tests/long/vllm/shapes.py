"""Any model, and any shape of an engine that vLLM might run it on."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from tests.vllm.geometry.engine_of_ranks import LONGEST, Shape
from tests.vllm.geometry.model import Attention, Latent, Layer, Recurrent

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
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
        state_block=draw(st.sampled_from([16, block, 2 * block])) if align else LONGEST,
        scratch=draw(st.integers(0, 2)),
        blocks=72,
    )
