"""``LocalEngine``; ``tests/test_examples.py`` has whole hand-overs between two of two ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.managers import BaseManager
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvferry import (
    Coordinates,
    Endpoint,
    EndpointOptions,
    Identity,
    Layout,
    LocalEngine,
    Results,
    Ticket,
    create_transport,
    random_incarnation,
    region_of,
)
from kvferry.core.errors import (
    HandshakeError,
    LayoutError,
    TicketError,
)
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.side_channel.connection import revoke
from kvferry.testing import CacheShape, EngineRank
from tests.core.endpoint.engines import Engine
from tests.core.layouts import STATE, plain_field

SHAPE, TWO = CacheShape(), CacheShape(tp=2)
PROMPT = range(6)


@pytest.fixture
def two() -> Iterator[Engine]:
    with Engine("two", TWO) as engine:
        yield engine


def computed(engine: Engine, request: str, pages: list[int]) -> Ticket:
    engine.compute(request, pages, len(PROMPT))
    return engine.finish_prefill(request, PROMPT, pages)


def received(engine: LocalEngine) -> Results:
    while not (results := engine.results(timeout=1.0)).received:
        pass
    return results


def test_held_pages_are_given_back_by_request(prefill: Engine) -> None:
    computed(prefill, "theirs", [3, 1])
    server = prefill.server
    assert revoke(server.host, server.port, timeout=60.0).tickets == 1
    prefill.step()
    assert prefill.results(timeout=20.0).sent == {"theirs"}


def test_no_more_requests_are_held_than_there_are_pages(prefill: Engine) -> None:
    taken_on = [prefill.begin_prefill(f"{n}") for n in range(SHAPE.pages + 1)]
    assert taken_on == [True] * SHAPE.pages + [False]
    prefill.cancel_prefill("0")
    assert prefill.begin_prefill("another")


class Worker(Endpoint):
    """One of two ranks, and its cache."""

    def __init__(self, incarnation: Any, rank: int) -> None:
        self._cache, self._rank = TWO.new_cache(rank), rank
        super().__init__(
            identity=Identity(
                engine="two", incarnation=incarnation, rank=rank, coordinates=Coordinates(tp=rank)
            ),
            driver="loopback",
            transport=create_transport("loopback"),
            layout=TWO.layout(rank, self._cache),
            slots=TWO.pages,
        )

    def published(self) -> object:
        return self.payload

    def wrong_bytes(self, pages: list[int], tokens: int) -> int:
        rank = EngineRank(shape=TWO, index=self._rank, cache=self._cache, endpoint=self)
        return rank.wrong_bytes(pages, tokens)


class WorkerProcess(BaseManager):
    """A process for a rank."""


WorkerProcess.register("Worker", Worker)


def test_ranks_may_be_in_processes_of_their_own(prefill: Engine) -> None:
    incarnation, ranks = random_incarnation(), list[Any]()
    with ExitStack() as stack:
        for rank in range(2):
            process: Any = WorkerProcess(ctx=multiprocessing.get_context("spawn"))
            worker = stack.enter_context(process).Worker(incarnation, rank)
            worker.payload, worker.problems = worker.published(), ()
            ranks.append(worker)
        decode = stack.enter_context(LocalEngine(ranks))
        decode.begin_load("ours", computed(prefill, "theirs", [3, 1]), PROMPT, [2, 7])
        assert received(decode).failed == {}
        assert [rank.wrong_bytes([2, 7], len(PROMPT)) for rank in ranks] == [0, 0]
        assert prefill.results(timeout=20.0).sent == {"theirs"}


def test_a_load_has_ended_when_it_has_on_every_rank_and_failed_if_on_any(
    two: Engine, prefill: Engine
) -> None:
    late = two.ranks[1].endpoint
    with mock.patch.object(late, "results", Results):
        two.begin_load("ours", computed(prefill, "theirs", [3, 1]), PROMPT, [2, 7])
        late.abort(RequestId("ours"))
        assert late.wait(20.0)
        assert prefill.results(timeout=20.0).sent == {"theirs"}
        assert not two.results(timeout=0.1).received
        with pytest.raises(TicketError, match="'ours' is loaded already"):
            two.begin_load("ours", computed(prefill, "others", [4, 5]), PROMPT, [2, 7])
    assert two.results(timeout=20.0).failed.keys() == {"ours"}


def test_pages_may_be_reused_when_every_rank_has_sent_them(two: Engine, decode: Engine) -> None:
    late = two.ranks[1].endpoint
    with mock.patch.object(late, "results", Results):
        decode.begin_load("ours", computed(two, "theirs", [1, 2]), PROMPT, [1, 2])
        assert received(decode).failed == {}
        assert late.wait(20.0)
        assert not two.results(timeout=0.1).sent
        assert not two.begin_prefill("theirs")
    assert two.results(timeout=20.0).sent == {"theirs"}
    assert two.begin_prefill("theirs")


def test_a_load_is_aborted_on_all_ranks(two: Engine, prefill: Engine) -> None:
    ticket = computed(prefill, "theirs", [3, 1])
    two.begin_load("ours", ticket, PROMPT, [2, 7], passed=lambda: False)
    two.abort_load("ours")
    assert received(two).failed.keys() == {"ours"}


def test_a_ticket_for_another_prompt_is_refused(prefill: Engine, decode: Engine) -> None:
    ticket = computed(prefill, "theirs", [1, 2])
    with pytest.raises(TicketError, match="'theirs' was made for another prompt than that of 'our"):
        decode.begin_load("ours", ticket, PROMPT[::-1], [1, 2])
    assert decode.ranks[0].endpoint.pending == 0


def test_a_request_that_was_begun_gets_one_ticket() -> None:
    with Engine("prefill", options=EndpointOptions(lease=0.05)) as prefill:
        with pytest.raises(TicketError, match="begin_prefill did not take it on"):
            prefill.finish_prefill("unknown", PROMPT, [1, 2])
        computed(prefill, "once", [1, 2])
        with pytest.raises(TicketError, match="or it has its ticket already"):
            prefill.finish_prefill("once", PROMPT, [1, 2])
        assert prefill.begin_prefill("wrong")
        with pytest.raises(TicketError, match="more than once"):
            prefill.finish_prefill("wrong", PROMPT, [3, 3])
        sent = set[str]()
        while sent != {"once", "wrong"}:  # their leases end
            sent |= prefill.results(timeout=20.0).sent


def test_endpoints_are_closed_if_the_side_channel_cannot_listen(prefill: Engine) -> None:
    layouts = [TWO.layout(rank, TWO.new_cache(rank)) for rank in range(2)]
    with (
        mock.patch.object(Endpoint, "close", autospec=True, side_effect=Endpoint.close) as close,
        pytest.raises(HandshakeError, match="the port is in use"),
    ):
        LocalEngine.start("other", layouts, port=prefill.server.port)
    assert close.call_count == 2


def test_states_and_device_memory_are_refused() -> None:
    memory = np.zeros((4, 16), dtype=np.float32)
    state = plain_field(page_stride=64, pages=4, unit=64)
    states = Layout(regions=(region_of(memory),), groups=(STATE,), fields=(state,))
    with pytest.raises(LayoutError, match="groups of kind state in memory of kind cpu"):
        LocalEngine.start("engine", [states])
    cuda = replace(SHAPE, memory="cuda").layout(0, SHAPE.new_cache(0))
    with pytest.raises(LayoutError, match="groups of kind paged in memory of kind cuda"):
        LocalEngine.start("engine", [cuda])
