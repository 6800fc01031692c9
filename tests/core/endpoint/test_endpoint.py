"""Whole loads between real endpoints: bytes, results and failures."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import (
    DeadlineError,
    EndpointClosedError,
    IncompatibleError,
    PageError,
    TicketError,
    TransportError,
    TransportUsageError,
)
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.memory import Region
from kvferry.core.planner import build_copies
from kvferry.core.side_channel.compatibility import Judgements
from kvferry.core.transport import Capabilities, PeerId, TransferId
from kvferry.core.transport.paged import PagedCopies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing import Fault, FaultyTransport, Schedule
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import Clock, Engine, RecordingTransport, eventually, load, until


@pytest.mark.parametrize(
    ("remote_shape", "local_shape", "tokens"),
    [
        (CacheShape(), CacheShape(), 12),
        (CacheShape(tp=2, block=2), CacheShape(heads_first=False), 1),
        (CacheShape(tp=4, block=6), CacheShape(tp=2, block=4), 7),
        # Two consumer ranks read two of four; the others are notified.
        (CacheShape(tp=4, replicated=True), CacheShape(tp=2, replicated=True), 4),
    ],
)
def test_pages_arrive_and_their_hold_is_released(
    remote_shape: CacheShape, local_shape: CacheShape, tokens: int
) -> None:
    """The page beyond the range is zeroed."""
    with Engine("prefill", remote_shape) as prefill, Engine("decode", local_shape) as decode:
        remote = [5, 2, 9, 7, 3, 8][: -(-tokens // remote_shape.block)]
        local = [4, 11, 6, 1, 2, 3, 13][: -(-tokens // local_shape.block) + 1]
        assert decode.load("d-1", prefill.serve("p-1", remote, tokens), local) is None
        assert not decode.wrong_bytes(local, tokens)
        prefill.released("p-1")
        assert [rank.endpoint.held for rank in prefill.ranks] == [0] * remote_shape.tp


def test_each_of_two_loads_with_one_request_id_has_its_outcome(
    prefill: Engine, decode: Engine
) -> None:
    endpoint, ticket = decode.endpoint, prefill.serve("p-1", [1], 4)
    decode.pull("d-1", dataclasses.replace(ticket, engine="decode"), [2])
    decode.pull("d-1", ticket, [3])
    eventually(lambda: endpoint.pending == 0, "both loads are over")
    first, second = endpoint.results(), endpoint.results()
    assert first.received == second.received == {"d-1"}
    assert isinstance(first.failed[RequestId("d-1")], TicketError)
    assert not second.failed
    assert not endpoint.results().received
    assert not decode.wrong_bytes([3], 4)


def test_a_partial_hit_loads_only_the_missing_pages(prefill: Engine, decode: Engine) -> None:
    ticket = prefill.serve("p-1", [1, 2, 3], 12)
    assert decode.load("d-1", ticket, [7, 8], first=4, first_index=1) is None
    rank = decode.ranks[0]
    np.testing.assert_array_equal(rank.read(1, [7, 8]), rank.values(1, 12)[4:])
    untouched = [page for page in range(decode.shape.pages) if page not in (7, 8)]
    assert np.isnan(rank.cache[:, untouched]).all()


def test_a_request_that_needs_nothing_is_released_and_not_reported(decode: Engine) -> None:
    with Engine("prefill", CacheShape(tp=2)) as prefill:
        decode.pull("d-1", prefill.serve("p-1", [1, 2], 8), [], nothing=True)
        prefill.released("p-1")
        record = until(decode.endpoint, lambda results: bool(results.loads))
        assert not record.received
        assert decode.endpoint.pending == 0


# The device.


@pytest.mark.parametrize("whose", ["producer", "consumer"])
def test_the_read_waits_for_work_of_the_device_on_the_pages(
    prefill: Engine, decode: Engine, whose: str
) -> None:
    is_done = threading.Event()
    ticket = prefill.serve_later("p-1", [1])
    prefill.step(passed=is_done.is_set if whose == "producer" else None)
    decode.pull("d-1", ticket, [2], passed=is_done.is_set if whose == "consumer" else None)
    assert not decode.endpoint.wait(0.05)
    if whose == "producer":
        prefill.ranks[0].cache[:, 1] += 1
    else:
        decode.ranks[0].cache[:, 2] = 0
    is_done.set()
    assert decode.error("d-1") is None
    np.testing.assert_array_equal(decode.ranks[0].cache[:, 2], prefill.ranks[0].cache[:, 1])


def test_closing_the_endpoint_releases_loads_that_wait_for_the_device(prefill: Engine) -> None:
    with Engine("decode") as decode:
        assert load(prefill, decode, 2) is None
        prefill.released("p-2")
        decode.pull("d-1", prefill.serve("p-1", [3], 4), [4], passed=threading.Event().is_set)
    prefill.released("p-1")


def test_what_raises_for_one_load_fails_that_load(prefill: Engine) -> None:
    """The device's answer, and the zeroing of what no read fills."""

    def broken(spans: object = True) -> bool:
        if spans:
            raise RuntimeError("these pages are read-only")
        return False

    is_over = threading.Event()
    with Engine("decode", zero=broken) as decode:
        assert load(prefill, decode, 5) is None
        error = decode.load("d-1", prefill.serve("p-1", [1], 4), [2], passed=broken)
        assert isinstance(error, EndpointClosedError)
        decode.pull("d-2", prefill.serve("p-2", [1], 4), [2, 3], passed=is_over.is_set)
        assert not decode.endpoint.wait(0.05)
        is_over.set()
        error = decode.error("d-2")
        assert isinstance(error, TransportError)
        assert "RuntimeError: these pages are read-only" in str(error)
        assert decode.load("d-3", prefill.serve("p-3", [3], 4), [5]) is None


# Failures.


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_load_that_is_aborted_or_takes_too_long_is_abandoned(
    prefill: Engine, is_aborted: bool
) -> None:
    options = EndpointOptions(load_timeout=60.0 if is_aborted else 0.05)
    with Engine("decode", options=options) as decode:
        decode.pull("d-1", prefill.serve_later("p-1", [1]), [2])
        if is_aborted:
            decode.endpoint.abort(RequestId("d-1"))
        error = decode.error("d-1")
        assert isinstance(error, EndpointClosedError if is_aborted else DeadlineError)
        assert is_aborted or "load_timeout" in str(error)
        prefill.step()
        prefill.released("p-1")


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"incarnation": 7}, TicketError, "restarted"),
        ({"pages": ((1, 99),)}, TicketError, "block 99; the producer has 16"),
        ({"engine": "decode"}, TicketError, "this very engine"),
        ({"pages": ((0, 2),)}, PageError, ""),
    ],
)
def test_a_ticket_that_does_not_fit_is_refused(
    prefill: Engine, decode: Engine, changes: dict[str, Any], kind: type, words: str
) -> None:
    """``tests/core/lifecycle/test_ticket.py`` has the other reasons."""
    ticket = prefill.serve("p-1", [1, 2], 8)
    error = decode.load("d-1", dataclasses.replace(ticket, **changes), [3, 4])
    assert isinstance(error, kind)
    assert words in str(error)
    assert np.isnan(decode.ranks[0].cache).all()
    if kind is TicketError:
        assert decode.load("d-2", ticket, [3, 4]) is None
    prefill.released("p-1")


def test_an_overridden_judgement_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    judgements = Judgements(keys=frozenset({"model"}), overridden=True)
    with (
        Engine("prefill", CacheShape(tp=2), agreement={"model": "llama"}) as prefill,
        Engine("stranger", agreement={"model": "llama", "dtype": "x"}) as third,
        Engine(
            "decode",
            CacheShape(tp=2),
            options=EndpointOptions(judgements=judgements),
            agreement={"model": "its copy", "dtype": "y"},
        ) as decode,
    ):
        for request in ("1", "2"):
            assert decode.load(f"d-{request}", prefill.serve(f"p-{request}", [1], 4), [2]) is None
        error = decode.load("d-3", third.serve("p-3", [1], 4), [2])
        assert isinstance(error, IncompatibleError)
        assert "dtype: 'y' here, 'x' there" in str(error)
    [warning] = [r.getMessage() for r in caplog.records if "although" in r.getMessage()]
    assert "engine prefill" in warning
    assert "model: 'its copy' here, 'llama' there" in warning


# The end.


def test_a_closed_endpoint_refuses_loads(prefill: Engine, decode: Engine) -> None:
    decode.endpoint.close()
    decode.endpoint.close()
    assert decode.endpoint.problems == ("the endpoint is closed",)
    with pytest.raises(EndpointClosedError):
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2])


class JumpingClock(Clock):
    """A clock that moves forward by ``step`` seconds whenever it is read."""

    step = 0.0

    def __call__(self) -> float:
        self.skip(self.step)
        return super().__call__()


def test_the_drain_goes_by_the_given_clock() -> None:
    clock = JumpingClock()
    with Engine("prefill", clock=clock) as prefill:
        prefill.compute("p-1", [1], 4)  # its hold has no lease yet
        clock.step = 1000.0
        prefill.endpoint.close(drain=10_000.0)


def test_an_engine_that_cannot_register_its_memory_leaves_nothing_open() -> None:
    class Full(RecordingTransport):
        def register(self, region: Region) -> None:
            raise TransportError("no memory key is left")

    before = set(threading.enumerate())
    first, full = RecordingTransport(), Full()
    with pytest.raises(TransportError, match="no memory key is left"):
        Engine("prefill", CacheShape(tp=2), transport=iter([first, full]).__next__)
    for each in (first, full):
        with pytest.raises(TransportUsageError, match="closed"):
            each.address()
    assert set(threading.enumerate()) <= before


class PagedTransport(LoopbackTransport):
    """Takes reads by pages, and counts them."""

    by_pages = 0

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, paged_reads=True)

    def read_pages(
        self, peer: PeerId, pages: PagedCopies, notify: bytes | None = None
    ) -> TransferId:
        self.by_pages += 1
        return self.read(peer, pages.written_out(), notify)


@pytest.mark.parametrize("fault", [None, Fault.FAIL, Fault.DOOM])
def test_a_driver_that_takes_pages_is_given_pages(
    prefill: Engine, fault: Fault | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of ``FaultyTransport`` costs only the load that it hits."""
    monkeypatch.setattr(build_copies, "MIN_PAGED_COPIES", 1)
    driver = PagedTransport()
    schedule = None if fault is None else Schedule(at={0: fault})
    with Engine("decode", transport=lambda: FaultyTransport(driver, schedule)) as decode:
        error = load(prefill, decode, 1)
        assert isinstance(error, TransportError) is (fault is not None)
        assert load(prefill, decode, 2) is None
        assert not decode.wrong_bytes([2], 4)
    assert driver.by_pages == 1 + (fault is not Fault.FAIL)
