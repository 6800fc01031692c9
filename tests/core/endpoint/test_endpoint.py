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
    HandshakeError,
    IncompatibleError,
    PageError,
    PeerLostError,
    StaleError,
    TicketError,
)
from kvferry.core.handshake import Judgements
from kvferry.core.lifecycle.holds import RequestId, random_incarnation
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import Clock, Engine, eventually, until

LONG = 60.0

SHAPES = [
    pytest.param(CacheShape(), CacheShape(), id="equal"),
    pytest.param(
        CacheShape(tp=2, block=2), CacheShape(heads_first=False), id="tp 2 to 1, HND to NHD"
    ),
    pytest.param(CacheShape(block=8, heads_first=False), CacheShape(tp=2, block=4), id="tp 1 to 2"),
    pytest.param(
        CacheShape(tp=4, block=6), CacheShape(tp=2, block=4), id="tp 4 to 2, blocks 6 to 4"
    ),
]


def assert_pulled(decode: Engine, pages: list[int], tokens: int) -> None:
    """Check that every token is right, and that every byte after the last token is zero."""
    assert decode.wrong_bytes(pages, tokens) == 0


@pytest.mark.parametrize(("remote_shape", "local_shape"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 7, 12])
def test_pages_arrive_and_their_hold_is_released(
    remote_shape: CacheShape, local_shape: CacheShape, tokens: int
) -> None:
    with Engine("prefill", remote_shape) as prefill, Engine("decode", local_shape) as decode:
        remote = [5, 2, 9, 7, 3, 8][: -(-tokens // remote_shape.block)]
        local = [4, 11, 6, 1, 2, 3, 13][: -(-tokens // local_shape.block)]
        ticket = prefill.serve("p-1", remote, tokens)
        decode.pull("d-1", ticket, local)
        assert not decode.outcome("d-1").failed
        assert_pulled(decode, local, tokens)
        prefill.released("p-1")
        assert [rank.endpoint.held for rank in prefill.ranks] == [0] * remote_shape.tp


def test_each_of_two_loads_with_one_request_id_has_its_outcome() -> None:
    with Engine("prefill") as prefill, Engine("decode") as decode:
        endpoint = decode.ranks[0].endpoint
        ticket = prefill.serve("p-1", [1], 4)
        decode.pull("d-1", dataclasses.replace(ticket, engine="decode"), [2])
        decode.pull("d-1", ticket, [3])
        eventually(lambda: endpoint.pending == 0, "both loads are over")
        first, second = endpoint.results(), endpoint.results()
        assert first.received == second.received == {"d-1"}
        assert isinstance(first.failed[RequestId("d-1")], TicketError)
        assert not second.failed
        assert not endpoint.results().received
        assert_pulled(decode, [3], 4)


def test_pages_beyond_the_range_are_zeroed() -> None:
    with Engine("prefill") as prefill, Engine("decode") as decode:
        decode.pull("d-1", prefill.serve("p-1", [1, 2], 6), [3, 4, 5])
        assert not decode.outcome("d-1").failed
        assert_pulled(decode, [3, 4, 5], 6)


def test_a_partial_hit_loads_only_the_missing_pages() -> None:
    with Engine("prefill") as prefill, Engine("decode") as decode:
        ticket = prefill.serve("p-1", [1, 2, 3], 12)
        decode.pull("d-1", ticket, [7, 8], first=4, first_index=1)
        assert not decode.outcome("d-1").failed
        rank = decode.ranks[0]
        wanted = rank.values(1, 12)
        np.testing.assert_array_equal(rank.read(1, [7, 8]), wanted[4:])
        untouched = [page for page in range(decode.shape.pages) if page not in (7, 8)]
        assert np.isnan(rank.cache[:, untouched]).all()


def test_a_request_that_needs_nothing_is_released_and_not_reported() -> None:
    with Engine("prefill", CacheShape(tp=2)) as prefill, Engine("decode") as decode:
        decode.pull("d-1", prefill.serve("p-1", [1, 2], 8), [], nothing=True)
        prefill.released("p-1")
        record = until(decode.ranks[0].endpoint, lambda results: bool(results.loads))
        assert not record.received
        assert decode.ranks[0].endpoint.pending == 0


def test_replicated_ranks_that_nobody_reads_are_notified() -> None:
    """Every rank of both engines holds all heads, so two consumer ranks read two of four."""
    remote_shape, local_shape = CacheShape(tp=4, replicated=True), CacheShape(tp=2, replicated=True)
    with Engine("prefill", remote_shape) as prefill, Engine("decode", local_shape) as decode:
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2])
        assert not decode.outcome("d-1").failed
        assert_pulled(decode, [2], 4)
        prefill.released("p-1")


def test_a_load_that_begins_before_the_producers_order_succeeds() -> None:
    with Engine("prefill") as prefill, Engine("decode") as decode:
        prefill.compute("p-1", [1], 4)
        ticket = prefill.finish("p-1", [1], 4, order=False)
        decode.pull("d-1", ticket, [2])
        assert not decode.outcome("d-1").failed
        prefill.step()
        prefill.released("p-1")


def test_the_read_waits_for_the_producers_device() -> None:
    with Engine("prefill") as prefill, Engine("decode") as decode:
        prefill.compute("p-1", [1], 4)
        drafter_is_done = threading.Event()
        ticket = prefill.finish("p-1", [1], 4, computed=False, order=False)
        prefill.step(passed=drafter_is_done.is_set)
        decode.pull("d-1", ticket, [2])
        assert not decode.ranks[0].endpoint.wait(0.05)
        prefill.ranks[0].cache[:, 1] += 1  # the drafter's work
        drafter_is_done.set()
        assert not decode.outcome("d-1").failed
        np.testing.assert_array_equal(decode.ranks[0].cache[:, 2], prefill.ranks[0].cache[:, 1])


def test_nothing_is_read_before_the_consumers_device_has_finished_with_the_pages() -> None:
    """Otherwise work on the device, such as zeroing, could overwrite what was read."""
    with Engine("prefill") as prefill, Engine("decode") as decode:
        zeroing_is_done = threading.Event()
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2], passed=zeroing_is_done.is_set)
        assert not decode.ranks[0].endpoint.wait(0.05)
        decode.ranks[0].cache[:, 2] = 0
        zeroing_is_done.set()
        assert not decode.outcome("d-1").failed
        assert_pulled(decode, [2], 4)


@pytest.mark.parametrize("cause", ["aborted", "too late"])
def test_a_load_that_waits_for_the_device_can_be_aborted_or_time_out(cause: str) -> None:
    """Its hold is released, and its pages stay untouched: the device may still use them."""
    options, clock, asked = EndpointOptions(load_timeout=LONG), Clock(), threading.Event()

    def never() -> bool:
        asked.set()
        return False

    with Engine("prefill") as prefill, Engine("decode", options=options, clock=clock) as decode:
        decode.pull("d-0", prefill.serve("p-0", [1], 4), [2])  # connects the engines
        assert not decode.outcome("d-0").failed
        prefill.released("p-0")
        decode.pull("d-1", prefill.serve("p-1", [3], 3), [4, 5], passed=never)
        assert asked.wait(20)
        if cause == "aborted":
            decode.ranks[0].endpoint.abort(RequestId("d-1"))
        else:
            clock.skip(LONG + 1.0)
        wanted = EndpointClosedError if cause == "aborted" else DeadlineError
        assert isinstance(decode.outcome("d-1").failed[RequestId("d-1")], wanted)
        assert np.isnan(decode.ranks[0].cache[:, [4, 5]]).all()
        prefill.released("p-1")


def test_closing_the_endpoint_releases_loads_that_wait_for_the_device() -> None:
    with Engine("prefill") as prefill:
        with Engine("decode") as decode:
            decode.pull("d-0", prefill.serve("p-0", [1], 4), [2])
            assert not decode.outcome("d-0").failed
            prefill.released("p-0")
            decode.pull("d-1", prefill.serve("p-1", [3], 4), [4], passed=threading.Event().is_set)
        prefill.released("p-1")


def test_a_device_check_that_raises_fails_only_its_load() -> None:
    def broken_check() -> bool:
        raise RuntimeError("an error of the device")

    with Engine("prefill") as prefill, Engine("decode") as decode:
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2], passed=broken_check)
        assert isinstance(decode.outcome("d-1").failed[RequestId("d-1")], EndpointClosedError)
        decode.pull("d-2", prefill.serve("p-2", [3], 4), [5])
        assert not decode.outcome("d-2").failed


def test_a_read_after_the_lease_is_stale() -> None:
    with Engine("prefill") as prefill, Engine("decode") as decode:
        prefill.compute("p-1", [1], 4)
        ticket = prefill.finish("p-1", [1], 4, lease=0.0)
        prefill.released("p-1")
        prefill.serve("p-2", [1], 4)  # its page is used again, its slot perhaps too
        decode.pull("d-1", ticket, [2])
        assert isinstance(decode.outcome("d-1").failed[RequestId("d-1")], StaleError)


def test_a_reset_makes_tickets_stale_and_gives_pages_back() -> None:
    with Engine("prefill") as prefill, Engine("decode") as decode:
        ticket = prefill.serve("p-1", [1], 4)
        prefill.scheduler_holds.reset()
        prefill.step()
        prefill.released("p-1")
        decode.pull("d-1", ticket, [2])
        assert isinstance(decode.outcome("d-1").failed[RequestId("d-1")], StaleError)


def test_the_second_of_two_consumers_with_one_ticket_is_stale() -> None:
    with Engine("prefill") as prefill, Engine("one") as one, Engine("two") as two:
        ticket = prefill.serve("p-1", [1], 4)
        one.pull("d-1", ticket, [2])
        assert not one.outcome("d-1").failed
        prefill.released("p-1")
        two.pull("d-1", ticket, [2])
        assert isinstance(two.outcome("d-1").failed[RequestId("d-1")], StaleError)


def test_a_load_that_takes_too_long_fails() -> None:
    options = EndpointOptions(load_timeout=0.05)
    with Engine("prefill") as prefill, Engine("decode", options=options) as decode:
        prefill.compute("p-1", [1], 4)
        ticket = prefill.finish("p-1", [1], 4, computed=False, order=False)
        decode.pull("d-1", ticket, [2])
        error = decode.outcome("d-1").failed[RequestId("d-1")]
        assert isinstance(error, DeadlineError)
        assert "load_timeout" in str(error)
        prefill.step()
        prefill.released("p-1")  # by "abandon"


def test_an_aborted_load_is_reported_and_abandoned() -> None:
    with Engine("prefill") as prefill, Engine("decode") as decode:
        prefill.compute("p-1", [1], 4)
        ticket = prefill.finish("p-1", [1], 4, computed=False, order=False)
        decode.pull("d-1", ticket, [2])
        decode.ranks[0].endpoint.abort(RequestId("d-1"))
        assert decode.outcome("d-1").failed
        prefill.step()
        prefill.released("p-1")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"incarnation": random_incarnation()}, "restarted"),
        ({"pages": ((1, 99),)}, "block 99; the producer has 16"),
        ({"pages": ((1,), (2,)), "first_index": (0, 0)}, "2 groups; the producer has 1"),
        ({"tp_size": 2}, "tp_size 2, the handshake 1"),
    ],
)
def test_a_ticket_that_the_handshake_denies_is_refused(
    change: dict[str, object], complaint: str
) -> None:
    with Engine("prefill") as prefill, Engine("decode") as decode:
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.pull("d-1", dataclasses.replace(ticket, **change), [3, 4])  # type: ignore[arg-type]
        error = decode.outcome("d-1").failed[RequestId("d-1")]
        assert isinstance(error, TicketError)
        assert complaint in str(error)
        assert np.isnan(decode.ranks[0].cache).all()
        decode.pull("d-2", ticket, [3, 4])
        assert not decode.outcome("d-2").failed


def test_a_hole_in_place_of_a_needed_page_fails_the_load_and_releases_the_hold() -> None:
    with Engine("prefill") as prefill, Engine("decode") as decode:
        ticket = dataclasses.replace(prefill.serve("p-1", [1, 2], 8), pages=((0, 2),))
        decode.pull("d-1", ticket, [3, 4])
        assert isinstance(decode.outcome("d-1").failed[RequestId("d-1")], PageError)
        prefill.released("p-1")


def test_a_ticket_of_the_engine_itself_is_refused() -> None:
    with Engine("both") as both:
        both.pull("d-1", both.serve("p-1", [1], 4), [2])
        assert isinstance(both.outcome("d-1").failed[RequestId("d-1")], TicketError)


def test_incompatible_engines_are_refused_with_both_values() -> None:
    with (
        Engine("prefill", agreement={"model": "llama"}) as prefill,
        Engine("decode", agreement={"model": "qwen"}) as decode,
    ):
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2])
        error = decode.outcome("d-1").failed[RequestId("d-1")]
        assert isinstance(error, IncompatibleError)
        assert "llama" in str(error)
        assert "qwen" in str(error)


def test_an_overridden_judgement_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
            decode.pull(f"d-{request}", prefill.serve(f"p-{request}", [1], 4), [2])
            assert not decode.outcome(f"d-{request}").failed
        decode.pull("d-3", third.serve("p-3", [1], 4), [2])
        error = decode.outcome("d-3").failed[RequestId("d-3")]
        assert "dtype: 'y' here, 'x' there" in str(error)
    [warning] = [r.getMessage() for r in caplog.records if "although" in r.getMessage()]
    assert "engine prefill" in warning
    assert "model: 'its copy' here, 'llama' there" in warning


def test_a_load_from_a_stopped_producer_fails_and_its_successor_serves() -> None:
    with Engine("decode") as decode:
        with Engine("prefill") as prefill:
            old = prefill.serve("p-1", [1], 4)
            decode.pull("d-1", old, [2])
            assert not decode.outcome("d-1").failed
            port = prefill.server.port
        decode.pull("d-2", old, [2])
        assert decode.outcome("d-2").failed
        with Engine("prefill", port=port) as prefill:
            decode.pull("d-3", old, [2])
            assert isinstance(decode.outcome("d-3").failed[RequestId("d-3")], TicketError)
            decode.pull("d-4", prefill.serve("p-1", [3], 4), [5])
            assert not decode.outcome("d-4").failed


def test_a_load_fails_if_nobody_listens_at_the_address() -> None:
    with Engine("prefill") as prefill, Engine("decode") as decode:
        ticket = prefill.serve("p-1", [1], 4)
        prefill.server.close()
        decode.pull("d-1", ticket, [2])
        error = decode.outcome("d-1").failed[RequestId("d-1")]
        assert isinstance(error, HandshakeError)
        assert str(ticket.port) in str(error)


def test_many_loads_at_once_succeed() -> None:
    with (
        Engine("prefill", CacheShape(pages=64)) as prefill,
        Engine("decode", CacheShape(pages=64)) as decode,
    ):
        tickets = [prefill.serve(f"p-{i}", [1 + 2 * i, 2 + 2 * i], 8) for i in range(30)]
        for i, ticket in enumerate(tickets):
            decode.pull(f"d-{i}", ticket, [2 + 2 * i, 1 + 2 * i])
        waiting = {RequestId(f"d-{i}") for i in range(30)}
        while waiting:
            results = until(decode.ranks[0].endpoint, lambda r: bool(r.received))
            assert not results.failed
            waiting -= results.received
        for i in range(30):
            assert_pulled(decode, [2 + 2 * i, 1 + 2 * i], 8)


def test_a_closed_endpoint_refuses_loads() -> None:
    with Engine("prefill") as prefill, Engine("decode") as decode:
        ticket = prefill.serve("p-1", [1], 4)
        decode.ranks[0].endpoint.close()
        decode.ranks[0].endpoint.close()
        with pytest.raises(EndpointClosedError):
            decode.pull("d-1", ticket, [2])


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
        prefill.ranks[0].endpoint.close(drain=10_000.0)


class EndlessReadsTransport(LoopbackTransport):
    """A transport whose reads do not end; once closing, each poll takes ``WIND_DOWN_SECONDS``."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.is_closing: Callable[[], bool] = lambda: False
        self.polls: list[bool] = []

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        is_closing = self.is_closing()
        self.polls.append(is_closing)
        if is_closing:
            self.clock.skip(WIND_DOWN_SECONDS)
        return [Status(state=State.PENDING) for _ in transfers]


def test_the_wait_for_reads_when_closing_goes_by_the_given_clock() -> None:
    clock = Clock()
    driver = EndlessReadsTransport(clock)
    with (
        Engine("prefill") as prefill,
        Engine("decode", transport=lambda: driver, clock=clock) as decode,
    ):
        endpoint = decode.ranks[0].endpoint
        driver.is_closing = lambda: "the endpoint is closed" in endpoint.problems
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2])
        eventually(lambda: bool(driver.polls), "the pages are read")
        endpoint.close()
        assert sum(driver.polls) <= 2, "one in the last round, and one while it waits"


class RaisingTransport(LoopbackTransport):
    """A transport with methods that raise exceptions which the interface does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.broken_methods: set[str] = set()

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        if "read" in self.broken_methods:
            raise MemoryError("no room")
        return super().read(peer, copies, notify)

    def connect(self, address: bytes) -> PeerId:
        if "connect" in self.broken_methods:
            raise PermissionError("hidden")
        return super().connect(address)

    def notify(self, peer: PeerId, payload: bytes) -> None:
        if "notify" in self.broken_methods:
            raise RuntimeError("no way")
        super().notify(peer, payload)


@pytest.mark.parametrize("method", ["read", "connect", "notify"])
def test_an_exception_of_the_driver_fails_one_load_and_not_the_endpoint(
    method: str,
) -> None:
    driver = RaisingTransport()
    with Engine("prefill") as prefill, Engine("decode", transport=lambda: driver) as decode:
        ticket = prefill.serve("p-1", [1], 4)
        driver.broken_methods = {method, "read"}
        decode.pull("d-1", ticket, [2])
        assert decode.outcome("d-1").failed
        driver.broken_methods = set()
        decode.pull("d-2", prefill.serve("p-2", [3], 4), [2])
        assert not decode.outcome("d-2").failed


class UncancellableTransport(LoopbackTransport):
    """A transport whose reads ignore ``cancel`` and end when the peer is disconnected."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: dict[TransferId, bool] = {}

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        self._pending[transfer] = True
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        pending = Status(state=State.PENDING)
        lost = Status(state=State.FAILED, error=PeerLostError("disconnected"))
        return [pending if self._pending[transfer] else lost for transfer in transfers]

    def forget(self, transfer: TransferId) -> None:
        del self._pending[transfer]

    def cancel(self, transfer: TransferId) -> None:
        pass

    def disconnect(self, peer: PeerId) -> None:
        self._pending = dict.fromkeys(self._pending, False)
        super().disconnect(peer)


def test_a_read_that_cannot_be_cancelled_ends_when_its_peer_is_disconnected() -> None:
    options = EndpointOptions(load_timeout=0.05)
    with (
        Engine("prefill") as prefill,
        Engine("decode", transport=UncancellableTransport, options=options) as decode,
    ):
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2])
        assert isinstance(decode.outcome("d-1").failed[RequestId("d-1")], DeadlineError)


def test_a_second_engine_with_the_same_name_does_not_end_loads_from_the_first() -> None:
    with Engine("prefill") as one, Engine("prefill") as other, Engine("decode") as decode:
        first = one.serve("p-1", [1], 4)
        decode.pull("d-1", first, [2])
        assert not decode.outcome("d-1").failed
        one.compute("p-2", [3], 4)
        waiting = one.finish("p-2", [3], 4, computed=False, order=False)
        decode.pull("d-2", waiting, [4])
        decode.pull("d-3", other.serve("p-1", [5], 4), [6])
        assert not decode.outcome("d-3").failed
        one.step()
        assert not decode.outcome("d-2").failed


def test_abandon_is_sent_before_the_failure_is_reported() -> None:
    """A caller that sees the failure can rely on the producer's being told."""
    driver = RaisingTransport()
    with Engine("prefill") as prefill, Engine("decode", transport=lambda: driver) as decode:
        driver.broken_methods = {"read"}
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2])
        assert decode.outcome("d-1").failed
        decode.ranks[0].endpoint.close()
        prefill.released("p-1")
