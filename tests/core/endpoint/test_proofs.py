"""Tickets that prove themselves: forged ones are refused and nobody is told of them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.endpoint.producer import SlotTable
from kvferry.core.errors import (
    HandshakeError,
    KVFerryError,
    TicketError,
    TicketReason,
    TransportError,
)
from kvferry.core.handshake import HandshakeServer, engine_info
from kvferry.core.handshake.dialer import Dialer
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.messages import encode
from kvferry.core.security import TicketKey
from kvferry.core.security.proof import FINGERPRINT_BYTES, fingerprint
from kvferry.core.transport import Capabilities, PeerId, Quiescence, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from tests.core.endpoint.engines import (
    Clock,
    Engine,
    Shape,
    Watched,
    engine,
    eventually,
)
from tests.core.proving import altered, proved, said

KEY, OTHER = TicketKey(), TicketKey()


class Reader(LoopbackTransport):
    """A driver that says what it read, as remote addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[list[int]] = []

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        self.reads.append([int(address) for address in copies.remote])
        return super().read(peer, copies, notify)


def header(prefill: Engine, rank: int = 0) -> int:
    found = prefill.ranks[rank].endpoint.payload.fingerprint
    assert found is not None
    return found.address


def failure(decode: Engine, request: str, ticket: Ticket, pages: Sequence[int] = (5,)) -> Any:
    decode.pull(request, ticket, list(pages))
    error, *_ = decode.outcome(request).failed.values()
    return error


def loads(decode: Engine, request: str, ticket: Ticket, pages: Sequence[int] = (3, 4)) -> None:
    decode.pull(request, ticket, list(pages))
    assert not decode.outcome(request).failed


def about_holds(told: Watched) -> list[bytes]:
    """Return what a producer was told but for heartbeats, which name no hold."""
    return [heard.payload for heard in told.heard if b"heartbeat" not in heard.payload]


def stripped(ticket: Ticket) -> Ticket:
    return replace(ticket, proof=None)


def next_block(ticket: Ticket) -> Ticket:
    return altered(ticket, pages=tuple(tuple(page + 1 for page in ids) for ids in ticket.pages))


def one_more_block(ticket: Ticket) -> Ticket:
    """The client's own ticket, for pages that were never ticketed."""
    return altered(ticket, pages=((*ticket.pages[0], 9),))


def another_hold(ticket: Ticket) -> Ticket:
    return altered(ticket, hold=Hold(slot=ticket.hold.slot, generation=7))


def another_key(ticket: Ticket) -> Ticket:
    return proved(replace(ticket, proof=None), OTHER)


FORGERIES: list[Callable[[Ticket], Ticket]] = [
    next_block,
    one_more_block,
    another_hold,
    another_key,
    stripped,
]


def test_pages_of_genuine_tickets_cross_after_one_look_at_the_fingerprint() -> None:
    driver = Reader()
    with (
        engine("prefill", ticket_key=KEY) as prefill,
        engine("decode", transport=lambda: driver) as decode,
    ):
        for index in range(3):
            ticket = prefill.serve(f"p-{index}", [1, 2], 8)
            loads(decode, f"d-{index}", ticket)
            prefill.released(f"p-{index}")
        words = [header(prefill), header(prefill) + 8]
        assert [read for read in driver.reads if set(read) & set(words)] == [words]
        assert driver.reads[0] == words


@pytest.mark.parametrize("forge", FORGERIES)
@pytest.mark.parametrize("is_prepared", [True, False], ids=["prepared", "at once"])
@pytest.mark.parametrize("is_known", [True, False], ids=["connected", "unknown"])
def test_a_forged_ticket_causes_no_renewal_read_done_or_abandon(
    forge: Callable[[Ticket], Ticket], is_prepared: bool, is_known: bool
) -> None:
    """Nor a connection, not even for the hold that it names; and the genuine ticket works then."""
    told, driver = Watched(), Reader()
    with (
        engine("prefill", ticket_key=KEY, transport=lambda: told) as prefill,
        engine("decode", transport=lambda: driver) as decode,
    ):
        if is_known:
            loads(decode, "d-0", prefill.serve("p-0", [10, 11], 8), [7, 8])
            prefill.released("p-0")
            told.heard.clear()
            driver.reads.clear()
        genuine = prefill.serve("p-1", [1, 2], 8)
        forged = forge(genuine)
        if is_prepared:
            decode.prepare(forged)
        error = failure(decode, "d-1", forged, [5, 6])
        assert isinstance(error, TicketError)
        assert error.reason is TicketReason.PROOF
        assert driver.reads == []
        loads(decode, "d-2", genuine)
        prefill.released("p-1")
        # What the genuine ticket says comes after whatever the forged one would have said.
        [heard] = about_holds(told)
        assert heard.count(b"release") == 1


@pytest.mark.parametrize("forge", FORGERIES)
def test_a_request_that_needs_nothing_says_nothing_of_a_forged_ticket(
    forge: Callable[[Ticket], Ticket],
) -> None:
    """Its prompt is in the prefix cache, and a genuine ticket would be answered by "done"."""
    told = Watched()
    with (
        engine("prefill", ticket_key=KEY, transport=lambda: told) as prefill,
        engine("decode") as decode,
    ):
        genuine = prefill.serve("p-1", [1, 2], 8)
        decode.pull("d-1", forge(genuine), [], nothing=True)
        loads(decode, "d-2", genuine)
        prefill.released("p-1")
        assert [heard.count(b"release") for heard in about_holds(told)] == [1]


def test_a_forged_ticket_does_not_end_the_renewal_of_the_hold_that_it_names() -> None:
    """The request with the forged one waits first, and the genuine one beside it."""
    told = Watched()
    with (
        engine("prefill", ticket_key=KEY, transport=lambda: told) as prefill,
        engine("decode") as decode,
    ):
        genuine = prefill.serve("p-1", [1, 2], 8)
        decode.prepare(next_block(genuine))
        decode.prepare(genuine)
        eventually(lambda: bool(about_holds(told)), "the genuine one is renewed")
        assert isinstance(failure(decode, "d-1", next_block(genuine), [5, 6]), TicketError)
        loads(decode, "d-2", genuine)


def test_a_ticket_of_an_engine_that_proves_none_may_not_name_a_key() -> None:
    """Without any it is an older build's, and is accepted."""
    with engine("prefill") as prefill, engine("decode") as decode:
        ticket = prefill.serve("p-1", [1, 2], 8)
        error = failure(decode, "d-1", proved(ticket, OTHER), [5, 6])
        assert isinstance(error, TicketError)
        assert "publishes none" in str(error)
        loads(decode, "d-2", ticket)


def test_a_ticket_of_an_earlier_start_is_refused_before_anything_is_connected() -> None:
    """The engine's workers may not have heard of its key yet."""
    driver = Reader()
    with engine("prefill", ticket_key=OTHER) as earlier:
        old = earlier.serve("p-1", [1, 2], 8)
    with (
        engine("prefill", ticket_key=KEY) as prefill,
        engine("decode", transport=lambda: driver) as decode,
    ):
        ticket = replace(old, port=prefill.server.port)
        decode.prepare(ticket)
        error = failure(decode, "d-1", ticket, [5, 6])
        assert isinstance(error, TicketError)
        assert error.reason is TicketReason.RESTARTED
        assert driver.reads == []


def test_every_rank_refuses() -> None:
    with (
        engine("prefill", Shape(tp=2), ticket_key=KEY) as prefill,
        engine("decode", Shape(tp=2)) as decode,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.pull("d-1", next_block(ticket), [5, 6])
        for rank in decode.ranks:
            eventually(lambda rank=rank: not rank.endpoint.pending, "every rank reports")  # type: ignore[misc]
            assert rank.endpoint.results().failed
        loads(decode, "d-2", ticket)
        prefill.released("p-1")


# Relayed.


@contextmanager
def relaying(
    prefill: Engine, key: TicketKey, change: dict[str, Any] | None = None
) -> Iterator[HandshakeServer]:
    """A side channel that serves an honest engine's payloads under a key of its own."""
    known = [msgspec.msgpack.decode(encode(rank.endpoint.payload)) for rank in prefill.ranks]
    with HandshakeServer(
        [msgspec.msgpack.encode(one | (change or {})) for one in known],
        engine=prefill.name,
        incarnation=prefill.incarnation,
        ticket_key=key.public,
    ) as server:
        yield server


@pytest.mark.parametrize("ranks", [1, 2])
def test_who_relays_the_payloads_of_another_is_refused(ranks: int) -> None:
    told, driver = Watched(), Reader()
    drivers = iter([told, LoopbackTransport()])
    with (
        engine(
            "prefill", Shape(tp=ranks), ticket_key=KEY, transport=lambda: next(drivers)
        ) as prefill,
        engine("decode", transport=lambda: driver) as decode,
        relaying(prefill, OTHER) as relay,
    ):
        genuine = prefill.serve("p-1", [1, 2], 8)
        made_up = proved(
            replace(genuine, proof=None, port=relay.port, pages=((2, 3),)),
            OTHER,
        )
        error = failure(decode, "d-1", made_up, [5, 6])
        assert type(error) is HandshakeError
        assert "answers with the payloads of another" in str(error)
        assert fingerprint(KEY.public).hex() in str(error)
        headers = {header(prefill, rank) + 8 * index for rank in range(ranks) for index in (0, 1)}
        assert {address for read in driver.reads for address in read} <= headers
        assert told.heard == []
        loads(decode, "d-2", genuine)


def test_a_relay_may_not_leave_the_fingerprint_out() -> None:
    with engine("prefill", ticket_key=KEY) as prefill:
        payload = msgspec.structs.replace(prefill.ranks[0].endpoint.payload, fingerprint=None)
        with pytest.raises(HandshakeError, match="rank 0 does not say where its fingerprint is"):
            engine_info([encode(payload)], OTHER.public)
        assert engine_info([encode(payload)]).ticket_key == b""


class Mute(LoopbackTransport):
    """The first reads never end, until their peer is disconnected."""

    def __init__(self, mute: int) -> None:
        super().__init__()
        self.mute = mute
        self.silent: dict[TransferId, PeerId] = {}
        self.gone: set[PeerId] = set()

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if self.mute:
            self.mute -= 1
            self.silent[transfer] = peer
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        found = super().poll(transfers)
        return [
            Status(state=State.PENDING)
            if transfer in self.silent and self.silent[transfer] not in self.gone
            else status
            for transfer, status in zip(transfers, found, strict=True)
        ]

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        self.gone.add(peer)


def test_a_fingerprint_that_does_not_come_fails_the_load_and_the_next_one_works() -> None:
    clock, driver = Clock(), Mute(1)
    with (
        engine("prefill", ticket_key=KEY) as prefill,
        engine("decode", transport=lambda: driver, clock=clock) as decode,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.pull("d-1", ticket, [5, 6])
        eventually(lambda: driver.mute == 0, "the fingerprint is asked for")
        clock.skip(EndpointOptions().handshake_timeout + 1.0)
        [error] = decode.outcome("d-1").failed.values()
        assert "the fingerprint of engine 'prefill' was not read within 10 s" in str(error)
        eventually(lambda: bool(driver.gone), "it is disconnected")
        clock.skip(1.0)  # handshakes that failed are not repeated at once
        loads(decode, "d-2", prefill.serve("p-2", [1, 2], 8))


class Failing(LoopbackTransport):
    """The first read fails."""

    failed = False

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        if not self.failed:
            self.failed = True
            raise RuntimeError("a bug of the driver's")
        return super().read(peer, copies, notify)


def test_a_driver_that_fails_to_read_the_fingerprint_fails_that_load_only() -> None:
    clock = Clock()
    with (
        engine("prefill", ticket_key=KEY) as prefill,
        engine("decode", transport=Failing, clock=clock) as decode,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        assert "a bug of the driver's" in str(failure(decode, "d-1", ticket, [5, 6]))
        clock.skip(1.0)
        loads(decode, "d-2", ticket)


class Dooming(Watched):
    """Of a peer that is chosen, the next read is known to fail, and quiet only when its peer is
    disconnected, as over nixl."""

    def __init__(self) -> None:
        super().__init__()
        self.dooms = False
        self.failing: dict[TransferId, PeerId] = {}

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, quiescence=Quiescence.AFTER_DISCONNECT)

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if self.dooms:
            self.dooms, self.failing[transfer] = False, peer
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        found = super().poll(transfers)
        return [
            self._status(self.failing[transfer]) if transfer in self.failing else status
            for transfer, status in zip(transfers, found, strict=True)
        ]

    def _status(self, peer: PeerId) -> Status:
        gone = peer in self.disconnected
        return Status(
            state=State.FAILED if gone else State.FAILING, error=TransportError("no such memory")
        )


def test_a_fingerprint_whose_read_fails_leaves_none_on_a_connection_that_others_use() -> None:
    """It would be polled for ever, and keep its word of the scratch memory."""
    clock, driver = Clock(), Dooming()
    with (
        engine("prefill", ticket_key=KEY) as prefill,
        engine("decode", transport=lambda: driver, clock=clock) as decode,
        relaying(prefill, OTHER) as relay,
    ):
        genuine = prefill.serve("p-1", [1, 2], 8)
        loads(decode, "d-1", genuine)
        made_up = proved(replace(genuine, proof=None, port=relay.port), OTHER)
        driver.dooms = True
        assert "no such memory" in str(failure(decode, "d-2", made_up, [5, 6]))
        eventually(lambda: bool(driver.disconnected), "nothing less ends the read")
        clock.skip(1.0)
        loads(decode, "d-3", prefill.serve("p-2", [1, 2], 8))


def test_the_header_stands_before_the_slots_and_is_nobody_s_slot() -> None:
    table = SlotTable(3)
    table.write_fingerprint(bytes(range(FINGERPRINT_BYTES)))
    assert [table[slot] for slot in range(len(table))] == [0, 0, 0]
    assert table.header.end == table.region.address
    assert table.region.nbytes == 8 * 3


# Where the engine is.


@contextmanager
def trap() -> Iterator[socket.socket]:
    """A listener that must not be asked."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.setblocking(False)
        yield made


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        port: int = made.getsockname()[1]
        return port


def routed(ticket: Ticket, port: int, host: str = "127.0.0.1") -> Ticket:
    """As a router that rewrites the address leaves it."""
    return replace(ticket, routed=(host, port))


def test_the_producers_own_address_is_asked_and_not_the_routers() -> None:
    with (
        engine("prefill", ticket_key=KEY) as prefill,
        engine("decode") as decode,
        trap() as trapped,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        loads(decode, "d-1", routed(ticket, trapped.getsockname()[1]))
        with pytest.raises(BlockingIOError):
            trapped.accept()


@contextmanager
def nobody() -> Iterator[int]:
    yield free_port()


@contextmanager
def namesake() -> Iterator[int]:
    """Another engine of the same name listens where this host's loopback address leads."""
    with engine("prefill", ticket_key=OTHER) as other:
        yield other.server.port


@contextmanager
def somebody_else() -> Iterator[int]:
    with engine("other", ticket_key=OTHER) as other:
        yield other.server.port


@pytest.mark.parametrize("there", [nobody, namesake, somebody_else])
def test_the_routers_address_is_asked_where_the_own_does_not_answer_for_the_engine(
    there: Callable[[], Any],
) -> None:
    with (
        engine("prefill", ticket_key=KEY) as prefill,
        engine("decode") as decode,
        there() as port,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        moved = proved(replace(ticket, proof=None, port=port), KEY)
        loads(decode, "d-1", routed(moved, prefill.server.port))


def test_the_two_addresses_share_the_time_of_a_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is silent leaves half of it."""
    asked: list[tuple[str, float]] = []

    def fetching(call: Dialer, *_: object) -> Any:
        asked.append((call.host, call.timeout))
        raise HandshakeError(f"{call.host} is silent")

    with engine("prefill", ticket_key=KEY) as prefill, engine("decode") as decode:
        monkeypatch.setattr("kvferry.core.endpoint.handshakes.fetching", fetching)
        ticket = routed(prefill.serve("p-1", [1, 2], 8), 1, "router")
        failure(decode, "d-1", ticket, [5, 6])
        [(first, half), (second, rest)] = asked
        assert (first, second) == ("127.0.0.1", "router")
        assert half <= EndpointOptions().handshake_timeout / 2
        assert half < rest <= EndpointOptions().handshake_timeout


def test_the_error_names_both_addresses() -> None:
    with engine("prefill", ticket_key=KEY) as prefill, engine("decode") as decode:
        ticket = prefill.serve("p-1", [1, 2], 8)
        ports = free_port(), free_port()
        moved = proved(replace(ticket, proof=None, port=ports[0]), KEY)
        error: KVFerryError = failure(decode, "d-1", routed(moved, ports[1]), [5, 6])
        assert [port for port in ports if f"port {port}" not in str(error)] == []


def test_a_proof_does_not_cover_the_routers_address() -> None:
    with engine("prefill", ticket_key=KEY) as prefill:
        ticket = prefill.serve("p-1", [1, 2], 8)
        assert said(ticket) == said(routed(ticket, 1))
