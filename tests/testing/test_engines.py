"""The engine without a model, as users of ``kvferry.testing`` get it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.security import Access, TicketKey
from kvferry.core.security.keys import generate
from kvferry.testing import CacheShape, ModelFreeEngine
from tests.test_house import BLOCK_HEAVY, run_python

SHAPES = {
    "float32": CacheShape(tp=3, model_heads=8, block=3, heads_first=False),
    "int64": CacheShape(dtype="int64", pages=9),
    "bytes": CacheShape(dtype="uint8", windowed=False, dim=64),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_request_is_handed_over_and_both_engines_release_it(shape: CacheShape) -> None:
    with ModelFreeEngine("prefill", shape) as prefill, ModelFreeEngine("decode", shape) as decode:
        ticket = prefill.serve("p-1", [1, 2, 3], 7)
        decode.pull("d-1", ticket, [7, 4, 5])
        assert not decode.outcome("d-1").failed
        assert decode.wrong_bytes([7, 4, 5], 7) == 0
        prefill.released("p-1")
        assert prefill.scheduler_holds.held == 0


def test_engine_with_keys_and_proofs_hands_over() -> None:
    keys = [generate() for _ in range(2)]
    options = [
        EndpointOptions(access=Access(own=own, peers=frozenset({other.public})))
        for own, other in (keys, reversed(keys))
    ]
    with (
        ModelFreeEngine("prefill", options=options[0], ticket_key=TicketKey()) as prefill,
        ModelFreeEngine("decode", options=options[1]) as decode,
    ):
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2])
        assert not decode.outcome("d-1").failed
        assert decode.wrong_bytes([2], 4) == 0


def test_all_values_of_a_model_differ() -> None:
    shape = CacheShape(layers=64, model_heads=8, dim=32, dtype="int64")
    values = [
        shape.values(layer, range(*tokens), range(8))
        for tokens in itertools.pairwise((0, 2, 5))
        for layer in range(shape.layers)
    ]
    words = np.concatenate([each.ravel() for each in values])
    assert len(np.unique(words)) == len(words)


@pytest.mark.parametrize(("heads_first", "dtype"), [(True, "float32"), (False, "int64")])
def test_every_wrong_byte_is_counted(heads_first: bool, dtype: str) -> None:
    with ModelFreeEngine("prefill", CacheShape(heads_first=heads_first, dtype=dtype)) as prefill:
        [rank] = prefill.ranks
        rank.compute([3, 1], 7, first_token=5)
        assert rank.wrong_bytes([3, 1], 7, first_token=5) == 0
        assert rank.wrong_bytes([3, 1], 7) > 0
        every = rank.cache.view(np.uint8)
        for layer, page in itertools.product((0, 1), (1, 3)):
            damaged = every[layer, page].reshape(-1)
            for place in range(0, len(damaged), 37):
                damaged[place] ^= 0x10
                assert rank.wrong_bytes([3, 1], 7, first_token=5) == 1
                damaged[place] ^= 0x10


def test_engines_need_neither_pytest_nor_the_extra_testing() -> None:
    run_python(
        f"{BLOCK_HEAVY}\nsys.modules.update(dict.fromkeys(['pytest', 'hypothesis']))\n"
        "from kvferry.testing import CacheShape, EngineRank, ModelFreeEngine"
    )
