"""Proofs of tickets: forged tickets are refused without any effect on the producer."""

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
from kvferry.core.handshake.poller import Steps
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.security import TicketKey
from kvferry.core.security.proof import FINGERPRINT_BYTES, fingerprint
from kvferry.core.side_channel_messages import Payloads, encode
from kvferry.core.transport import Capabilities, PeerId, Quiescence, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing.engines import CacheShape, proved
from tests.core.endpoint.engines import Clock, Engine, RecordingTransport, eventually
from tests.core.ticket_proofs import altered, said

KEY, OTHER_KEY = TicketKey(), TicketKey()


class ReadRecorder(LoopbackTransport):
    """A transport that records the remote addresses of every read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[list[int]] = []

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        self.reads.append([int(address) for address in copies.remote])
        return super().read(peer, copies, notify)


def fingerprint_address(prefill: Engine, rank: int = 0) -> int:
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


def about_holds(producer_transport: RecordingTransport) -> list[bytes]:
    """Return the notifications about holds, that is all but heartbeats."""
    return [
        notification.payload
        for notification in producer_transport.received
        if b"heartbeat" not in notification.payload
    ]


def without_proof(ticket: Ticket) -> Ticket:
    return replace(ticket, proof=None)


def with_next_blocks(ticket: Ticket) -> Ticket:
    return altered(ticket, pages=tuple(tuple(page + 1 for page in ids) for ids in ticket.pages))


def with_one_more_block(ticket: Ticket) -> Ticket:
    """Return a client's own ticket with a page that no ticket covers."""
    return altered(ticket, pages=((*ticket.pages[0], 9),))


def with_another_hold(ticket: Ticket) -> Ticket:
    return altered(ticket, hold=Hold(slot=ticket.hold.slot, generation=7))


def proved_by_another_key(ticket: Ticket) -> Ticket:
    return proved(replace(ticket, proof=None), OTHER_KEY)


FORGERIES: list[Callable[[Ticket], Ticket]] = [
    with_next_blocks,
    with_one_more_block,
    with_another_hold,
    proved_by_another_key,
    without_proof,
]


def test_the_fingerprint_is_read_once_before_the_first_load() -> None:
    driver = ReadRecorder()
    with (
        Engine("prefill", ticket_key=KEY) as prefill,
        Engine("decode", transport=lambda: driver) as decode,
    ):
        for index in range(3):
            ticket = prefill.serve(f"p-{index}", [1, 2], 8)
            loads(decode, f"d-{index}", ticket)
            prefill.released(f"p-{index}")
        words = [fingerprint_address(prefill), fingerprint_address(prefill) + 8]
        assert [read for read in driver.reads if set(read) & set(words)] == [words]
        assert driver.reads[0] == words


@pytest.mark.parametrize("forge", FORGERIES)
@pytest.mark.parametrize("is_prepared", [True, False], ids=["prepared", "at once"])
@pytest.mark.parametrize("is_known", [True, False], ids=["connected", "unknown"])
def test_a_forged_ticket_causes_no_renewal_read_done_or_abandon(
    forge: Callable[[Ticket], Ticket], is_prepared: bool, is_known: bool
) -> None:
    """Nor a connection. The genuine ticket of the same hold works afterwards."""
    producer_transport, driver = RecordingTransport(), ReadRecorder()
    with (
        Engine("prefill", ticket_key=KEY, transport=lambda: producer_transport) as prefill,
        Engine("decode", transport=lambda: driver) as decode,
    ):
        if is_known:
            loads(decode, "d-0", prefill.serve("p-0", [10, 11], 8), [7, 8])
            prefill.released("p-0")
            producer_transport.received.clear()
            driver.reads.clear()
        ticket = prefill.serve("p-1", [1, 2], 8)
        forged = forge(ticket)
        if is_prepared:
            decode.prepare(forged)
        error = failure(decode, "d-1", forged, [5, 6])
        assert isinstance(error, TicketError)
        assert error.reason is TicketReason.PROOF
        assert driver.reads == []
        loads(decode, "d-2", ticket)
        prefill.released("p-1")
        # The genuine ticket's release comes after anything sent for the forged one.
        [payload] = about_holds(producer_transport)
        assert payload.count(b"release") == 1


@pytest.mark.parametrize("forge", FORGERIES)
def test_a_request_that_needs_nothing_sends_nothing_for_a_forged_ticket(
    forge: Callable[[Ticket], Ticket],
) -> None:
    """For a genuine ticket "done" is sent, since all pages are in the prefix cache."""
    producer_transport = RecordingTransport()
    with (
        Engine("prefill", ticket_key=KEY, transport=lambda: producer_transport) as prefill,
        Engine("decode") as decode,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.pull("d-1", forge(ticket), [], nothing=True)
        loads(decode, "d-2", ticket)
        prefill.released("p-1")
        assert [payload.count(b"release") for payload in about_holds(producer_transport)] == [1]


def test_a_forged_ticket_does_not_end_the_renewal_of_the_hold_that_it_names() -> None:
    """The requests with the forged and with the genuine ticket wait at the same time."""
    producer_transport = RecordingTransport()
    with (
        Engine("prefill", ticket_key=KEY, transport=lambda: producer_transport) as prefill,
        Engine("decode") as decode,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.prepare(with_next_blocks(ticket))
        decode.prepare(ticket)
        eventually(lambda: bool(about_holds(producer_transport)), "the genuine ticket is renewed")
        assert isinstance(failure(decode, "d-1", with_next_blocks(ticket), [5, 6]), TicketError)
        loads(decode, "d-2", ticket)


def test_a_ticket_with_a_key_of_an_engine_without_one_is_refused() -> None:
    """Without a key it is accepted, as an older build's."""
    with Engine("prefill") as prefill, Engine("decode") as decode:
        ticket = prefill.serve("p-1", [1, 2], 8)
        error = failure(decode, "d-1", proved(ticket, OTHER_KEY), [5, 6])
        assert isinstance(error, TicketError)
        assert "publishes none" in str(error)
        loads(decode, "d-2", ticket)


def test_a_ticket_of_an_earlier_incarnation_is_refused_before_connecting() -> None:
    """At that point the engine's workers may not know its key yet."""
    driver = ReadRecorder()
    with Engine("prefill", ticket_key=OTHER_KEY) as earlier:
        old = earlier.serve("p-1", [1, 2], 8)
    with (
        Engine("prefill", ticket_key=KEY) as prefill,
        Engine("decode", transport=lambda: driver) as decode,
    ):
        ticket = replace(old, port=prefill.server.port)
        decode.prepare(ticket)
        error = failure(decode, "d-1", ticket, [5, 6])
        assert isinstance(error, TicketError)
        assert error.reason is TicketReason.RESTARTED
        assert driver.reads == []


def test_every_rank_refuses_a_forged_ticket() -> None:
    with (
        Engine("prefill", CacheShape(tp=2), ticket_key=KEY) as prefill,
        Engine("decode", CacheShape(tp=2)) as decode,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.pull("d-1", with_next_blocks(ticket), [5, 6])
        for rank in decode.ranks:
            eventually(lambda rank=rank: not rank.endpoint.pending, "every rank reports")  # type: ignore[misc]
            assert rank.endpoint.results().failed
        loads(decode, "d-2", ticket)
        prefill.released("p-1")


# Relays.


@contextmanager
def serve_relay(
    prefill: Engine, key: TicketKey, change: dict[str, Any] | None = None
) -> Iterator[HandshakeServer]:
    """Serve an engine's payloads under another ticket key."""
    payloads = [msgspec.msgpack.decode(encode(rank.endpoint.payload)) for rank in prefill.ranks]
    with HandshakeServer(
        [msgspec.msgpack.encode(one | (change or {})) for one in payloads],
        engine=prefill.name,
        incarnation=prefill.incarnation,
        ticket_key=key.public,
    ) as server:
        yield server


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_relays_the_payloads_of_another_is_refused(ranks: int) -> None:
    producer_transport, driver = RecordingTransport(), ReadRecorder()
    drivers = iter([producer_transport, LoopbackTransport()])
    with (
        Engine(
            "prefill", CacheShape(tp=ranks), ticket_key=KEY, transport=lambda: next(drivers)
        ) as prefill,
        Engine("decode", transport=lambda: driver) as decode,
        serve_relay(prefill, OTHER_KEY) as relay,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        forged = proved(
            replace(ticket, proof=None, port=relay.port, pages=((2, 3),)),
            OTHER_KEY,
        )
        error = failure(decode, "d-1", forged, [5, 6])
        assert type(error) is HandshakeError
        assert "answers with the payloads of another" in str(error)
        assert fingerprint(KEY.public).hex() in str(error)
        headers = {
            fingerprint_address(prefill, rank) + 8 * index
            for rank in range(ranks)
            for index in (0, 1)
        }
        assert {address for read in driver.reads for address in read} <= headers
        assert producer_transport.received == []
        loads(decode, "d-2", ticket)


def test_a_payload_without_a_fingerprint_is_refused_under_a_ticket_key() -> None:
    with Engine("prefill", ticket_key=KEY) as prefill:
        payload = msgspec.structs.replace(prefill.ranks[0].endpoint.payload, fingerprint=None)
        with pytest.raises(HandshakeError, match="rank 0 does not say where its fingerprint is"):
            engine_info([encode(payload)], OTHER_KEY.public)
        assert engine_info([encode(payload)]).ticket_key == b""


class SilentReadsTransport(LoopbackTransport):
    """A transport whose first reads do not end until their peer is disconnected."""

    def __init__(self, reads_to_silence: int) -> None:
        super().__init__()
        self.reads_to_silence = reads_to_silence
        self.silenced: dict[TransferId, PeerId] = {}
        self.disconnected: set[PeerId] = set()

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if self.reads_to_silence:
            self.reads_to_silence -= 1
            self.silenced[transfer] = peer
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        found = super().poll(transfers)
        return [
            Status(state=State.PENDING)
            if transfer in self.silenced and self.silenced[transfer] not in self.disconnected
            else status
            for transfer, status in zip(transfers, found, strict=True)
        ]

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        self.disconnected.add(peer)


def test_a_fingerprint_read_that_times_out_fails_only_that_load() -> None:
    clock, driver = Clock(), SilentReadsTransport(1)
    with (
        Engine("prefill", ticket_key=KEY) as prefill,
        Engine("decode", transport=lambda: driver, clock=clock) as decode,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        decode.pull("d-1", ticket, [5, 6])
        eventually(lambda: driver.reads_to_silence == 0, "the fingerprint is being read")
        clock.skip(EndpointOptions().handshake_timeout + 1.0)
        [error] = decode.outcome("d-1").failed.values()
        assert "the fingerprint of engine 'prefill' was not read within 10 s" in str(error)
        eventually(lambda: bool(driver.disconnected), "the peer is disconnected")
        clock.skip(1.0)  # the wait after a failed handshake
        loads(decode, "d-2", prefill.serve("p-2", [1, 2], 8))


class RaisingReadTransport(LoopbackTransport):
    """A transport whose first ``read`` raises."""

    has_raised = False

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        if not self.has_raised:
            self.has_raised = True
            raise RuntimeError("a bug of the driver's")
        return super().read(peer, copies, notify)


def test_a_fingerprint_read_that_raises_fails_only_that_load() -> None:
    clock = Clock()
    with (
        Engine("prefill", ticket_key=KEY) as prefill,
        Engine("decode", transport=RaisingReadTransport, clock=clock) as decode,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        assert "a bug of the driver's" in str(failure(decode, "d-1", ticket, [5, 6]))
        clock.skip(1.0)
        loads(decode, "d-2", ticket)


class FailingReadTransport(RecordingTransport):
    """A transport whose next read is ``FAILING`` until its peer is disconnected, as with nixl."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_next_read = False
        self.failing: dict[TransferId, PeerId] = {}

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, quiescence=Quiescence.AFTER_DISCONNECT)

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if self.fails_next_read:
            self.fails_next_read, self.failing[transfer] = False, peer
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        found = super().poll(transfers)
        return [
            self._status(self.failing[transfer]) if transfer in self.failing else status
            for transfer, status in zip(transfers, found, strict=True)
        ]

    def _status(self, peer: PeerId) -> Status:
        disconnected = peer in self.disconnected
        return Status(
            state=State.FAILED if disconnected else State.FAILING,
            error=TransportError("no such memory"),
        )


def test_a_failing_fingerprint_read_is_ended_by_a_disconnect() -> None:
    """Otherwise it would be polled forever, and keep its scratch word."""
    clock, driver = Clock(), FailingReadTransport()
    with (
        Engine("prefill", ticket_key=KEY) as prefill,
        Engine("decode", transport=lambda: driver, clock=clock) as decode,
        serve_relay(prefill, OTHER_KEY) as relay,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        loads(decode, "d-1", ticket)
        forged = proved(replace(ticket, proof=None, port=relay.port), OTHER_KEY)
        driver.fails_next_read = True
        assert "no such memory" in str(failure(decode, "d-2", forged, [5, 6]))
        eventually(lambda: bool(driver.disconnected), "the peer is disconnected")
        clock.skip(1.0)
        loads(decode, "d-3", prefill.serve("p-2", [1, 2], 8))


def test_the_fingerprint_lies_before_the_slots_of_the_table() -> None:
    table = SlotTable(3)
    table.write_fingerprint(bytes(range(FINGERPRINT_BYTES)))
    assert [table[slot] for slot in range(len(table))] == [0, 0, 0]
    assert table.header.end == table.region.address
    assert table.region.nbytes == 8 * 3


# The producer's own address, and the router's.


@contextmanager
def unused_listener() -> Iterator[socket.socket]:
    """Yield a listener that is not to be connected to."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.setblocking(False)
        yield made


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        port: int = made.getsockname()[1]
        return port


def routed(ticket: Ticket, port: int, host: str = "127.0.0.1") -> Ticket:
    """Return the ticket as a router leaves it that rewrites the address."""
    return replace(ticket, routed=(host, port))


def test_the_producers_own_address_is_tried_before_the_routers() -> None:
    with (
        Engine("prefill", ticket_key=KEY) as prefill,
        Engine("decode") as decode,
        unused_listener() as listener,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        loads(decode, "d-1", routed(ticket, listener.getsockname()[1]))
        with pytest.raises(BlockingIOError):
            listener.accept()


@contextmanager
def no_listener() -> Iterator[int]:
    yield free_port()


@contextmanager
def engine_of_same_name() -> Iterator[int]:
    """Run another engine of the same name, as on another host's loopback address."""
    with Engine("prefill", ticket_key=OTHER_KEY) as other:
        yield other.server.port


@contextmanager
def engine_of_another_name() -> Iterator[int]:
    with Engine("other", ticket_key=OTHER_KEY) as other:
        yield other.server.port


@pytest.mark.parametrize(
    "make_listener", [no_listener, engine_of_same_name, engine_of_another_name]
)
def test_the_routers_address_is_tried_if_the_own_address_is_not_the_engine(
    make_listener: Callable[[], Any],
) -> None:
    with (
        Engine("prefill", ticket_key=KEY) as prefill,
        Engine("decode") as decode,
        make_listener() as port,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        ticket_elsewhere = proved(replace(ticket, proof=None, port=port), KEY)
        loads(decode, "d-1", routed(ticket_elsewhere, prefill.server.port))


def test_the_two_addresses_share_the_timeout_of_a_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first address may take half of it."""
    asked: list[tuple[str, float]] = []

    def silent(call: Dialer, *_: object) -> Steps[Payloads]:
        asked.append((call.host, call.timeout))
        yield from ()
        raise HandshakeError(f"{call.host} is silent")

    with Engine("prefill", ticket_key=KEY) as prefill, Engine("decode") as decode:
        monkeypatch.setattr("kvferry.core.directory.handshake_queue.payloads", silent)
        ticket = routed(prefill.serve("p-1", [1, 2], 8), 1, "router")
        failure(decode, "d-1", ticket, [5, 6])
        [(first, half), (second, rest)] = asked
        assert (first, second) == ("127.0.0.1", "router")
        assert half <= EndpointOptions().handshake_timeout / 2
        assert half < rest <= EndpointOptions().handshake_timeout


def test_the_error_names_both_addresses() -> None:
    with Engine("prefill", ticket_key=KEY) as prefill, Engine("decode") as decode:
        ticket = prefill.serve("p-1", [1, 2], 8)
        ports = free_port(), free_port()
        ticket_elsewhere = proved(replace(ticket, proof=None, port=ports[0]), KEY)
        error: KVFerryError = failure(decode, "d-1", routed(ticket_elsewhere, ports[1]), [5, 6])
        assert [port for port in ports if f"port {port}" not in str(error)] == []


def test_a_proof_does_not_cover_the_routers_address() -> None:
    with Engine("prefill", ticket_key=KEY) as prefill:
        ticket = prefill.serve("p-1", [1, 2], 8)
        assert said(ticket) == said(routed(ticket, 1))
