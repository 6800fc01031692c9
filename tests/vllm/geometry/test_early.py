"""Early tickets under vLLM's scheduler: both legs at once, chunk by chunk, in poisoned caches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvferry.core.layout import HOLE
from tests.vllm.geometry.engine_of_ranks import POISON, Shape
from tests.vllm.geometry.model import Layer, attention, compressed, hybrid, latents, recurrent
from tests.vllm.geometry.scheduled import PREFILL, Server, serving, wait

CHUNK = 32
ROOMS = itertools.count()
LENGTHS = (1, 2, 31, 32, 33, 64, 65, 100, 150, 200)


class Legs:
    """One request, for the first tokens of a family, on both engines."""

    def __init__(self, prefill: Server, decode: Server, family: int, length: int) -> None:
        self.prefill, self.decode = prefill, decode
        self._prompt = family, length
        self._room = f"room {next(ROOMS)}"
        self.there = self.here = ""

    def begin_prefill(self) -> None:
        self.there = self.prefill.add(*self._prompt, PREFILL | {"transfer_id": self._room})

    def begin_decode(self, follow: int = 3) -> None:
        half = self.prefill.scheduler.connector._scheduler
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": self._room,
            "remote_engine_id": half._producer.serving.engine,
            "remote_bootstrap_addr": f"http://{half._producer.serving.host}:{half._producer.serving.port}",
        }
        self.here = self.decode.add(*self._prompt, params, follow)

    @property
    def blocks(self) -> tuple[list[int], ...]:
        """The blocks that decode has given the request."""
        lists: tuple[list[int], ...] = self.decode.scheduler.kv_cache_manager.get_block_ids(
            self.here
        )
        return lists

    def arrived(self) -> int:
        """How many first blocks of full attention have no poison on any rank."""
        [group] = [group for group in self.decode.engine.groups if not group.needs_exact_length]
        pages = self.blocks[group.index]
        counts = [len(pages)]
        for rank in self.decode.engine.ranks:
            for part in rank.extents[group.index].parts:
                found = [np.all(rank.memory[part.places[page]] != POISON) for page in pages]
                counts.append(len(list(itertools.takewhile(bool, found))))
        return min(counts)


@contextmanager
def engines(layers: Sequence[Layer], there: Shape, here: Shape) -> Iterator[tuple[Server, Server]]:
    with (
        serving("prefill", layers, there, batch=CHUNK) as prefill,
        serving("decode", layers, here, batch=48) as decode,
    ):
        yield prefill, decode
        decode.run_dry()
        prefill.run_dry()


def both_at_once(prefill: Server, decode: Server, *prompts: tuple[int, int]) -> None:
    """Every token that kernels read on the way is checked."""
    legs = [Legs(prefill, decode, *each) for each in prompts]
    for each in legs:
        each.begin_prefill()
        each.begin_decode()
    finish(legs)


def finish(legs: Sequence[Legs]) -> None:
    names = {each.here for each in legs}
    decode, prefill = legs[0].decode, legs[0].prefill
    wait(lambda: names <= decode.params.keys(), prefill, decode)
    for name in names:
        assert decode.computed[name] == 3 or name not in decode.pulled


PAIRS = {
    "pp2-tp4": (attention(4, size=8), Shape(pp=2, block=64, kernel=16), Shape(tp=4, block=48)),
    "dcp2-1": (latents(2), Shape(tp=2, dcp=2), Shape(block=32)),
    "1-dcp2": (latents(2), Shape(tp=2), Shape(tp=2, dcp=2, interleave=4)),
    "windows": (hybrid(), Shape(), Shape(tp=2, block=32)),
    "windows and states": (recurrent(window=40), Shape(tp=2), Shape()),
    "rings": (compressed(), Shape(order="BLHNC"), Shape(tp=2, block=32, order="BLHNC")),
}


@pytest.mark.parametrize(("layers", "there", "here"), PAIRS.values(), ids=PAIRS)
def test_prompts_of_all_lengths(layers: list[Layer], there: Shape, here: Shape) -> None:
    """One by one, then several at once; prefixes are cached on both sides where they can be."""
    with engines(layers, there, here) as (prefill, decode):
        for family, length in enumerate(LENGTHS):
            both_at_once(prefill, decode, (family, length))
        both_at_once(prefill, decode, (9, 230), (8, 180), (7, 20))
        both_at_once(prefill, decode, (20, 70), (21, 180), (22, 20), (23, 101))
        assert decode.early > 2


TWO = attention(2, size=8)


def under_way(prefill: Server, decode: Server, chunks: int) -> Legs:
    """A request of which prefill has computed some chunks, and decode has all but the last."""
    legs = Legs(prefill, decode, 0, 150)
    legs.begin_prefill()
    legs.begin_decode()
    for chunk in range(1, chunks + 1):
        prefill.step()
        if 1 < chunk < 5:
            wait(lambda: legs.arrived() == (chunk - 1) * CHUNK // 16, decode)  # noqa: B023
    return legs


def test_pages_cross_while_the_next_chunk_is_computed() -> None:
    """A request with a hole in its blocks would be left alone."""
    with engines(TWO, Shape(), Shape()) as (prefill, decode):
        legs = Legs(prefill, decode, 0, 150)
        legs.begin_prefill()
        legs.begin_decode()
        follower = decode.scheduler.connector._scheduler._follower
        wait(lambda: len(follower._requests) == 1, decode)
        assert not legs.blocks[0]
        for blocks in (0, 2, 4, 6):
            prefill.step()
            wait(lambda: not blocks or legs.arrived() == blocks, decode)  # noqa: B023
        assert HOLE not in legs.blocks[0]
        finish([legs])


@pytest.mark.parametrize("steps", [1, 6])
def test_decode_that_comes_later(steps: int) -> None:
    with engines(TWO, Shape(tp=2), Shape()) as (prefill, decode):
        legs = Legs(prefill, decode, 0, 150)
        legs.begin_prefill()
        for _ in range(steps):
            prefill.step()
        legs.begin_decode()
        finish([legs])


def slow_but(*quick: Any) -> Callable[[Iterable[Any]], list[Any]]:
    """Mark the parameters of a test as slow, but for some; only ``make long-vllm`` runs those."""
    return lambda every: [
        each if each in quick else pytest.param(*each, marks=pytest.mark.slow) for each in every
    ]


@pytest.mark.parametrize(
    ("side", "chunks"),
    slow_but(("prefill", 3), ("decode", 4))(itertools.product(("prefill", "decode"), range(1, 6))),
)
def test_aborts_at_a_chunk(side: str, chunks: int) -> None:
    """Everything is given back, and further requests are right."""
    from vllm.v1.request import RequestStatus

    with engines(TWO, Shape(), Shape(tp=2)) as (prefill, decode):
        legs = under_way(prefill, decode, chunks)
        if side == "decode":
            decode.scheduler.finish_requests([legs.here], RequestStatus.FINISHED_ABORTED)
        elif legs.there not in prefill.params:
            prefill.scheduler.finish_requests([legs.there], RequestStatus.FINISHED_ABORTED)
            with pytest.raises(AssertionError, match=r"FinishReason\.ERROR"):
                wait(lambda: legs.here in decode.params, decode)
        schedulers = prefill.scheduler, decode.scheduler
        wait(lambda: not any(each.requests for each in schedulers), prefill, decode)
        both_at_once(prefill, decode, (1, 150))


@pytest.mark.parametrize(
    "chunks", [3, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2, 4))]
)
def test_preemption_at_a_chunk(chunks: int) -> None:
    """What prefill gives up it computes again in other blocks, under another hold."""
    with engines(TWO, Shape(tp=2), Shape()) as (prefill, decode):
        legs = under_way(prefill, decode, chunks)
        assert legs.there not in prefill.params
        prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
        finish([legs])
        assert prefill.computed[legs.there] > 150
        assert decode.early == 1
