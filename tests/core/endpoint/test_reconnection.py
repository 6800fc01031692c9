"""After a failed read, a producer is connected anew, even if its loads overlap."""

from __future__ import annotations

import dataclasses
import socket

import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import DeadlineError, TransportError, TransportUsageError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from tests.core.endpoint.aliases import alias_engine
from tests.core.endpoint.engines import Clock, Engine, RecordingTransport, eventually
from tests.core.endpoint.loads import TOKENS, outcomes, pull

LOAD_TIMEOUT = 100.0
PENDING, DONE = Status(state=State.PENDING), Status(state=State.DONE)
FAILED = Status(state=State.FAILED, error=TransportError("a link flapped"))


class ScriptedReadsTransport(RecordingTransport):
    """A transport whose page reads are pending until the test gives them a status."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[TransferId] = []
        self.statuses: dict[int, Status] = {}
        """Statuses by the index of the page read."""
        self._disconnected_reads: set[TransferId] = set()

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if notify is None:
            self.pages.append(transfer)
        return transfer

    def poll(self, transfers: list[TransferId]) -> list[Status]:  # type: ignore[override]
        return [
            self.statuses.get(self.pages.index(each), PENDING)
            if each in self.pages and each not in self._disconnected_reads
            else real
            for each, real in zip(transfers, super().poll(transfers), strict=True)
        ]

    def cancel(self, transfer: TransferId) -> None:
        """Do nothing: reads end only as the test says."""

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        self._disconnected_reads.update(self.pages)


OPTIONS = EndpointOptions(liveness_interval=0.0, load_timeout=LOAD_TIMEOUT)


def test_overlapping_loads_do_not_keep_a_connection_on_which_a_read_failed() -> None:
    driver = ScriptedReadsTransport()
    with (
        Engine("prefill") as prefill,
        Engine("decode", options=OPTIONS, transport=lambda: driver) as decode,
    ):
        for number in (1, 2):
            pull(prefill, decode, number)
            eventually(lambda: len(driver.pages) == number, "it is read")  # noqa: B023
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


def test_a_connection_that_has_ended_before_its_first_read_is_made_anew() -> None:
    """Two addresses lead to one transport, and the last user of the other has released it."""
    driver = EndedBeforeUseTransport()
    with (
        Engine("prefill") as prefill,
        Engine("decode", options=OPTIONS, transport=lambda: driver) as decode,
    ):
        pull(prefill, decode, 1)
        assert isinstance(outcomes(decode, 1)[0], TransportUsageError)
        pull(prefill, decode, 2)
        assert outcomes(decode, 2) == [None]
        assert len(driver.connected) == 2
        assert decode.ranks[0].endpoint.healthy


def test_loads_wait_for_a_new_connection_at_most_until_the_others_deadline() -> None:
    """The producer is told of a load that is aborted while it waits."""
    driver, clock = ScriptedReadsTransport(), Clock()
    with (
        Engine("prefill") as prefill,
        Engine("decode", options=OPTIONS, transport=lambda: driver, clock=clock) as decode,
    ):
        for number in (1, 2):
            pull(prefill, decode, number)
            eventually(lambda: len(driver.pages) == number, "it is read")  # noqa: B023
        driver.statuses[0] = FAILED
        outcomes(decode, 1)
        clock.skip(LOAD_TIMEOUT / 2)
        for number in (3, 4):
            pull(prefill, decode, number)
        decode.ranks[0].endpoint.abort(RequestId("d-3"))
        assert outcomes(decode, 3) != [None]
        driver.statuses[2] = DONE
        clock.skip(LOAD_TIMEOUT / 2 + 2.0)
        over_deadline, other = outcomes(decode, 2, 4)
        assert isinstance(over_deadline, DeadlineError)
        assert other is None
        eventually(
            lambda: prefill.ranks[0].endpoint.held == 1,
            "the producer is told of all loads but the one whose connection was closed",
        )


@pytest.mark.parametrize("other_reads", [False, True])
def test_a_shared_connection_is_replaced_unless_another_engine_is_read_over_it(
    other_reads: bool,
) -> None:
    driver = ScriptedReadsTransport()
    with (
        Engine("prefill") as prefill,
        alias_engine(prefill) as other,
        Engine("decode", options=OPTIONS, transport=lambda: driver) as decode,
    ):
        ticket = prefill.serve("p-1", [1], TOKENS)
        decode.pull("d-1", other.ticket(ticket), [1])
        eventually(lambda: len(driver.pages) == 1, "it is read")
        pull(prefill, decode, 2)
        eventually(lambda: len(driver.pages) == 2, "the second is read")
        driver.statuses[1] = FAILED
        outcomes(decode, 2)
        if not other_reads:
            driver.statuses[0] = DONE
            outcomes(decode, 1)
        pull(prefill, decode, 3)
        eventually(lambda: len(driver.pages) == 3, "the next is read")
        assert len(driver.disconnected) == (0 if other_reads else 1)
        driver.statuses.update({0: DONE, 2: DONE})
        numbers = (3, 1) if other_reads else (3,)
        assert not any(outcomes(decode, *numbers))


def test_loads_aborted_before_their_handshake_fails_leave_no_state_behind() -> None:
    options = dataclasses.replace(OPTIONS, handshake_timeout=0.3)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent_host,
        Engine("prefill") as prefill,
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
