"""The two engines in processes of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest

from tests.vllm.geometry import MARKS
from tests.vllm.geometry.crossing import Expected, Listed, lists, load, offer, released
from tests.vllm.geometry.engine_of_ranks import Shape, engine
from tests.vllm.geometry.model import Attention, Layer, Recurrent

pytestmark = MARKS

TOKENS = 100
THERE, HERE = Shape(tp=3, block=32), Shape(tp=2, pp=2)


MODEL: list[Layer] = [
    Attention(name="model.layers.0.attn", heads=6, size=8, window=40),
    Attention(name="model.layers.1.attn", heads=6, size=8),
    Recurrent(name="model.layers.2.mixer"),
    Attention(name="model.layers.3.attn", heads=6, size=8),
]


def produce(pipe: Connection) -> None:
    """A ticket, and word when its pages are nobody's any more."""
    with engine("prefill", MODEL, THERE) as prefill:
        pages = lists(prefill, TOKENS, np.random.default_rng(0))
        pipe.send(offer(prefill, "request", TOKENS, pages))
        pipe.recv()
        released(prefill, "request")
        pipe.send("released")


@pytest.fixture
def producer() -> Iterator[Connection]:
    """The other end of the pipe of a producer, which is killed in the end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=produce, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    yield ours
    process.kill()
    process.join()


def test_pages_cross_processes(producer: Connection) -> None:
    with engine("decode", MODEL, HERE) as decode:
        ticket = producer.recv()
        pages: list[Listed] = lists(decode, TOKENS, np.random.default_rng(1))
        expected = [Expected(rank, decode, MODEL) for rank in decode.ranks]
        order = load(decode, "here", ticket, pages)
        decode.hear(loads=(order,))
        for rank, each in zip(decode.ranks, expected, strict=True):
            rank.await_received("here")
            assert rank.failed == []
            each.check("request", TOKENS, pages)
        producer.send("read")
        assert producer.recv() == "released"
