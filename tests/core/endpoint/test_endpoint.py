"""Whole loads between real endpoints: bytes, results and failures."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.endpoint.endpoint import WIND_DOWN_SECONDS
from kvferry.core.errors import (
    DeadlineError,
    EndpointClosedError,
    IncompatibleError,
    PageError,
    StaleError,
    TicketError,
    TransportError,
    TransportUsageError,
)
from kvferry.core.lifecycle.holds import RequestId, random_incarnation
from kvferry.core.memory import Region
from kvferry.core.planner import build_copies
from kvferry.core.side_channel.compatibility import Judgements
from kvferry.core.transport import Capabilities, PeerId, Status, TransferId
from kvferry.core.transport.paged import PagedCopies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing import Fault, FaultyTransport, Schedule
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import (
    Clock,
    Engine,
    RecordingTransport,
    eventually,
    load,
    until,
)
from tests.core.endpoint.transports import PENDING, ScriptedTransport

LONG = 60.0


@pytest.mark.parametrize(
    ("remote_shape", "local_shape", "tokens"),
    [
        (CacheShape(), CacheShape(), 12),
        (CacheShape(tp=2, block=2), CacheShape(heads_first=False), 1),
        (CacheShape(tp=4, block=6), CacheShape(tp=2, block=4), 7),
    ],
    ids=["equal", "tp 2 to 1, HND to NHD", "tp 4 to 2, blocks 6 to 4"],
)
def test_pages_arrive_and_their_hold_is_released(
    remote_shape: CacheShape, local_shape: CacheShape, tokens: int
) -> None:
    """The page beyond the range is zeroed."""
    with Engine("prefill", remote_shape) as prefill, Engine("decode", local_shape) as decode:
        remote = [5, 2, 9, 7, 3, 8][: -(-tokens // remote_shape.block)]
        local = [4, 11, 6, 1, 2, 3, 13][: -(-tokens // local_shape.block) + 1]
        ticket = prefill.serve("p-1", remote, tokens)
        assert decode.load("d-1", ticket, local) is None
        assert not decode.wrong_bytes(local, tokens)
        prefill.released("p-1")
        assert [rank.endpoint.held for rank in prefill.ranks] == [0] * remote_shape.tp


def test_each_of_two_loads_with_one_request_id_has_its_outcome(
    prefill: Engine, decode: Engine
) -> None:
    endpoint = decode.endpoint
    ticket = prefill.serve("p-1", [1], 4)
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
    wanted = rank.values(1, 12)
    np.testing.assert_array_equal(rank.read(1, [7, 8]), wanted[4:])
    untouched = [page for page in range(decode.shape.pages) if page not in (7, 8)]
    assert np.isnan(rank.cache[:, untouched]).all()


def test_a_request_that_needs_nothing_is_released_and_not_reported(decode: Engine) -> None:
    with Engine("prefill", CacheShape(tp=2)) as prefill:
        decode.pull("d-1", prefill.serve("p-1", [1, 2], 8), [], nothing=True)
        prefill.released("p-1")
        record = until(decode.endpoint, lambda results: bool(results.loads))
        assert not record.received
        assert decode.endpoint.pending == 0


def test_replicated_ranks_that_nobody_reads_are_notified() -> None:
    """Every rank of both engines holds all heads, so two consumer ranks read two of four."""
    remote_shape, local_shape = CacheShape(tp=4, replicated=True), CacheShape(tp=2, replicated=True)
    with Engine("prefill", remote_shape) as prefill, Engine("decode", local_shape) as decode:
        assert decode.load("d-1", prefill.serve("p-1", [1], 4), [2]) is None
        assert not decode.wrong_bytes([2], 4)
        prefill.released("p-1")


def test_the_read_waits_for_the_producers_device(prefill: Engine, decode: Engine) -> None:
    drafter_is_done = threading.Event()
    ticket = prefill.serve_later("p-1", [1])
    prefill.step(passed=drafter_is_done.is_set)
    decode.pull("d-1", ticket, [2])
    assert not decode.endpoint.wait(0.05)
    prefill.ranks[0].cache[:, 1] += 1  # the drafter's work
    drafter_is_done.set()
    assert decode.error("d-1") is None
    np.testing.assert_array_equal(decode.ranks[0].cache[:, 2], prefill.ranks[0].cache[:, 1])


def test_nothing_is_read_before_the_consumers_device_has_finished_with_the_pages(
    prefill: Engine, decode: Engine
) -> None:
    """Otherwise work on the device, such as zeroing, could overwrite what was read."""
    zeroing_is_done = threading.Event()
    decode.pull("d-1", prefill.serve("p-1", [1], 4), [2], passed=zeroing_is_done.is_set)
    assert not decode.endpoint.wait(0.05)
    decode.ranks[0].cache[:, 2] = 0
    zeroing_is_done.set()
    assert decode.error("d-1") is None
    assert not decode.wrong_bytes([2], 4)


def test_closing_the_endpoint_releases_loads_that_wait_for_the_device(prefill: Engine) -> None:
    with Engine("decode") as decode:
        assert load(prefill, decode, 2) is None
        prefill.released("p-2")
        decode.pull("d-1", prefill.serve("p-1", [3], 4), [4], passed=threading.Event().is_set)
    prefill.released("p-1")


def test_a_device_check_that_raises_fails_only_its_load(prefill: Engine, decode: Engine) -> None:
    def broken_check() -> bool:
        raise RuntimeError("an error of the device")

    error = decode.load("d-1", prefill.serve("p-1", [1], 4), [2], passed=broken_check)
    assert isinstance(error, EndpointClosedError)
    assert decode.load("d-2", prefill.serve("p-2", [3], 4), [5]) is None


def test_a_load_whose_pages_cannot_be_zeroed_fails_and_says_so(prefill: Engine) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("these pages are read-only")

    is_over = threading.Event()
    with Engine("decode", zero=broken) as decode:
        decode.pull("d-1", prefill.serve("p-1", [1], 3), [2], passed=is_over.is_set)
        assert not decode.endpoint.wait(0.05)
        is_over.set()
        error = decode.error("d-1")
    assert isinstance(error, TransportError)
    assert "RuntimeError: these pages are read-only" in str(error)


def test_a_read_after_the_end_of_the_hold_is_stale(prefill: Engine, decode: Engine) -> None:
    ticket = prefill.serve("p-1", [1], 4)
    prefill.reset("p-1")
    prefill.serve("p-2", [1], 4)  # its page is used again, its slot perhaps too
    assert isinstance(decode.load("d-1", ticket, [2]), StaleError)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_load_that_is_aborted_or_takes_too_long_is_abandoned(
    prefill: Engine, is_aborted: bool
) -> None:
    options = EndpointOptions(load_timeout=LONG if is_aborted else 0.05)
    with Engine("decode", options=options) as decode:
        decode.pull("d-1", prefill.serve_later("p-1", [1]), [2])
        if is_aborted:
            decode.endpoint.abort(RequestId("d-1"))
        error = decode.error("d-1")
        assert isinstance(error, EndpointClosedError if is_aborted else DeadlineError)
        assert is_aborted or "load_timeout" in str(error)
        prefill.step()
        prefill.released("p-1")


def test_a_ticket_that_the_handshake_denies_is_refused(prefill: Engine, decode: Engine) -> None:
    """``tests/core/lifecycle/test_ticket.py`` has the other reasons."""
    ticket = prefill.serve("p-1", [1, 2], 8)
    restarted = dataclasses.replace(ticket, incarnation=random_incarnation())
    misfit = dataclasses.replace(ticket, pages=((1, 99),))
    for number, (refused, complaint) in enumerate(
        ((restarted, "restarted"), (misfit, "block 99; the producer has 16"))
    ):
        error = decode.load(f"d-{number}", refused, [3, 4])
        assert isinstance(error, TicketError)
        assert complaint in str(error)
    assert np.isnan(decode.ranks[0].cache).all()
    assert decode.load("d-2", ticket, [3, 4]) is None


def test_a_hole_in_place_of_a_needed_page_fails_the_load_and_releases_the_hold(
    prefill: Engine, decode: Engine
) -> None:
    ticket = dataclasses.replace(prefill.serve("p-1", [1, 2], 8), pages=((0, 2),))
    assert isinstance(decode.load("d-1", ticket, [3, 4]), PageError)
    prefill.released("p-1")


def test_a_ticket_of_the_engine_itself_is_refused() -> None:
    with Engine("both") as both:
        assert isinstance(both.load("d-1", both.serve("p-1", [1], 4), [2]), TicketError)


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


def test_a_closed_endpoint_refuses_loads(prefill: Engine, decode: Engine) -> None:
    decode.endpoint.close()
    decode.endpoint.close()
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


class EndlessReadsTransport(ScriptedTransport):
    """A transport whose reads do not end; once closing, each poll takes ``WIND_DOWN_SECONDS``."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(PENDING)
        self.clock, self.polls = clock, 0
        self.is_closing: Callable[[], bool] = lambda: False

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        if self.is_closing():
            self.polls += 1
            self.clock.skip(WIND_DOWN_SECONDS)
        return super().poll(transfers)


def test_the_wait_for_reads_when_closing_goes_by_the_given_clock(
    prefill: Engine, clock: Clock
) -> None:
    driver = EndlessReadsTransport(clock)
    with Engine("decode", transport=lambda: driver, clock=clock) as decode:
        endpoint = decode.endpoint
        driver.is_closing = lambda: "the endpoint is closed" in endpoint.problems
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2])
        eventually(lambda: bool(driver.pages), "the pages are read")
        endpoint.close()
        assert driver.polls <= 2, "one in the last round, and one while it waits"


def test_a_second_engine_with_the_same_name_does_not_end_loads_from_the_first(
    decode: Engine,
) -> None:
    with Engine("prefill") as one, Engine("prefill") as other:
        assert decode.load("d-1", one.serve("p-1", [1], 4), [2]) is None
        decode.pull("d-2", one.serve_later("p-2", [3]), [4])
        assert decode.load("d-3", other.serve("p-1", [5], 4), [6]) is None
        one.step()
        assert decode.error("d-2") is None


def test_abandon_is_sent_before_the_failure_is_reported(
    prefill: Engine, driver: ScriptedTransport
) -> None:
    """A caller that sees the failure can rely on the producer's being told."""
    driver.raises["read"] = MemoryError("no room")
    with Engine("decode", transport=lambda: driver) as decode:
        assert decode.load("d-1", prefill.serve("p-1", [1], 4), [2]) is not None
        decode.endpoint.close()
        prefill.released("p-1")


def test_loads_fail_when_the_consumers_transport_dies(prefill: Engine) -> None:
    """``tests/faults/test_driver_faults.py`` has its other faults."""
    transport = FaultyTransport(LoopbackTransport())
    with Engine("decode", transport=lambda: transport) as decode:
        assert decode.load("d-1", prefill.serve("p-1", [1, 2], 8), [3, 4]) is None
        transport.die()
        assert decode.load("d-2", prefill.serve("p-2", [5, 6], 8), [7, 8]) is not None


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
