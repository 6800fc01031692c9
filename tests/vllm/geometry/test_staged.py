"""Pages that are handed over by way of host memory, by any pair of shapes."""

from __future__ import annotations

import pytest

from kvferry.core.metrics import COPY_SECONDS
from tests.gpu import openreg
from tests.vllm.geometry.engine_of_ranks import Shape
from tests.vllm.geometry.model import Attention, Latent, Recurrent
from tests.vllm.geometry.rank import Rank
from tests.vllm.geometry.scheduled import hand_over, serving

FULL = tuple(Attention(name=f"model.layers.{i}.full") for i in range(3))
HYBRID = (*FULL, Attention(name="model.layers.3.window", window=40))
STATES = (*FULL[:1], Recurrent(name="model.layers.1.mixer"))
LATENT = tuple(Latent(name=f"model.layers.{i}.latent") for i in range(2))
MODELS = {"full": FULL, "hybrid": HYBRID, "states": STATES, "latent": LATENT}
HOST_PAGES = 64


@pytest.mark.parametrize(
    ("name", "staged"),
    [("full", "producer"), ("hybrid", "consumer"), ("states", "both"), ("latent", "both")],
)
def test_either_side_may_stage(name: str, staged: str) -> None:
    layers = MODELS[name]
    there, here = (
        Shape(tp=tp, block=block, host_pages=HOST_PAGES if staged in (side, "both") else 0)
        for side, tp, block in (("producer", 1, 16), ("consumer", 2, 32))
    )
    with serving("prefill", layers, there) as prefill, serving("decode", layers, here) as decode:
        hand_over(prefill, decode, (0, 17), (1, 90))
        hand_over(prefill, decode, (0, 64), (2, 33), (1, 95))
        for side, server in (("producer", prefill), ("consumer", decode)):
            for rank in server.engine.workers:
                assert copied(rank) == (staged in (side, "both"))


@openreg.NEEDED
@pytest.mark.parametrize("name", MODELS)
def test_memory_that_the_host_cannot_touch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One request at a time: an operator may write bytes that it does not change."""
    import torch

    device = str(openreg.device())
    monkeypatch.setattr(torch, "get_device_module", lambda device: openreg.module())
    layers = MODELS[name]
    there, here = (
        Shape(tp=tp, block=block, host_pages=HOST_PAGES, device=device)
        for tp, block in ((1, 16), (2, 32))
    )
    with serving("prefill", layers, there) as prefill, serving("decode", layers, here) as decode:
        for prompt in ((0, 17), (1, 90), (0, 64), (2, 33)):
            hand_over(prefill, decode, prompt)
        assert all(copied(rank) for server in (prefill, decode) for rank in server.engine.workers)


def copied(rank: Rank) -> bool:
    """Whether a rank has copied pages between its cache and host pages."""
    assert rank.endpoint is not None
    return COPY_SECONDS.name in str(rank.endpoint.take_figures())


def test_requests_wait_for_host_pages() -> None:
    """There are enough for one at a time, on either side."""
    shape = Shape(host_pages=1 + 2 * 6)
    with serving("prefill", FULL, shape) as prefill, serving("decode", FULL, shape) as decode:
        hand_over(prefill, decode, *((family, 80 + family) for family in range(6)))
