"""Two engines that publish the same transport address share a connection."""

from __future__ import annotations

import contextlib
import itertools
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
from kvferry.core.metrics import LOST_PEERS, PEERS_UP
from kvferry.core.transport import Quiescence
from tests.core.endpoint.engines import (
    TOKENS,
    AliasEngine,
    Clock,
    Engine,
    MetricTotals,
    RecordingTransport,
    alias_engine,
    eventually,
    outcomes,
)
from tests.core.endpoint.transports import DONE, PENDING, ScriptedTransport, failed, failing

LOAD_TIMEOUT = 100.0


NUMBERS = itertools.count(10)


def load_by_name(
    decode: Engine, real: Engine, alias: AliasEngine | None = None
) -> KVFerryError | None:
    """Load one request, under the alias's name if one is given; return the error, if any."""
    number = next(NUMBERS)
    ticket = real.serve(f"p-{number}", [1], TOKENS)
    failed = decode.load(f"d-{number}", alias.ticket(ticket) if alias else ticket, [2])
    if failed is None:
        assert not decode.wrong_bytes([2], TOKENS)
        if alias is None:
            real.released(f"p-{number}")
    return failed


@contextlib.contextmanager
def real_and_alias(
    driver: RecordingTransport, clock: Clock | None = None, liveness_interval: float = 0.0
) -> Iterator[tuple[Engine, AliasEngine, Engine]]:
    options = EndpointOptions(
        liveness_interval=liveness_interval, load_timeout=LOAD_TIMEOUT, engine_ttl=600.0
    )
    with (
        Engine("real") as real,
        alias_engine(real) as alias,
        Engine(
            "decode", transport=lambda: driver, options=options, clock=clock or Clock()
        ) as decode,
    ):
        yield real, alias, decode


def test_two_engines_with_one_address_share_a_connection(
    clock: Clock, driver: RecordingTransport
) -> None:
    """Both are released when idle, and connected again."""
    with real_and_alias(driver, clock) as (real, alias, decode):
        for links in (1, 2):
            assert load_by_name(decode, real) is None
            assert load_by_name(decode, real, alias) is None
            assert len(driver.connected) == links, "they share one connection"
            clock.skip(601.0)
            decode.directory.step()  # not only when it is asked again
            eventually(lambda: driver.open_connections == 0, "both are idle")
            assert len(driver.disconnected) == links
        eventually(lambda: decode.endpoint.healthy, "a round has run since the skip")


def test_the_loss_of_one_engine_does_not_disconnect_the_other(
    driver: RecordingTransport,
) -> None:
    with real_and_alias(driver, liveness_interval=0.05) as (real, alias, decode):
        assert load_by_name(decode, real) is None
        assert load_by_name(decode, real, alias) is None
        totals = MetricTotals(decode)
        real.server.close()
        eventually(lambda: totals.of(LOST_PEERS) == {("real",): 1}, "the lost engine is given up")
        assert totals.of(PEERS_UP) == {("0",): 1}
        assert driver.disconnected == set()
        assert load_by_name(decode, real, alias) is None
        assert len(driver.connected) == 1
        assert decode.endpoint.healthy


def start_both_reads(
    driver: ScriptedTransport, real: Engine, alias: AliasEngine, decode: Engine
) -> None:
    """Start load 1 from the alias and load 2 from the real engine; wait until both are read."""
    driver.default = PENDING
    for number, by_alias in ((1, True), (2, False)):
        ticket = real.serve(f"p-{number}", [number], TOKENS)
        decode.pull(f"d-{number}", alias.ticket(ticket) if by_alias else ticket, [number])
        eventually(lambda: len(driver.pages) == number, "it is read")  # noqa: B023


def pass_time(clock: Clock, decode: Engine, seconds: float) -> None:
    """Move the clock, and wait until the endpoint has done all that is due by then."""
    clock.skip(seconds)
    with Engine(f"third-{next(NUMBERS)}") as third:
        for _ in range(2):
            request = f"o-{next(NUMBERS)}"
            decode.pull(request, third.serve(request, [5], TOKENS), [], nothing=True)
            third.released(request)


def test_a_lost_connection_fails_the_loads_of_both_engines_and_both_can_reconnect(
    driver: ScriptedTransport,
) -> None:
    with real_and_alias(driver) as (real, alias, decode):
        start_both_reads(driver, real, alias, decode)
        driver.statuses[0] = failed(PeerLostError("its process has ended"))
        assert all(isinstance(error, PeerLostError) for error in outcomes(decode, 1, 2))
        assert len(driver.disconnected) == 1
        driver.statuses.update({2: DONE, 3: DONE})
        assert load_by_name(decode, real, alias) is None
        assert load_by_name(decode, real) is None
        assert len(driver.connected) == 2


def test_a_read_that_only_a_disconnect_ends_also_ends_the_other_engines_loads(
    driver: ScriptedTransport,
) -> None:
    driver.quiescence = Quiescence.AFTER_DISCONNECT
    with real_and_alias(driver) as (real, alias, decode):
        start_both_reads(driver, real, alias, decode)
        driver.statuses[0] = failing(TransportError("the cable is out"))
        first, second = outcomes(decode, 1, 2)
        assert "the cable is out" in str(first)
        assert isinstance(second, PeerLostError)
        assert len(driver.disconnected) == 1


@pytest.mark.parametrize("ended_by", ["itself", "deadline", "abort"])
def test_reads_from_a_lost_engine_go_on_while_the_other_engine_is_read(
    driver: ScriptedTransport, clock: Clock, ended_by: str
) -> None:
    """They go on until they end, until the other load is aborted, or until a deadline.

    Both loads are reported only then.
    """
    with real_and_alias(driver, clock, liveness_interval=0.05) as (real, alias, decode):
        (rank,) = decode.ranks
        start_both_reads(driver, real, alias, decode)
        alias.server.close()
        eventually(lambda: len(driver.cancelled) == 1, "the read from the alias is cancelled")
        pass_time(clock, decode, LOAD_TIMEOUT / 2)
        assert driver.disconnected.isdisjoint(driver.peers.values())
        assert rank.endpoint.pending == 2, "bytes may still land in the pages of both"
        if ended_by == "itself":
            driver.statuses.update({0: failed(TransferCancelledError("cancelled")), 1: DONE})
        elif ended_by == "abort":
            rank.endpoint.abort(RequestId("d-2"))
            eventually(lambda: len(driver.cancelled) == 2, "the other read is cancelled too")
            clock.skip(2.0)
        else:
            clock.skip(LOAD_TIMEOUT / 2 + 2.0)
        first, second = outcomes(decode, 1, 2)
        assert isinstance(first, PeerLostError)
        if ended_by == "itself":
            assert second is None
            assert driver.disconnected.isdisjoint(driver.peers.values())
        else:
            kinds = EndpointClosedError if ended_by == "abort" else (DeadlineError, PeerLostError)
            assert isinstance(second, kinds)
            assert driver.disconnected.issuperset(driver.peers.values())
