"""After a failed read, a producer is connected anew, even if its loads overlap."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
from collections.abc import Iterator

import pytest

from kvferry.core.errors import (
    DeadlineError,
    EndpointClosedError,
    KVFerryError,
    PeerLostError,
    TransferCancelledError,
    TransportError,
    TransportUsageError,
)
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.metrics import LOST_PEERS, PEERS_UP
from kvferry.core.transport import PeerId, Quiescence
from tests.core.endpoint.engines import (
    TOKENS,
    AliasEngine,
    Clock,
    Engine,
    MetricTotals,
    RecordingTransport,
    alias_engine,
    eventually,
    load,
    outcomes,
    pull,
)
from tests.core.endpoint.transports import (
    DONE,
    LOAD_TIMEOUT,
    OPTIONS,
    PENDING,
    ScriptedTransport,
    failed,
    failing,
    pass_time,
)

FAILED = failed(TransportError("a link flapped"))


@pytest.fixture
def stalled(driver: ScriptedTransport) -> ScriptedTransport:
    driver.default = PENDING
    return driver


def start_read(prefill: Engine, decode: Engine, stalled: ScriptedTransport, *numbers: int) -> None:
    """Start loads, one after the other is read."""
    for number in numbers:
        pull(prefill, decode, number)
        eventually(lambda: len(stalled.pages) == number, "it is read")  # noqa: B023


def test_overlapping_loads_do_not_keep_a_connection_on_which_a_read_failed(
    prefill: Engine, stalled: ScriptedTransport
) -> None:
    with Engine("decode", options=OPTIONS, transport=lambda: stalled) as decode:
        start_read(prefill, decode, stalled, 1, 2)
        stalled.statuses[0] = FAILED
        assert "a link flapped" in str(outcomes(decode, 1)[0])
        pull(prefill, decode, 3)
        waiting = prefill.serve("p-4", [4], TOKENS)
        decode.prepare(waiting)
        assert len(stalled.connected) == 1
        assert len(stalled.pages) == 2, "new loads wait until the earlier ones are over"
        stalled.statuses[1] = DONE
        assert outcomes(decode, 2) == [None]
        eventually(lambda: len(stalled.pages) == 3, "the waiting load begins")
        assert len(stalled.connected) == 2, "on a new connection"
        assert len(stalled.disconnected) == 1
        stalled.statuses.update({2: DONE, 3: DONE})
        decode.pull("d-4", waiting, [4])
        assert outcomes(decode, 3, 4) == [None, None]
        assert len(stalled.connected) == 2


class EndedBeforeUseTransport(RecordingTransport):
    """A transport whose first connection has ended when ``connect`` returns its id."""

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        if len(self.connected) == 1:
            super().disconnect(peer)
        return peer


def test_a_connection_that_has_ended_before_its_first_read_is_made_anew(prefill: Engine) -> None:
    """Two addresses lead to one transport, and the last user of the other has released it."""
    driver = EndedBeforeUseTransport()
    with Engine("decode", options=OPTIONS, transport=lambda: driver) as decode:
        assert isinstance(load(prefill, decode, 1), TransportUsageError)
        assert load(prefill, decode, 2) is None
        assert len(driver.connected) == 2
        assert decode.endpoint.healthy


def test_loads_wait_for_a_new_connection_at_most_until_the_others_deadline(
    prefill: Engine, stalled: ScriptedTransport, clock: Clock
) -> None:
    """The producer is told of a load that is aborted while it waits."""
    with Engine("decode", options=OPTIONS, transport=lambda: stalled, clock=clock) as decode:
        start_read(prefill, decode, stalled, 1, 2)
        stalled.statuses[0] = FAILED
        outcomes(decode, 1)
        clock.skip(LOAD_TIMEOUT / 2)
        for number in (3, 4):
            pull(prefill, decode, number)
        decode.endpoint.abort(RequestId("d-3"))
        assert outcomes(decode, 3) != [None]
        stalled.statuses[2] = DONE
        clock.skip(LOAD_TIMEOUT / 2 + 2.0)
        over_deadline, other = outcomes(decode, 2, 4)
        assert isinstance(over_deadline, DeadlineError)
        assert other is None
        eventually(
            lambda: prefill.endpoint.held == 1,
            "the producer is told of all loads but the one whose connection was closed",
        )


@pytest.mark.parametrize("other_reads", [False, True])
def test_a_shared_connection_is_replaced_unless_another_engine_is_read_over_it(
    prefill: Engine, stalled: ScriptedTransport, other_reads: bool
) -> None:
    with (
        alias_engine(prefill) as other,
        Engine("decode", options=OPTIONS, transport=lambda: stalled) as decode,
    ):
        ticket = prefill.serve("p-1", [1], TOKENS)
        decode.pull("d-1", other.ticket(ticket), [1])
        eventually(lambda: len(stalled.pages) == 1, "it is read")
        start_read(prefill, decode, stalled, 2)
        stalled.statuses[1] = FAILED
        outcomes(decode, 2)
        if not other_reads:
            stalled.statuses[0] = DONE
            outcomes(decode, 1)
        start_read(prefill, decode, stalled, 3)
        assert len(stalled.disconnected) == (0 if other_reads else 1)
        stalled.statuses.update({0: DONE, 2: DONE})
        numbers = (3, 1) if other_reads else (3,)
        assert not any(outcomes(decode, *numbers))


def test_loads_aborted_before_their_handshake_fails_leave_no_state_behind(prefill: Engine) -> None:
    options = dataclasses.replace(OPTIONS, handshake_timeout=0.3)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent_host,
        Engine("decode", options=options) as decode,
    ):
        (rank,) = decode.ranks
        load_manager = rank.endpoint._load_manager
        ticket = dataclasses.replace(
            prefill.serve("p-1", [1], TOKENS), engine="mute", port=silent_host.getsockname()[1]
        )
        for number in (1, 2, 3):
            decode.pull(f"d-{number}", ticket, [number])
        eventually(lambda: len(load_manager._states) == 3, "all wait for the handshake")
        for number in (1, 2):
            rank.endpoint.abort(RequestId(f"d-{number}"))
        assert all(outcomes(decode, 1, 2)), "reported at once"
        assert len(load_manager._states) == 3
        assert all(outcomes(decode, 3)), "by the handshake's failure"
        eventually(lambda: not load_manager._states, "no state of the aborted loads is left")
        assert not load_manager._touched
        assert rank.endpoint.pending == 0


# Engines that publish the same transport address.

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
    options = dataclasses.replace(OPTIONS, liveness_interval=liveness_interval, engine_ttl=600.0)
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
    """Both loads are reported only then."""
    with (
        Engine("third") as third,
        real_and_alias(driver, clock, liveness_interval=0.05) as (real, alias, decode),
    ):
        start_both_reads(driver, real, alias, decode)
        alias.server.close()
        eventually(lambda: len(driver.cancelled) == 1, "the read from the alias is cancelled")
        pass_time(clock, third, decode, LOAD_TIMEOUT / 2)
        assert driver.disconnected.isdisjoint(driver.peers.values())
        assert decode.endpoint.pending == 2, "bytes may still land in the pages of both"
        if ended_by == "itself":
            driver.statuses.update({0: failed(TransferCancelledError("cancelled")), 1: DONE})
        elif ended_by == "abort":
            decode.endpoint.abort(RequestId("d-2"))
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
