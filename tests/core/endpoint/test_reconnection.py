"""After a failed read, a producer is connected anew, even if its loads overlap."""

from __future__ import annotations

import dataclasses
import socket

import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import DeadlineError, TransportError, TransportUsageError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.transport import PeerId
from tests.core.endpoint.engines import (
    TOKENS,
    Clock,
    Engine,
    RecordingTransport,
    alias_engine,
    eventually,
    load,
    outcomes,
    pull,
)
from tests.core.endpoint.transports import DONE, PENDING, ScriptedTransport, failed

LOAD_TIMEOUT = 100.0
FAILED = failed(TransportError("a link flapped"))
OPTIONS = EndpointOptions(liveness_interval=0.0, load_timeout=LOAD_TIMEOUT)


@pytest.fixture
def driver() -> ScriptedTransport:
    return ScriptedTransport(PENDING)


def start_read(prefill: Engine, decode: Engine, driver: ScriptedTransport, *numbers: int) -> None:
    """Start loads, one after the other is read."""
    for number in numbers:
        pull(prefill, decode, number)
        eventually(lambda: len(driver.pages) == number, "it is read")  # noqa: B023


def test_overlapping_loads_do_not_keep_a_connection_on_which_a_read_failed(
    prefill: Engine, driver: ScriptedTransport
) -> None:
    with Engine("decode", options=OPTIONS, transport=lambda: driver) as decode:
        start_read(prefill, decode, driver, 1, 2)
        driver.statuses[0] = FAILED
        assert "a link flapped" in str(outcomes(decode, 1)[0])
        pull(prefill, decode, 3)
        waiting = prefill.serve("p-4", [4], TOKENS)
        decode.prepare(waiting)
        assert len(driver.connected) == 1
        assert len(driver.pages) == 2, "new loads wait until the earlier ones are over"
        driver.statuses[1] = DONE
        assert outcomes(decode, 2) == [None]
        eventually(lambda: len(driver.pages) == 3, "the waiting load begins")
        assert len(driver.connected) == 2, "on a new connection"
        assert len(driver.disconnected) == 1
        driver.statuses.update({2: DONE, 3: DONE})
        decode.pull("d-4", waiting, [4])
        assert outcomes(decode, 3, 4) == [None, None]
        assert len(driver.connected) == 2


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
    prefill: Engine, driver: ScriptedTransport, clock: Clock
) -> None:
    """The producer is told of a load that is aborted while it waits."""
    with Engine("decode", options=OPTIONS, transport=lambda: driver, clock=clock) as decode:
        start_read(prefill, decode, driver, 1, 2)
        driver.statuses[0] = FAILED
        outcomes(decode, 1)
        clock.skip(LOAD_TIMEOUT / 2)
        for number in (3, 4):
            pull(prefill, decode, number)
        decode.endpoint.abort(RequestId("d-3"))
        assert outcomes(decode, 3) != [None]
        driver.statuses[2] = DONE
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
    prefill: Engine, driver: ScriptedTransport, other_reads: bool
) -> None:
    with (
        alias_engine(prefill) as other,
        Engine("decode", options=OPTIONS, transport=lambda: driver) as decode,
    ):
        ticket = prefill.serve("p-1", [1], TOKENS)
        decode.pull("d-1", other.ticket(ticket), [1])
        eventually(lambda: len(driver.pages) == 1, "it is read")
        start_read(prefill, decode, driver, 2)
        driver.statuses[1] = FAILED
        outcomes(decode, 2)
        if not other_reads:
            driver.statuses[0] = DONE
            outcomes(decode, 1)
        start_read(prefill, decode, driver, 3)
        assert len(driver.disconnected) == (0 if other_reads else 1)
        driver.statuses.update({0: DONE, 2: DONE})
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
        assert not rank.endpoint._transfers._graces
        assert rank.endpoint.pending == 0
