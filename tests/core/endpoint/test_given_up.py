"""Loads that are given up, or fail, while others are read from the same producer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvferry.core.endpoint import EndpointOptions, Results
from kvferry.core.errors import (
    EndpointClosedError,
    KVFerryError,
    PeerLostError,
    TransferCancelledError,
)
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.transport import Capabilities, PeerId, Quiescence, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from tests.core.endpoint.engines import (
    LAYERS,
    Clock,
    Engine,
    Watched,
    engine,
    eventually,
    expected,
    until,
)

TOKENS = 4
LONG = 60.0
LOAD_TIMEOUT = 100.0
CANCELLED = TransferCancelledError("cancelled")


class Held(Watched):
    """A driver of which reads of pages go on until they are let go, also those that are cancelled.

    Args:
        dooms: whether a read that is cancelled is known to fail from then on.
    """

    def __init__(self, *, dooms: bool) -> None:
        super().__init__()
        self.dooms = dooms
        self.let_go = False
        self.reads: dict[TransferId, bool] = {}
        """Those of pages, and whether they are known to fail."""
        self.cancelled: set[TransferId] = set()
        self.settled: set[TransferId] = set()
        """Those that were cancelled in a turn of the endpoint's that is over."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(
            super().capabilities, cancel=self.dooms, quiescence=Quiescence.AFTER_DISCONNECT
        )

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if notify is None:  # it is not a word's: no load here has its checked before the read
            self.reads[transfer] = False
        return transfer

    def cancel(self, transfer: TransferId) -> None:
        if transfer in self.reads:
            self.reads[transfer] = self.dooms
            self.cancelled.add(transfer)

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        self.settled |= self.cancelled
        found = zip(transfers, super().poll(transfers), strict=True)
        return [self._status(transfer) or status for transfer, status in found]

    def _status(self, transfer: TransferId) -> Status | None:
        """What to say of a read of pages instead of the truth."""
        if transfer not in self.reads or (self.let_go and not self.reads[transfer]):
            return None
        if not self.reads[transfer]:
            return Status(state=State.PENDING)
        return Status(state=State.FAILED if self.let_go else State.FAILING, error=CANCELLED)

    def disconnect(self, peer: PeerId) -> None:
        self.let_go = True
        super().disconnect(peer)


@contextlib.contextmanager
def three(driver: Watched, clock: Clock) -> Iterator[tuple[Engine, Engine, Engine]]:
    """A producer, another one, and who reads from both."""
    options = EndpointOptions(liveness_interval=0.0, load_timeout=LOAD_TIMEOUT)
    with (
        engine("prefill") as prefill,
        engine("other") as other,
        engine("decode", options=options, transport=lambda: driver, clock=clock) as decode,
    ):
        yield prefill, other, decode


def two_are_read(driver: Held, prefill: Engine, decode: Engine) -> None:
    for number in (1, 2):
        decode.pull(f"d-{number}", prefill.serve(f"p-{number}", [number], TOKENS), [number])
    eventually(lambda: len(driver.reads) == 2, "both are read")


def give_up(driver: Held, decode: Engine, *numbers: int) -> None:
    """And no time passes before the reads of these loads, all so far, have been cancelled."""
    for number in numbers:
        decode.ranks[0].endpoint.abort(RequestId(f"d-{number}"))
    eventually(lambda: len(driver.settled) == len(numbers), "what was read is cancelled")


def a_while_passes(clock: Clock, other: Engine, decode: Engine, seconds: float) -> None:
    """And all that is due then has been seen to: a request with the other producer came and went,
    twice, as the first may have been heard of in the turn in which time passed."""
    clock.skip(seconds)
    for number in range(2):
        request = f"o-{clock():.3f}-{number}"
        decode.pull(request, other.serve(request, [5], TOKENS), [], nothing=True)
        other.released(request)


def errors(decode: Engine, count: int) -> list[KVFerryError | None]:
    """Why each of so many loads failed, if it did, once all are reported."""
    (rank,) = decode.ranks
    found: dict[RequestId, KVFerryError | None] = {}

    def all_over(results: Results) -> bool:
        found.update({name: results.failed.get(name) for name in results.received})
        return len(found) == count

    until(rank.endpoint, all_over)
    return [found[RequestId(f"d-{number}")] for number in range(1, count + 1)]


def is_right(decode: Engine, page: int) -> bool:
    (rank,) = decode.ranks
    want = [expected(decode.shape, TOKENS, layer, 0) for layer in range(LAYERS)]
    return np.array_equal([rank.tokens([page], layer)[:TOKENS] for layer in range(LAYERS)], want)


@pytest.mark.parametrize("dooms", [False, True])
def test_a_load_that_is_given_up_does_not_end_others(dooms: bool) -> None:
    driver, clock = Held(dooms=dooms), Clock()
    with three(driver, clock) as (prefill, other, decode):
        two_are_read(driver, prefill, decode)
        give_up(driver, decode, 1)
        a_while_passes(clock, other, decode, LOAD_TIMEOUT / 2)
        assert driver.disconnected == set()
        assert decode.ranks[0].endpoint.pending == 2, "bytes may still land"
        driver.let_go = True
        given_up, other_error = errors(decode, 2)
        assert isinstance(given_up, EndpointClosedError)
        assert other_error is None
        assert is_right(decode, 2)
        eventually(lambda: prefill.ranks[0].endpoint.held == 0, "the producer hears of both")
        assert driver.disconnected == set()


@pytest.mark.parametrize("dooms", [False, True])
def test_what_is_read_for_nobody_is_ended(dooms: bool) -> None:
    driver, clock = Held(dooms=dooms), Clock()
    with three(driver, clock) as (prefill, other, decode):
        two_are_read(driver, prefill, decode)
        give_up(driver, decode, 1, 2)
        a_while_passes(clock, other, decode, LOAD_TIMEOUT / 2)
        assert all(errors(decode, 2))
        assert len(driver.disconnected) == 1


@pytest.mark.parametrize("dooms", [False, True])
def test_a_read_that_was_cancelled_is_ended_at_its_loads_own_deadline(dooms: bool) -> None:
    """Also where that ends a load that has time left."""
    driver, clock = Held(dooms=dooms), Clock()
    with three(driver, clock) as (prefill, other, decode):
        decode.pull("d-1", prefill.serve("p-1", [1], TOKENS), [1])
        eventually(lambda: len(driver.reads) == 1, "the first is read")
        clock.skip(0.3 * LOAD_TIMEOUT)
        decode.pull("d-2", prefill.serve("p-2", [2], TOKENS), [2])
        eventually(lambda: len(driver.reads) == 2, "both are read")
        give_up(driver, decode, 1)
        a_while_passes(clock, other, decode, 0.4 * LOAD_TIMEOUT)
        assert driver.disconnected == set()
        a_while_passes(clock, other, decode, 0.35 * LOAD_TIMEOUT)
        given_up, other_error = errors(decode, 2)
        assert isinstance(given_up, EndpointClosedError)
        assert isinstance(other_error, PeerLostError)
        assert len(driver.disconnected) == 1


class Broken(Watched):
    """A driver of which reads fail together, when they are let fail; ``disconnect`` takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.is_parting = False
        self.let_go = threading.Event()
        self.reads: set[TransferId] = set()

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        self.reads.add(transfer)
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        super().poll(transfers)
        lost = Status(state=State.FAILED, error=PeerLostError("its process has ended"))
        return [lost if self.fails else Status(state=State.PENDING) for _ in transfers]

    def forget(self, transfer: TransferId) -> None:
        assert not self.is_parting, "named while its peer is disconnected"
        super().forget(transfer)

    def disconnect(self, peer: PeerId) -> None:
        self.is_parting = True
        assert self.let_go.wait(LONG)
        super().disconnect(peer)
        self.is_parting = False


def test_no_transfer_is_named_while_its_connection_is_closed() -> None:
    """Not those, either, that were heard to have failed together with the first."""
    driver, clock = Broken(), Clock()
    with three(driver, clock) as (prefill, _, decode):
        for number in (1, 2, 3):
            decode.pull(f"d-{number}", prefill.serve(f"p-{number}", [number], TOKENS), [number])
        eventually(lambda: len(driver.reads) == 3, "all are read")
        driver.fails = True
        eventually(lambda: driver.is_parting, "the producer is given up")
        driver.let_go.set()
        assert all(isinstance(error, PeerLostError) for error in errors(decode, 3))
