"""Engines that publish one transport address: what happens to one of them is not the other's."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import (
    DeadlineError,
    EndpointClosedError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
    TransferCancelledError,
    TransportError,
)
from kvferry.core.handshake import HandshakeServer
from kvferry.core.handshake import server as server_module
from kvferry.core.lifecycle.holds import RequestId, random_incarnation
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.messages import encode
from kvferry.core.metrics import LOST_PEERS, PEERS_UP
from kvferry.core.transport import Capabilities, PeerId, Quiescence, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from tests.core.endpoint.engines import (
    LAYERS,
    Clock,
    Engine,
    Shape,
    Watched,
    engine,
    eventually,
    expected,
    until,
)
from tests.core.endpoint.test_figures import Counted

TOKENS = 4
LOAD_TIMEOUT = 100.0


class Double:
    """An engine of another name that publishes what a real one does: its transport's address."""

    def __init__(self, server: HandshakeServer, incarnation: int) -> None:
        self.server = server
        self._incarnation = incarnation

    def ticket(self, ticket: Ticket) -> Ticket:
        """A ticket of the real engine's, as if it were this one's."""
        return dataclasses.replace(
            ticket,
            engine="double",
            incarnation=self._incarnation,
            host=self.server.host,
            port=self.server.port,
        )


@contextlib.contextmanager
def double(real: Engine) -> Iterator[Double]:
    incarnation = random_incarnation()
    payloads = [
        encode(
            msgspec.structs.replace(r.endpoint.payload, engine="double", incarnation=incarnation)
        )
        for r in real.ranks
    ]
    with HandshakeServer(payloads, engine="double", incarnation=incarnation) as server:
        yield Double(server, incarnation)


NUMBERS = itertools.count(1)


def is_right(decode: Engine, page: int) -> bool:
    (rank,) = decode.ranks
    want = [expected(decode.shape, TOKENS, layer, 0) for layer in range(LAYERS)]
    return np.array_equal([rank.tokens([page], layer)[:TOKENS] for layer in range(LAYERS)], want)


def loads(decode: Engine, real: Engine, via: Double | None = None) -> KVFerryError | None:
    """Load one request, by the double's name if it is given; why it failed."""
    number = next(NUMBERS)
    ticket = real.serve(f"p-{number}", [1], TOKENS)
    decode.pull(f"d-{number}", via.ticket(ticket) if via else ticket, [2])
    failed = decode.outcome(f"d-{number}").failed.get(RequestId(f"d-{number}"))
    if failed is None:
        assert is_right(decode, 2)
        if via is None:
            real.released(f"p-{number}")
    return failed


@contextlib.contextmanager
def three(
    driver: Watched, clock: Clock | None = None, interval: float = 0.0
) -> Iterator[tuple[Engine, Double, Engine]]:
    options = EndpointOptions(
        liveness_interval=interval, load_timeout=LOAD_TIMEOUT, engine_ttl=600.0
    )
    with (
        engine("real") as real,
        double(real) as other,
        engine("decode", transport=lambda: driver, options=options, clock=clock or Clock()) as here,
    ):
        yield real, other, here


def test_two_engines_on_one_address_end_no_endpoint() -> None:
    """Both are released for being idle, and used again."""
    driver, clock = Watched(), Clock()
    with three(driver, clock) as (real, other, decode):
        for links in (1, 2):
            assert loads(decode, real) is None
            assert loads(decode, real, other) is None
            assert len(driver.connected) == links, "they share one connection"
            clock.skip(601.0)
            eventually(lambda: driver.links == 0, "both are idle")
            assert len(driver.disconnected) == links
        assert decode.ranks[0].endpoint.healthy


@pytest.mark.parametrize("goes", ["double", "real"])
def test_an_engine_that_goes_away_does_not_disconnect_another(goes: str) -> None:
    driver = Watched()
    with three(driver, interval=0.05) as (real, other, decode):
        assert loads(decode, real) is None
        assert loads(decode, real, other) is None
        counted = Counted(decode)
        (other if goes == "double" else real).server.close()
        eventually(lambda: counted.of(LOST_PEERS) == {(goes,): 1}, "it is given up")
        assert counted.of(PEERS_UP) == {("0",): 1}
        assert driver.disconnected == set()
        stays = None if goes == "double" else other
        assert loads(decode, real, stays) is None
        assert len(driver.connected) == 1
        assert decode.ranks[0].endpoint.healthy


def test_two_ranks_of_one_engine_on_one_address_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by who reads: what an engine serves was checked by nobody but itself."""
    with engine("prefill", Shape(tp=2)) as prefill, engine("decode") as decode:
        ticket = prefill.serve("p-1", [1], TOKENS)
        zero, one = (rank.endpoint.payload for rank in prefill.ranks)
        lie = [encode(zero), encode(msgspec.structs.replace(one, address=zero.address))]
        said = SimpleNamespace(engine="prefill", incarnation=prefill.incarnation)
        monkeypatch.setattr(server_module, "engine_info", lambda *_: said)
        with HandshakeServer(
            lie, engine="prefill", incarnation=prefill.incarnation, port=0
        ) as server:
            decode.pull("d-1", dataclasses.replace(ticket, port=server.port), [2])
            error = decode.outcome("d-1").failed[RequestId("d-1")]
        assert isinstance(error, HandshakeError)
        assert "ranks 0 and 1 publish one transport address" in str(error)
        decode.pull("d-2", ticket, [2])
        assert not decode.outcome("d-2").failed


class Held(Watched):
    """A driver of which reads of pages go on until the test says what becomes of them."""

    quiescence = Quiescence.ALWAYS

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[TransferId] = []
        self.says: dict[int, Status] = {}
        """Of the how-manieth read of pages; it is PENDING otherwise."""
        self.cancelled: list[TransferId] = []
        self._gone: set[TransferId] = set()
        self._of: dict[TransferId, PeerId] = {}

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, quiescence=self.quiescence)

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if notify is None:
            self.pages.append(transfer)
            self._of[transfer] = peer
        return transfer

    def cancel(self, transfer: TransferId) -> None:
        self.cancelled.append(transfer)

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        self._gone |= {transfer for transfer, of in self._of.items() if of == peer}

    def poll(self, transfers: list[TransferId]) -> list[Status]:  # type: ignore[override]
        statuses = super().poll(transfers)
        return [self._status(each, real) for each, real in zip(transfers, statuses, strict=True)]

    def _status(self, transfer: TransferId, real: Status) -> Status:
        if transfer not in self.pages:
            return real
        if transfer in self._gone:
            return Status(state=State.FAILED, error=PeerLostError("disconnected"))
        return self.says.get(self.pages.index(transfer), Status(state=State.PENDING))


class HeldUntilDisconnect(Held):
    quiescence = Quiescence.AFTER_DISCONNECT


def both_read(driver: Held, real: Engine, other: Double, decode: Engine) -> None:
    """Load 1 by the double's name, load 2 by the real one's; both are under way."""
    for number, via in ((1, other), (2, None)):
        ticket = real.serve(f"p-{number}", [number], TOKENS)
        decode.pull(f"d-{number}", via.ticket(ticket) if via else ticket, [number])
        eventually(lambda: len(driver.pages) == number, "it is read")  # noqa: B023


def outcome(decode: Engine, number: int) -> KVFerryError | None:
    name = RequestId(f"d-{number}")
    return decode.outcome(name).failed.get(name)


def a_while_passes(clock: Clock, decode: Engine, seconds: float) -> None:
    """And all that is due then has been seen to."""
    clock.skip(seconds)
    with engine(f"third-{next(NUMBERS)}") as third:
        for number in range(2):
            request = f"o-{next(NUMBERS)}"
            decode.pull(request, third.serve(request, [5], TOKENS), [], nothing=True)
            third.released(request)
            del number


DONE = Status(state=State.DONE)


def test_a_connection_that_is_lost_is_lost_for_all_and_both_come_back() -> None:
    driver = Held()
    with three(driver) as (real, other, decode):
        both_read(driver, real, other, decode)
        driver.says[0] = Status(state=State.FAILED, error=PeerLostError("its process has ended"))
        errors = failures(decode, 2)
        assert all(isinstance(error, PeerLostError) for error in errors.values())
        assert len(driver.disconnected) == 1
        driver.says.update({2: DONE, 3: DONE})
        assert loads(decode, real, other) is None
        assert loads(decode, real) is None
        assert len(driver.connected) == 2


def failures(decode: Engine, count: int) -> dict[str, KVFerryError]:
    """Why so many loads failed, once all are reported."""
    found: dict[str, KVFerryError] = {}
    (rank,) = decode.ranks

    def all_failed(results: object) -> bool:
        found.update(results.failed)  # type: ignore[attr-defined]
        return len(found) == count

    until(rank.endpoint, all_failed)
    return found


def test_a_read_that_only_a_disconnect_ends_ends_all_that_use_the_connection() -> None:
    """Its pages are not given back before."""
    driver = HeldUntilDisconnect()
    with three(driver) as (real, other, decode):
        both_read(driver, real, other, decode)
        driver.says[0] = Status(state=State.FAILING, error=TransportError("the cable is out"))
        errors = failures(decode, 2)
        assert "the cable is out" in str(errors["d-1"])
        assert isinstance(errors["d-2"], PeerLostError)
        assert len(driver.disconnected) == 1


def test_a_failed_read_of_one_engine_fails_alone() -> None:
    driver = Held()
    with three(driver) as (real, other, decode):
        both_read(driver, real, other, decode)
        driver.says[0] = Status(state=State.FAILED, error=TransportError("out of range"))
        assert "out of range" in str(outcome(decode, 1))
        driver.says[1] = DONE
        assert outcome(decode, 2) is None
        assert driver.disconnected == set()


@pytest.mark.parametrize("ended_by", ["itself", "deadline", "nobody"])
def test_reads_of_an_engine_that_is_given_up_go_on_while_another_is_read_from(
    ended_by: str,
) -> None:
    """Until they end, or nobody is read from, or their loads' deadline; reported only then."""
    driver, clock = Held(), Clock()
    with three(driver, clock, interval=0.05) as (real, other, decode):
        (rank,) = decode.ranks
        both_read(driver, real, other, decode)
        other.server.close()
        eventually(lambda: len(driver.cancelled) == 1, "the double is given up, and its read")
        a_while_passes(clock, decode, LOAD_TIMEOUT / 2)
        assert driver.disconnected.isdisjoint(driver._of.values())
        assert rank.endpoint.pending == 2, "bytes may still land in the pages of both"
        if ended_by == "itself":
            cancelled = TransferCancelledError("cancelled")
            driver.says.update({0: Status(state=State.FAILED, error=cancelled), 1: DONE})
        elif ended_by == "nobody":
            rank.endpoint.abort(RequestId("d-2"))
            eventually(lambda: len(driver.cancelled) == 2, "its read is cancelled, too")
            clock.skip(2.0)
        else:
            clock.skip(LOAD_TIMEOUT / 2 + 2.0)
        found: dict[str, KVFerryError | None] = {}

        def both_are_over() -> bool:
            results = rank.endpoint.results()
            found.update({name: results.failed.get(name) for name in results.received})
            return len(found) == 2

        eventually(both_are_over, "both are reported")
        assert isinstance(found["d-1"], PeerLostError)
        if ended_by == "itself":
            assert found["d-2"] is None
            assert driver.disconnected.isdisjoint(driver._of.values())
        else:
            kinds = EndpointClosedError if ended_by == "nobody" else (DeadlineError, PeerLostError)
            assert isinstance(found["d-2"], kinds)
            assert driver.disconnected.issuperset(driver._of.values())
