"""Reads under way: in batches, cancelled, failed; the connections that engines share for them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
from collections.abc import Iterator

import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import (
    DeadlineError,
    EndpointClosedError,
    KVFerryError,
    PeerLostError,
    TransferCancelledError,
    TransportError,
)
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.metrics import LOST_PEERS, PEERS_UP
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.transport import Quiescence, Status
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import (
    DIM,
    HEADS,
    LAYERS,
    TOKENS,
    Clock,
    Engine,
    MetricTotals,
    RecordingTransport,
    eventually,
    in_name_of,
    outcomes,
    pull,
)
from tests.core.endpoint.transports import (
    DONE,
    FAILED_CANCELLED,
    FAILING_CANCELLED,
    LOAD_TIMEOUT,
    OPTIONS,
    PENDING,
    WORD,
    ScriptedTransport,
    failed,
    failing,
    pass_time,
    three_engines,
)

FAILED = failed(TransportError("a link flapped"))


def wait_for_reads(driver: ScriptedTransport, count: int) -> None:
    eventually(lambda: len(driver.pages) == count, "it is read")


def start_reads(prefill: Engine, decode: Engine, driver: ScriptedTransport, *numbers: int) -> None:
    """Start loads, one after the other is read."""
    for number in numbers:
        pull(prefill, decode, number)
        wait_for_reads(driver, number)


def abort(decode: Engine, number: int) -> None:
    decode.endpoint.abort(RequestId(f"d-{number}"))


# A load of several batches, between a cache with heads first and one with tokens first.

COPIES = LAYERS * HEADS * 2 * TOKENS
MAX_COPIES = 10


@contextlib.contextmanager
def batched(
    driver: ScriptedTransport, max_copies: int = MAX_COPIES
) -> Iterator[tuple[Engine, Engine]]:
    """Run engines, start load 1, which takes two pages, and wait for its first batch."""
    driver.default = PENDING
    options, shape = EndpointOptions(max_copies=max_copies), CacheShape(heads_first=False)
    with (
        Engine("prefill") as prefill,
        Engine("decode", shape, options=options, transport=lambda: driver) as decode,
    ):
        decode.pull("d-1", prefill.serve("p-1", [1, 2], 2 * TOKENS), [3, 4])
        wait_for_reads(driver, 1)
        try:
            yield prefill, decode
        finally:
            driver.may_end = 1 << 30


def test_a_load_is_read_batch_by_batch_and_the_fence_comes_last(driver: ScriptedTransport) -> None:
    with batched(driver) as (prefill, decode):
        for batch in range(1, 8):
            wait_for_reads(driver, batch)
            assert WORD not in driver.posted
            driver.may_end = batch
        found = decode.outcome("d-1")
        assert not found.failed
        assert not decode.wrong_bytes([3, 4], 2 * TOKENS)
        prefill.released("p-1")
    assert driver.posted == [MAX_COPIES] * 6 + [4, WORD]
    [record] = found.loads
    assert (record.copies, record.nbytes) == (COPIES, COPIES * DIM * 4)
    assert record.post_seconds > 0
    in_stages = record.handshake_seconds + record.check_seconds + record.post_seconds
    in_stages += record.transfer_seconds + record.fence_seconds
    assert in_stages <= record.seconds


def test_a_later_load_does_not_wait_for_all_batches(driver: ScriptedTransport) -> None:
    with batched(driver, COPIES // 2) as (prefill, decode):
        pull(prefill, decode, 5)
        wait_for_reads(driver, 2)
        driver.may_end = 2
        assert outcomes(decode, 5) == [None]
        assert decode.endpoint.pending == 1
        driver.may_end = 3
        assert outcomes(decode, 1) == [None]
        assert not decode.wrong_bytes([3, 4], 2 * TOKENS)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_batch_that_is_aborted_or_fails_is_the_last(
    driver: ScriptedTransport, is_aborted: bool
) -> None:
    with batched(driver) as (prefill, decode):
        if is_aborted:
            abort(decode, 1)
            eventually(lambda: len(driver.cancelled) == 1, "the batch under way is cancelled")
            assert decode.endpoint.pending == 1, "bytes may still land"
        else:
            driver.raises["read"] = TransportError("out of memory")
        driver.may_end = 7
        [error] = outcomes(decode, 1)
        assert isinstance(error, EndpointClosedError) or "out of memory" in str(error)
        prefill.released("p-1")
    assert driver.posted == [MAX_COPIES]


# Aborted loads, whose reads go on until the test lets them end.


@pytest.fixture(params=[None, FAILING_CANCELLED], ids=["ignores cancel", "fails when cancelled"])
def stubborn(request: pytest.FixtureRequest) -> ScriptedTransport:
    made = ScriptedTransport(PENDING, Quiescence.AFTER_DISCONNECT)
    made.when_cancelled = request.param
    return made


@pytest.mark.parametrize("numbers", [(1,), (1, 2)])
def test_an_aborted_load_ends_no_others_and_without_others_its_connection_is_closed(
    stubborn: ScriptedTransport, clock: Clock, numbers: tuple[int, ...]
) -> None:
    with three_engines(stubborn, clock) as (prefill, other, decode):
        start_reads(prefill, decode, stubborn, 1, 2)
        for number in numbers:
            abort(decode, number)
        eventually(lambda: len(stubborn.cancelled) == len(numbers), "the reads are cancelled")
        pass_time(clock, other, decode, LOAD_TIMEOUT / 2)
        if len(numbers) == 2:
            assert all(outcomes(decode, 1, 2))
            assert len(stubborn.disconnected) == 1
            return
        assert stubborn.disconnected == set()
        assert decode.endpoint.pending == 2, "bytes may still land"
        stubborn.statuses.update({0: stubborn.when_cancelled and FAILED_CANCELLED, 1: None})
        aborted, other_error = outcomes(decode, 1, 2)
        assert isinstance(aborted, EndpointClosedError)
        assert other_error is None
        assert not decode.wrong_bytes([2], TOKENS)
        eventually(lambda: prefill.endpoint.held == 0, "the producer is told of both")
        assert stubborn.disconnected == set()


def test_a_cancelled_read_is_ended_at_the_deadline_of_its_own_load(
    stubborn: ScriptedTransport, clock: Clock
) -> None:
    """The disconnect also ends a load whose deadline is later."""
    with three_engines(stubborn, clock) as (prefill, other, decode):
        start_reads(prefill, decode, stubborn, 1)
        clock.skip(0.3 * LOAD_TIMEOUT)
        start_reads(prefill, decode, stubborn, 2)
        abort(decode, 1)
        pass_time(clock, other, decode, 0.4 * LOAD_TIMEOUT)
        assert stubborn.disconnected == set()
        pass_time(clock, other, decode, 0.35 * LOAD_TIMEOUT)
        aborted, other_error = outcomes(decode, 1, 2)
        assert isinstance(aborted, EndpointClosedError)
        assert isinstance(other_error, PeerLostError)
        assert len(stubborn.disconnected) == 1


def test_loads_aborted_before_their_handshake_fails_leave_no_state_behind(prefill: Engine) -> None:
    options = dataclasses.replace(OPTIONS, handshake_timeout=0.3)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent_host,
        Engine("decode", options=options) as decode,
    ):
        load_manager = decode.endpoint._load_manager
        ticket = prefill.serve("p-1", [1], TOKENS)
        mute = dataclasses.replace(ticket, engine="mute", port=silent_host.getsockname()[1])
        for number in (1, 2, 3):
            decode.pull(f"d-{number}", mute, [number])
        eventually(lambda: len(load_manager._states) == 3, "all wait for the handshake")
        abort(decode, 1)
        abort(decode, 2)
        assert all(outcomes(decode, 1, 2)), "reported at once"
        assert len(load_manager._states) == 3
        assert all(outcomes(decode, 3)), "by the handshake's failure"
        eventually(lambda: not load_manager._states, "no state of the aborted loads is left")
        assert not load_manager._touched
        assert decode.endpoint.pending == 0


# Engines that publish the same transport address.


class Two:
    """Two producers with one address, ``real`` and ``alias``, and a consumer of both."""

    def __init__(self, real: Engine, alias: HandshakeServer, decode: Engine) -> None:
        self.real, self.alias, self.decode = real, alias, decode
        self._numbers = itertools.count(10)

    def ticket(self, number: int, *, by_alias: bool) -> Ticket:
        ticket = self.real.serve(f"p-{number}", [number % 10 + 1], TOKENS)
        return in_name_of("alias", ticket, self.alias) if by_alias else ticket

    def load(self, *, by_alias: bool = False) -> KVFerryError | None:
        """Load one request; return the error, if any."""
        number = next(self._numbers)
        error = self.decode.load(f"d-{number}", self.ticket(number, by_alias=by_alias), [9])
        assert error or not self.decode.wrong_bytes([9], TOKENS)
        return error

    def start_reads(self, driver: ScriptedTransport) -> None:
        """Start load 1 from the alias and load 2 from the real engine; wait for both reads."""
        driver.default = PENDING
        for number in (1, 2):
            ticket = self.ticket(number, by_alias=number == 1)
            self.decode.pull(f"d-{number}", ticket, [number])
            wait_for_reads(driver, number)


@contextlib.contextmanager
def two(
    driver: RecordingTransport, clock: Clock | None = None, liveness_interval: float = 0.0
) -> Iterator[Two]:
    options = dataclasses.replace(
        OPTIONS, liveness_interval=liveness_interval, liveness_misses=10, engine_ttl=600.0
    )
    how = {"transport": lambda: driver, "options": options, "clock": clock or Clock()}
    with (
        Engine("real") as real,
        real.side_channel("alias") as alias,
        Engine("decode", **how) as decode,  # type: ignore[arg-type]
    ):
        yield Two(real, alias, decode)


def test_two_engines_with_one_address_share_a_connection(
    clock: Clock, driver: RecordingTransport
) -> None:
    """Both are released when idle, and connected again."""
    with two(driver, clock) as both:
        for links in (1, 2):
            assert both.load() is None
            assert both.load(by_alias=True) is None
            assert len(driver.connected) == links, "they share one connection"
            clock.skip(601.0)
            both.decode.directory.step()  # not only when it is asked again
            eventually(lambda: driver.open_connections == 0, "both are idle")
            assert len(driver.disconnected) == links
        eventually(lambda: both.decode.endpoint.healthy, "a round has run since the skip")


def test_the_loss_of_one_engine_does_not_disconnect_the_other(driver: RecordingTransport) -> None:
    with two(driver, liveness_interval=0.05) as both:
        assert both.load() is None
        assert both.load(by_alias=True) is None
        totals = MetricTotals(both.decode)
        both.real.server.close()
        eventually(lambda: totals.of(LOST_PEERS) == {("real",): 1}, "the lost engine is given up")
        assert totals.of(PEERS_UP) == {("0",): 1}
        assert driver.disconnected == set()
        assert both.load(by_alias=True) is None
        assert len(driver.connected) == 1
        assert both.decode.endpoint.healthy


def test_a_read_that_fails_alone_costs_no_other_load_of_its_connection(
    driver: ScriptedTransport,
) -> None:
    with two(driver) as both:
        both.start_reads(driver)
        driver.statuses[1] = FAILED
        assert outcomes(both.decode, 2) != [None]
        start_reads(both.real, both.decode, driver, 3)
        driver.statuses.update({0: DONE, 2: DONE})
        assert outcomes(both.decode, 1, 3) == [None, None]
        assert len(driver.connected) == 1


@pytest.mark.parametrize(
    "status",
    [
        failed(PeerLostError("its process has ended")),
        failing(TransportError("only a disconnect ends it")),
    ],
)
def test_a_lost_connection_fails_the_loads_of_both_engines_and_both_can_reconnect(
    status: Status,
) -> None:
    driver = ScriptedTransport(quiescence=Quiescence.AFTER_DISCONNECT)
    with two(driver) as both:
        both.start_reads(driver)
        driver.statuses[0] = status
        first, second = outcomes(both.decode, 1, 2)
        assert str(status.error) in str(first)
        assert isinstance(second, PeerLostError)
        assert len(driver.disconnected) == 1
        driver.statuses.update({2: DONE, 3: DONE})
        assert both.load(by_alias=True) is None
        assert both.load() is None
        assert len(driver.connected) == 2


@pytest.mark.parametrize("ended_by", ["itself", "deadline", "abort"])
def test_reads_from_a_lost_engine_go_on_while_the_other_engine_is_read(
    driver: ScriptedTransport, clock: Clock, ended_by: str
) -> None:
    """Both loads are reported only then."""
    with Engine("third") as third, two(driver, clock, liveness_interval=0.05) as both:
        both.start_reads(driver)
        both.alias.close()
        eventually(lambda: len(driver.cancelled) == 1, "the read from the alias is cancelled")
        pass_time(clock, third, both.decode, LOAD_TIMEOUT / 2)
        assert driver.disconnected.isdisjoint(driver.peers.values())
        assert both.decode.endpoint.pending == 2, "bytes may still land in the pages of both"
        if ended_by == "itself":
            driver.statuses.update({0: failed(TransferCancelledError("cancelled")), 1: DONE})
        elif ended_by == "abort":
            abort(both.decode, 2)
        else:
            clock.skip(LOAD_TIMEOUT / 2 + 2.0)
        first, second = outcomes(both.decode, 1, 2)
        assert isinstance(first, PeerLostError)
        if ended_by == "itself":
            assert second is None
            assert driver.disconnected.isdisjoint(driver.peers.values())
        else:
            kinds = EndpointClosedError if ended_by == "abort" else (DeadlineError, PeerLostError)
            assert isinstance(second, kinds)
            assert driver.disconnected.issuperset(driver.peers.values())
