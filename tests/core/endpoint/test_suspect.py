"""A producer of which a read failed is connected anew, however its loads overlap."""

from __future__ import annotations

import dataclasses
import socket

import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import DeadlineError, KVFerryError, TransportError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from tests.core.endpoint.engines import Clock, Engine, Watched, engine, eventually
from tests.core.endpoint.test_shared_connections import double

TOKENS = 4
LOAD_TIMEOUT = 100.0
PENDING, DONE = Status(state=State.PENDING), Status(state=State.DONE)
FAILED = Status(state=State.FAILED, error=TransportError("a link flapped"))


class Told(Watched):
    """A driver of which reads of pages go on until the test says how they end."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[TransferId] = []
        self.says: dict[int, Status] = {}
        """By the order of the reads of pages."""
        self._gone: set[TransferId] = set()

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if notify is None:
            self.pages.append(transfer)
        return transfer

    def poll(self, transfers: list[TransferId]) -> list[Status]:  # type: ignore[override]
        return [
            self.says.get(self.pages.index(each), PENDING)
            if each in self.pages and each not in self._gone
            else real
            for each, real in zip(transfers, super().poll(transfers), strict=True)
        ]

    def cancel(self, transfer: TransferId) -> None:
        """Nothing: a read goes on as long as the test says."""

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        self._gone.update(self.pages)


def pull(producer: Engine, decode: Engine, number: int) -> None:
    decode.pull(f"d-{number}", producer.serve(f"p-{number}", [number], TOKENS), [number])


def failures(decode: Engine, *numbers: int) -> list[KVFerryError | None]:
    found: dict[str, KVFerryError | None] = {}

    def all_over() -> bool:
        results = decode.ranks[0].endpoint.results()
        found.update({name: results.failed.get(name) for name in results.received})
        return found.keys() >= {f"d-{number}" for number in numbers}

    eventually(all_over, "all are reported")
    return [found[f"d-{number}"] for number in numbers]


OPTIONS = EndpointOptions(liveness_interval=0.0, load_timeout=LOAD_TIMEOUT)


def test_traffic_that_overlaps_does_not_keep_a_connection_on_which_something_failed() -> None:
    driver = Told()
    with (
        engine("prefill") as prefill,
        engine("decode", options=OPTIONS, transport=lambda: driver) as decode,
    ):
        for number in (1, 2):
            pull(prefill, decode, number)
            eventually(lambda: len(driver.pages) == number, "it is read")  # noqa: B023
        driver.says[0] = FAILED
        assert "a link flapped" in str(failures(decode, 1)[0])
        pull(prefill, decode, 3)
        waiting = prefill.serve("p-4", [4], TOKENS)
        decode.prepare(waiting)
        assert len(driver.connected) == 1
        assert len(driver.pages) == 2, "new loads wait until those that go on are over"
        driver.says[1] = DONE
        assert failures(decode, 2) == [None]
        eventually(lambda: len(driver.pages) == 3, "and then begin")
        assert len(driver.connected) == 2, "on a new connection"
        assert len(driver.disconnected) == 1
        driver.says.update({2: DONE, 3: DONE})
        decode.pull("d-4", waiting, [4])
        assert failures(decode, 3, 4) == [None, None]
        assert len(driver.connected) == 2


def test_who_waits_for_a_new_connection_waits_no_longer_than_loads_may_last() -> None:
    """Those that go on have deadlines; one that was given up meanwhile is told to the producer."""
    driver, clock = Told(), Clock()
    with (
        engine("prefill") as prefill,
        engine("decode", options=OPTIONS, transport=lambda: driver, clock=clock) as decode,
    ):
        for number in (1, 2):
            pull(prefill, decode, number)
            eventually(lambda: len(driver.pages) == number, "it is read")  # noqa: B023
        driver.says[0] = FAILED
        failures(decode, 1)
        clock.skip(LOAD_TIMEOUT / 2)
        for number in (3, 4):
            pull(prefill, decode, number)
        decode.ranks[0].endpoint.abort(RequestId("d-3"))
        assert failures(decode, 3) != [None]
        driver.says[2] = DONE
        clock.skip(LOAD_TIMEOUT / 2 + 2.0)
        late, other = failures(decode, 2, 4)
        assert isinstance(late, DeadlineError)
        assert other is None
        eventually(
            lambda: prefill.ranks[0].endpoint.held == 1,
            "it is told of all but the one whose connection had to be closed",
        )


@pytest.mark.parametrize("other_reads", [False, True])
def test_a_connection_that_is_shared_is_made_anew_unless_another_engine_reads(
    other_reads: bool,
) -> None:
    """On which nothing failed there: it is given up with the first only where it is idle."""
    driver = Told()
    with (
        engine("prefill") as prefill,
        double(prefill) as other,
        engine("decode", options=OPTIONS, transport=lambda: driver) as decode,
    ):
        ticket = prefill.serve("p-1", [1], TOKENS)
        decode.pull("d-1", other.ticket(ticket), [1])
        eventually(lambda: len(driver.pages) == 1, "it is read")
        pull(prefill, decode, 2)
        eventually(lambda: len(driver.pages) == 2, "so is the other")
        driver.says[1] = FAILED
        failures(decode, 2)
        if not other_reads:
            driver.says[0] = DONE
            failures(decode, 1)
        pull(prefill, decode, 3)
        eventually(lambda: len(driver.pages) == 3, "the next is read")
        assert len(driver.disconnected) == (0 if other_reads else 1)
        driver.says.update({0: DONE, 2: DONE})
        expected = (3, 1) if other_reads else (3,)
        assert not any(failures(decode, *expected))


def test_a_load_that_is_given_up_before_its_handshake_has_failed_leaves_nothing_behind() -> None:
    options = dataclasses.replace(OPTIONS, handshake_timeout=0.3)
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        engine("prefill") as prefill,
        engine("decode", options=options) as decode,
    ):
        (rank,) = decode.ranks
        load_manager = rank.endpoint._load_manager
        ticket = dataclasses.replace(
            prefill.serve("p-1", [1], TOKENS), engine="mute", port=mute.getsockname()[1]
        )
        for number in (1, 2, 3):
            decode.pull(f"d-{number}", ticket, [number])
        eventually(lambda: len(load_manager._states) == 3, "all wait for the handshake")
        for number in (1, 2):
            rank.endpoint.abort(RequestId(f"d-{number}"))
        assert all(failures(decode, 1, 2)), "reported at once"
        assert len(load_manager._states) == 3
        assert all(failures(decode, 3)), "by the handshake's failure"
        eventually(lambda: not load_manager._states, "nothing is left of those that were given up")
        assert not load_manager._touched
        assert not rank.endpoint._transfers._graces
        assert rank.endpoint.pending == 0
