"""Reads under way: in batches, cancelled, failed; the connections that engines share for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import (
    EndpointClosedError,
    PeerLostError,
    TransportError,
)
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.transport import Quiescence, Status
from kvferry.core.transport.registry import create
from kvferry.drivers.loopback import address as loopback
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import (
    DIM,
    HEADS,
    LAYERS,
    TOKENS,
    Clock,
    Engine,
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


def test_a_read_that_fails_alone_costs_no_other_load_of_its_connection(
    prefill: Engine, driver: ScriptedTransport
) -> None:
    driver.default = PENDING
    with Engine("decode", options=OPTIONS, transport=lambda: driver) as decode:
        start_reads(prefill, decode, driver, 1, 2)
        driver.statuses[1] = failed(TransportError("a link flapped"))
        assert outcomes(decode, 2) != [None]
        start_reads(prefill, decode, driver, 3)
        driver.statuses.update({0: DONE, 2: DONE})
        assert outcomes(decode, 1, 3) == [None, None]
        assert driver.disconnected == set()


def test_regions_that_another_spoilt_are_brought_back_after_a_failed_read(prefill: Engine) -> None:
    """By an address of the producer's transport, with no regions."""
    transport = create("loopback")
    with Engine("decode", transport=lambda: transport) as decode:
        assert decode.load("d-1", prefill.serve("p-1", [1], TOKENS), [1]) is None
        genuine = loopback.decode(prefill.endpoint.payload.address)
        transport.connect(loopback.encode(msgspec.structs.replace(genuine, regions=[])))
        spoilt = decode.load("d-2", prefill.serve("p-2", [2], TOKENS), [2])
        assert "not among the 0 regions" in str(spoilt)
        assert decode.load("d-3", prefill.serve("p-3", [3], TOKENS), [3]) is None


# Engines that publish the same transport address.


@pytest.mark.parametrize(
    "status",
    [
        failed(PeerLostError("its process has ended")),
        failing(TransportError("only a disconnect ends it")),
    ],
)
def test_engines_with_one_address_share_a_connection_whose_loss_fails_the_loads_of_both(
    status: Status,
) -> None:
    driver = ScriptedTransport(PENDING, Quiescence.AFTER_DISCONNECT)
    with (
        Engine("real") as real,
        real.side_channel("alias") as alias,
        Engine("decode", options=OPTIONS, transport=lambda: driver) as decode,
    ):

        def begin(number: int) -> None:
            """Begin a load: one with an odd number from the alias."""
            ticket = real.serve(f"p-{number}", [number], TOKENS)
            ticket = in_name_of("alias", ticket, alias) if number % 2 else ticket
            decode.pull(f"d-{number}", ticket, [number])
            wait_for_reads(driver, number)

        for number in (1, 2):
            begin(number)
        assert len(driver.connected) == 1
        driver.statuses[0] = status
        first, second = outcomes(decode, 1, 2)
        assert str(status.error) in str(first)
        assert isinstance(second, PeerLostError)
        assert len(driver.disconnected) == 1
        driver.statuses.update({2: DONE, 3: DONE})
        for number in (3, 4):
            begin(number)
        assert outcomes(decode, 3, 4) == [None, None]
        assert len(driver.connected) == 2
