"""Regions that processes read from each other: the bytes, who is admitted, and peers that fail.

The driver is loopback, unless the variable ``KVFERRY_EXCHANGE_OVER`` names another.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvferry import (
    ExchangeOptions,
    KVFerryError,
    RegionExchange,
    RegionRead,
    RemoteRegion,
    create_transport,
    region_of,
)
from kvferry.core.errors import (
    AdmissionError,
    EndpointClosedError,
    HandshakeError,
    IncompatibleError,
    PeerLostError,
    StaleError,
    TransferCancelledError,
    TransportUsageError,
)
from kvferry.core.lifecycle.holds import NOTHING
from kvferry.core.security import Access, generate
from kvferry.core.transport import Quiescence
from kvferry.testing import Fault, FaultyTransport, Schedule
from tests.core.exchange_peer import NBYTES, ExchangePeer, content

DRIVER = os.environ.get("KVFERRY_EXCHANGE_OVER", "loopback")
PIECE = 1 << 12
PIECES = NBYTES // PIECE
SECONDS = 20.0


class Side:
    """An exchange of this process, and its memory."""

    def __init__(
        self,
        *,
        seed: int | None = None,
        driver: str = DRIVER,
        schedule: Schedule | None = None,
        quiescence: Quiescence | None = None,
        agreement: dict[str, str] | None = None,
        **options: object,
    ) -> None:
        self.memory = np.zeros(NBYTES, np.uint8) if seed is None else content(seed)
        transport = create_transport(driver)
        if schedule is not None:
            transport = FaultyTransport(transport, schedule, quiescence=quiescence)
        self.exchange = RegionExchange(
            "test",
            region_of(self.memory),
            driver=driver,
            transport=transport,
            agreement=agreement,
            options=ExchangeOptions(**options),  # type: ignore[arg-type]
        )

    def read(self, remote: RemoteRegion, pieces: range | None = None) -> RegionRead:
        """Begin to read pieces of the peer's memory to the same places here."""
        offsets = np.array(pieces or range(PIECES), np.uint64) * np.uint64(PIECE)
        return self.exchange.read(remote, offsets, offsets, np.full_like(offsets, PIECE))

    def outcome(self, read: RegionRead) -> KVFerryError | None:
        """Wait until a read is over, and return why it has failed."""
        deadline = time.monotonic() + SECONDS
        while not self.exchange.wait(read, 0.01):
            assert time.monotonic() < deadline, "the read is not over"
        return read.error


@pytest.fixture
def side() -> Iterator[Callable[..., Side]]:
    """Make sides, which are closed after the test."""
    with ExitStack() as stack:

        def make(**options: object) -> Side:
            made = Side(**options)  # type: ignore[arg-type]
            stack.callback(made.exchange.close)
            return made

        yield make


@pytest.fixture
def peer() -> Iterator[Callable[..., ExchangePeer]]:
    """Start peers, which are killed after the test."""
    with ExitStack() as stack:

        def start(seed: int = 1, port: int = 0) -> ExchangePeer:
            made = ExchangePeer.start(DRIVER, seed, port)
            stack.callback(made.kill)
            return made

        yield start


def until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Bytes.


def test_reads_all_pieces_of_another_process(
    side: Callable[..., Side], peer: Callable[..., ExchangePeer]
) -> None:
    here, there = side(), peer()
    remote = here.exchange.connect("127.0.0.1", there.port)
    assert remote.nbytes == NBYTES
    assert here.outcome(here.read(remote)) is None
    assert np.array_equal(here.memory, content(1))


def test_what_leaves_the_regions_is_not_read_and_harms_no_other_read(
    side: Callable[..., Side],
) -> None:
    here, there = side(), side(seed=1)
    remote = here.exchange.connect("127.0.0.1", there.exchange.port)
    assert isinstance(
        here.outcome(here.read(remote, range(PIECES, PIECES + 1))), TransportUsageError
    )
    assert here.outcome(here.read(remote)) is None
    assert np.array_equal(here.memory, content(1))


# Who is admitted.


def test_keys_admit_their_owners_only(side: Callable[..., Side]) -> None:
    mine, yours, stranger = generate(), generate(), generate()
    both = {mine.public, yours.public}
    here = side(access=Access(own=mine, peers=both))
    there = side(seed=1, access=Access(own=yours, peers=both))
    remote = here.exchange.connect("127.0.0.1", there.exchange.port)
    assert here.outcome(here.read(remote)) is None
    for access in (Access(), Access(own=stranger, peers=both)):
        with pytest.raises(AdmissionError):
            side(access=access).exchange.connect("127.0.0.1", there.exchange.port)


def test_differences_are_refused_and_what_is_not_there_is_told(side: Callable[..., Side]) -> None:
    here, other = side(agreement={"format": "1"}), side(agreement={"format": "2"})
    with pytest.raises(IncompatibleError, match="format"):
        here.exchange.connect("127.0.0.1", other.exchange.port)
    port = other.exchange.port
    other.exchange.close()
    with pytest.raises(HandshakeError, match="nobody listens there"):
        here.exchange.connect("127.0.0.1", port)


# Peers that fail.


def test_a_killed_peer_fails_its_reads_and_no_others(
    side: Callable[..., Side], peer: Callable[..., ExchangePeer]
) -> None:
    here, killed, other = side(), peer(1), peer(2)
    dead = here.exchange.connect("127.0.0.1", killed.port)
    alive = here.exchange.connect("127.0.0.1", other.port)
    killed.kill()
    lost, read = here.read(dead), here.read(alive, range(100))
    assert here.outcome(read) is None
    assert isinstance(here.outcome(lost), KVFerryError)
    assert isinstance(here.outcome(here.read(dead)), PeerLostError)
    here.memory[:] = 0
    assert here.outcome(here.read(alive)) is None
    assert np.array_equal(here.memory, content(2))


@pytest.mark.parametrize("stale_after", [0.3, 600.0])
def test_after_a_restart_offsets_of_the_old_process_are_not_read(
    side: Callable[..., Side], peer: Callable[..., ExchangePeer], stale_after: float
) -> None:
    here, first = side(stale_after=stale_after), peer(1)
    remote = here.exchange.connect("127.0.0.1", first.port)
    assert here.outcome(here.read(remote)) is None
    first.kill()
    peer(2, first.port)
    assert here.outcome(here.read(remote)) is not None
    began = time.monotonic()
    again = here.exchange.connect("127.0.0.1", first.port)
    assert again.incarnation != remote.incarnation
    assert here.outcome(here.read(again)) is None
    assert np.array_equal(here.memory, content(2))
    if stale_after < 1:
        until(lambda: here.outcome(here.read(remote)) is None)
        assert time.monotonic() - began >= stale_after
    else:
        for _ in range(20):
            assert here.outcome(here.read(remote)) is not None
            time.sleep(0.1)


def test_a_lost_connection_to_a_peer_that_lives_is_made_again(side: Callable[..., Side]) -> None:
    here = side(schedule=Schedule(at={0: Fault.FAIL}))
    there = side(seed=1)
    remote = here.exchange.connect("127.0.0.1", there.exchange.port)
    assert here.outcome(here.read(remote)) is not None
    until(lambda: here.outcome(here.read(remote)) is None)
    assert np.array_equal(here.memory, content(1))


def test_a_region_that_was_closed_is_not_read_though_its_process_lives(
    side: Callable[..., Side],
) -> None:
    here, there = side(), side(seed=1)
    remote = here.exchange.connect("127.0.0.1", there.exchange.port)
    # As if the driver still reached the memory: what it reads is another's by now.
    there.exchange._served.words[0] = NOTHING
    assert isinstance(here.outcome(here.read(remote)), StaleError)


@pytest.mark.parametrize("quiescence", Quiescence)
def test_a_failing_read_is_over_when_no_byte_lands_any_more(
    side: Callable[..., Side], quiescence: Quiescence
) -> None:
    # The wrapped transfer moves all its bytes before it is FAILED.
    schedule = Schedule(at={0: Fault.DOOM}, polls=20)
    here = side(schedule=schedule, quiescence=quiescence)
    there = side(seed=1)
    remote = here.exchange.connect("127.0.0.1", there.exchange.port)
    assert here.outcome(here.read(remote)) is not None
    here.memory[:] = 0
    time.sleep(0.3)
    assert not here.memory.any()


def test_a_read_that_takes_too_long_is_cancelled(side: Callable[..., Side]) -> None:
    here = side(schedule=Schedule(at={0: Fault.DELAY}, polls=1 << 30), read_timeout=0.2)
    remote = here.exchange.connect("127.0.0.1", side(seed=1).exchange.port)
    error = here.outcome(here.read(remote))
    assert isinstance(error, TransferCancelledError | PeerLostError)


@pytest.mark.skipif(DRIVER == "loopback", reason="loopback reads from a stopped process")
def test_a_stopped_peer_delays_no_other_and_is_read_again_when_it_goes_on(
    side: Callable[..., Side], peer: Callable[..., ExchangePeer]
) -> None:
    here, stopped, other = side(read_timeout=1.0), peer(1), peer(2)
    remote = here.exchange.connect("127.0.0.1", stopped.port)
    alive = here.exchange.connect("127.0.0.1", other.port)
    stopped.process.send_signal(signal.SIGSTOP)
    read = here.read(remote)
    try:
        for _ in range(20):
            assert here.outcome(here.read(alive, range(100))) is None
            time.sleep(0.05)
    finally:
        stopped.process.send_signal(signal.SIGCONT)
    here.outcome(read)
    until(lambda: here.outcome(here.read(remote)) is None)
    assert np.array_equal(here.memory, content(1))


# The end.


def test_disconnecting_and_closing_end_what_is_under_way(side: Callable[..., Side]) -> None:
    slow = Schedule(at={0: Fault.DELAY, 1: Fault.DELAY}, polls=1 << 30)
    here, there = side(schedule=slow), side(seed=1)
    first = here.exchange.connect("127.0.0.1", there.exchange.port)
    read = here.read(first)
    here.exchange.disconnect(first)
    assert here.outcome(read) is not None
    assert isinstance(here.outcome(here.read(first)), PeerLostError)
    second = here.exchange.connect("127.0.0.1", there.exchange.port)
    read = here.read(second)
    here.exchange.close()
    here.exchange.close()
    assert read.is_over
    assert read.error is not None
    with pytest.raises(EndpointClosedError):
        here.read(second)
    with pytest.raises(EndpointClosedError):
        here.exchange.connect("127.0.0.1", there.exchange.port)
