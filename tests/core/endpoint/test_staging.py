"""Engines whose cache is staged through host pages: real endpoints, a device that is late."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from kvferry.core.driver_calls.driver_calls import DriverCalls
from kvferry.core.endpoint import endpoint as endpoint_module
from kvferry.core.endpoint.staging_copies import RunningCopies
from kvferry.core.errors import Cause, CopyError, StaleError
from kvferry.core.lifecycle.holds import Hold, HoldEnd, PageCopy, RequestId
from kvferry.core.lifecycle.leased_holds import LeasedHolds
from kvferry.core.lifecycle.load_machine import LoadMachine
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, NewTicket
from kvferry.core.metrics import (
    COPY_SECONDS,
    FAILURES,
    STAGE_SECONDS,
    CopyDirection,
    Metrics,
    Stage,
)
from kvferry.testing.engines import CacheShape, EngineRank
from tests.core.endpoint.engines import Engine, MetricTotals, eventually, fail_once, until
from tests.core.endpoint.staged_engines import StagedEngine

TOKENS = 7
BLOCKS = [30, 21]
"""Two blocks, for ``TOKENS`` of ``CacheShape()``; no host page has these ids."""


@contextlib.contextmanager
def pair(**how: Any) -> Iterator[tuple[StagedEngine, StagedEngine]]:
    with StagedEngine("prefill", **how) as prefill, StagedEngine("decode", **how) as decode:
        yield prefill, decode


def assert_held(ranks: list[EngineRank], blocks: list[int], tokens: int) -> None:
    assert not any(rank.wrong_bytes(blocks, tokens) for rank in ranks)


def assert_untouched(decode: StagedEngine) -> None:
    assert all(np.isnan(device.read()).all() for device in decode.devices)


@pytest.mark.parametrize(
    ("remote", "local", "tokens", "which"),
    [
        (CacheShape(), CacheShape(), 1, "producer"),
        (CacheShape(tp=2, block=2), CacheShape(heads_first=False), 7, "both"),
        (CacheShape(block=8, heads_first=False), CacheShape(tp=2, block=4), 12, "both"),
        (CacheShape(tp=2, block=2), CacheShape(), 12, "consumer"),
    ],
)
def test_pages_arrive_whichever_engine_is_staged(
    remote: CacheShape, local: CacheShape, tokens: int, which: str
) -> None:
    prefills = Engine("prefill", remote) if which == "consumer" else StagedEngine("prefill", remote)
    decodes = Engine("decode", local) if which == "producer" else StagedEngine("decode", local)
    with prefills as prefill, decodes as decode:
        high = 20 if isinstance(prefill, StagedEngine) else 0
        source = [high + page for page in [5, 2, 9, 7, 3, 8]][: -(-tokens // remote.block)]
        target = [4, 11, 6, 1, 2, 3, 13][: -(-tokens // local.block)]
        assert decode.load("d-1", prefill.serve("p-1", source, tokens), target) is None
        ranks = decode.device_ranks if isinstance(decode, StagedEngine) else decode.ranks
        assert_held(ranks, target, tokens)
        if isinstance(prefill, StagedEngine):
            prefill.over("p-1")
            assert prefill.host_pages.used == 0
        if isinstance(decode, StagedEngine):
            assert decode.host_pages.used == 0


def test_blocks_are_free_before_anybody_reads() -> None:
    with pair() as (prefill, decode):
        ticket = prefill.serve("p-1", BLOCKS, TOKENS)
        prefill.sent("p-1")
        assert prefill.endpoint.held == 1
        assert prefill.host_pages.taken == 1
        prefill.devices[0].write(BLOCKS, np.float32(5))  # another request has them
        assert decode.load("d-1", ticket, [8, 9]) is None
        assert_held(decode.device_ranks, [8, 9], TOKENS)
        prefill.over("p-1")
        assert [*MetricTotals(prefill).of(COPY_SECONDS)] == [(CopyDirection.TO_HOST,)]
        totals = MetricTotals(decode)
        assert [*totals.of(COPY_SECONDS)] == [(CopyDirection.TO_DEVICE,)]
        assert (Stage.COPY,) in totals.of(STAGE_SECONDS)


def break_copies(engine: StagedEngine, when: str, error: Exception | None = None) -> None:
    """Let copies fail when they begin, or when they are half done."""
    error = error or CopyError("the device reports an error")
    if when == "begin":
        engine.devices[0].refuses = error
    else:
        engine.devices[0].fails = error


@pytest.mark.parametrize("when", ["begin", "pass"])
def test_a_hold_or_load_ends_whose_copy_fails(when: str) -> None:
    with pair() as (prefill, decode):
        break_copies(decode, when)
        error = decode.load("d-1", prefill.serve("p-1", BLOCKS, TOKENS), [8, 9])
        assert isinstance(error, CopyError)
        assert error.cause is Cause.COPY
        totals = MetricTotals(decode)
        assert totals.of(FAILURES) == {("prefill", Stage.COPY, Cause.COPY): 1}
    with pair() as (prefill, decode):
        break_copies(prefill, when)
        ticket = prefill.serve("p-2", BLOCKS, TOKENS)
        results = until(prefill.endpoint, lambda r: bool(r.ended))
        assert results.sent == {"p-2"}
        assert [hold.end for hold in results.ended] == [HoldEnd.REVOKED]
        assert isinstance(decode.load("d-2", ticket, [8, 9]), StaleError)
        assert_untouched(decode)
        assert prefill.endpoint.healthy
        assert decode.endpoint.healthy


def test_an_exception_at_a_copys_begin_or_end_costs_its_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pair() as (prefill, decode):
        for number, (owner, method) in enumerate(
            ((RunningCopies, "begin"), (LoadMachine, "copied"))
        ):
            ticket = prefill.serve(f"p-{number}", BLOCKS, TOKENS)
            prefill.sent(f"p-{number}")
            fail_once(monkeypatch, owner, method)
            error = decode.load(f"d-{number}", ticket, [8, 9])
            assert "unexpected ZeroDivisionError: a bug" in str(error)
        fail_once(monkeypatch, LeasedHolds, "copied")
        error = decode.load("d-2", prefill.serve("p-2", [5, 6], TOKENS), [3, 4])
        assert isinstance(error, StaleError)
        assert decode.load("d-3", prefill.serve("p-3", [5, 6], TOKENS), [3, 4]) is None
        assert prefill.endpoint.healthy
        assert decode.endpoint.healthy


@pytest.mark.parametrize(("way", "when"), [("out", "begin"), ("into", "pass")])
def test_memory_is_kept_if_the_end_of_a_copy_is_unknown(
    way: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "WIND_DOWN_SECONDS", 0.1)
    with pair() as (prefill, decode):
        hurt = prefill if way == "out" else decode
        [rank] = hurt.ranks
        break_copies(hurt, when, RuntimeError("the device is gone"))
        decode.pull("d-1", prefill.serve("p-1", BLOCKS, TOKENS), [8, 9])
        eventually(lambda: not rank.endpoint.healthy, "the endpoint reports a problem")
        assert "may still be under way" in rank.endpoint.problems[0]
        if way == "out":
            hurt.scheduler_holds.reset()
            hurt.step()
            eventually(lambda: rank.endpoint.held == 0, "the hold ends")
        rank.endpoint.wait(0.02)
        results = rank.endpoint.results()
        assert not results.sent
        assert not results.ended
        assert not results.received
        with pytest.raises(CopyError, match="keep the memory"):
            rank.endpoint.close()


def test_a_copy_is_refused_where_nothing_is_staged_and_needed_where_it_is(prefill: Engine) -> None:
    prefill.compute("p-1", [1], 4)
    copy = PageCopy(blocks=(1,), pages=(2,))
    assert prefill.scheduler_holds.ticket(RequestId("p-1"), 30.0, copy=copy)
    orders = prefill.scheduler_holds.drain()
    with pytest.raises(CopyError, match="has no copies"):
        prefill.endpoint.apply(orders)
    with pair() as (staged, decode):
        bare = NewTicket(request=RequestId("p"), hold=Hold(slot=0, generation=7), lease=30.0)
        with pytest.raises(CopyError, match="stages its cache"):
            staged.endpoint.apply(HoldOrders(tickets=(bare,)))
        ticket = staged.serve("p-2", BLOCKS, TOKENS)
        with pytest.raises(CopyError, match="stages its cache"):
            Engine.pull(decode, "d-1", ticket, [3, 4])
        Engine.pull(decode, "d-1", ticket, [], nothing=True)
        staged.over("p-2")


def test_a_copy_without_blocks_is_over_at_once_and_not_begun() -> None:
    """As of a request of which this rank has only holes."""
    device, ended = MagicMock(), list[object]()
    calls = DriverCalls(MagicMock(), post=list[Any]().append, clock=lambda: 0.0)
    copies = RunningCopies(device, calls, Metrics())
    copies.begin("nothing", CopyDirection.TO_HOST, PageCopy(blocks=(), pages=()), ended.append)
    assert (ended, len(copies), device.method_calls) == ([None], 0, [])
