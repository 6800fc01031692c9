"""Proofs of tickets: forged tickets are refused without any effect on the producer."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.endpoint.hold_server import SlotTable
from kvferry.core.errors import (
    HandshakeError,
    KVFerryError,
    TicketError,
    TicketReason,
    TransportError,
)
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import region_of
from kvferry.core.security import TicketKey
from kvferry.core.security.ticket_proof import FINGERPRINT_BYTES
from kvferry.core.side_channel.dialer import Dialer
from kvferry.core.side_channel_messages import Payloads
from kvferry.core.transport import Quiescence
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing.engines import CacheShape, proved
from tests.core.endpoint.engines import Clock, Engine, RecordingTransport, eventually
from tests.core.endpoint.transports import PENDING, ScriptedTransport, failing
from tests.core.messages import altered, said

KEY, OTHER_KEY = TicketKey(), TicketKey()


@pytest.fixture
def prefill(producer_transport: RecordingTransport) -> Iterator[Engine]:
    with Engine("prefill", ticket_key=KEY, transport=lambda: producer_transport) as engine:
        yield engine


@pytest.fixture
def decode(driver: ScriptedTransport, clock: Clock) -> Iterator[Engine]:
    with Engine("decode", transport=lambda: driver, clock=clock) as engine:
        yield engine


def fingerprint_address(prefill: Engine, rank: int = 0) -> int:
    found = prefill.ranks[rank].endpoint.payload.fingerprint
    assert found is not None
    return found.address


def failure(decode: Engine, request: str, ticket: Ticket) -> KVFerryError:
    error = decode.load(request, ticket, [5, 6])
    assert error is not None
    return error


def loads(decode: Engine, request: str, ticket: Ticket) -> None:
    assert decode.load(request, ticket, [3, 4]) is None


def releases(producer_transport: RecordingTransport) -> list[int]:
    """Return how many releases each notification has, of those about holds."""
    payloads = [each.payload for each in producer_transport.received]
    return [each.count(b"release") for each in payloads if b"heartbeat" not in each]


def proved_by_another_key(ticket: Ticket) -> Ticket:
    return proved(replace(ticket, proof=None), OTHER_KEY)


def with_next_blocks(ticket: Ticket) -> Ticket:
    return altered(ticket, pages=tuple(tuple(page + 1 for page in ids) for ids in ticket.pages))


FORGERIES: list[Callable[[Ticket], Ticket]] = [
    with_next_blocks,
    lambda ticket: altered(ticket, pages=((*ticket.pages[0], 9),)),  # a page that none covers
    lambda ticket: altered(ticket, hold=Hold(slot=ticket.hold.slot, generation=7)),
    proved_by_another_key,
    lambda ticket: replace(ticket, proof=None),
]


def test_the_fingerprint_is_read_once_before_the_first_load(
    prefill: Engine, decode: Engine, driver: ScriptedTransport
) -> None:
    for index in range(3):
        loads(decode, f"d-{index}", prefill.serve(f"p-{index}", [1, 2], 8))
        prefill.released(f"p-{index}")
    words = [fingerprint_address(prefill), fingerprint_address(prefill) + 8]
    assert [read for read in driver.addresses if set(read) & set(words)] == [words]
    assert driver.addresses[0] == words


@pytest.mark.parametrize("connected", [False, True])
def test_a_forged_ticket_causes_no_connection_renewal_read_done_or_abandon(
    prefill: Engine,
    decode: Engine,
    driver: ScriptedTransport,
    producer_transport: RecordingTransport,
    connected: bool,
) -> None:
    """The genuine ticket of the same hold works afterwards."""
    if connected:
        loads(decode, "d-0", prefill.serve("p-0", [10, 11], 8))
        prefill.released("p-0")
        producer_transport.received.clear()
        driver.addresses.clear()
    ticket = prefill.serve("p-1", [1, 2], 8)
    for number, forge in enumerate(FORGERIES):
        forged = forge(ticket)
        decode.prepare(forged)
        decode.pull(f"forged {number}, nothing", forged, [], nothing=True)
        error = failure(decode, f"forged {number}", forged)
        assert isinstance(error, TicketError)
        assert error.reason is TicketReason.PROOF
    assert driver.addresses == []
    loads(decode, "d-2", ticket)
    prefill.released("p-1")
    # The genuine ticket's release comes after anything sent for the forged ones.
    assert releases(producer_transport) == [1]


def test_a_forged_ticket_does_not_end_the_renewal_of_the_hold_that_it_names(
    prefill: Engine, decode: Engine, producer_transport: RecordingTransport
) -> None:
    """The requests with the forged and with the genuine ticket wait at the same time."""
    ticket = prefill.serve("p-1", [1, 2], 8)
    decode.prepare(with_next_blocks(ticket))
    decode.prepare(ticket)
    eventually(lambda: bool(releases(producer_transport)), "the genuine ticket is renewed")
    assert isinstance(failure(decode, "d-1", with_next_blocks(ticket)), TicketError)
    loads(decode, "d-2", ticket)


def test_a_ticket_with_a_key_of_an_engine_without_one_is_refused(decode: Engine) -> None:
    """Without a key it is accepted, as an older build's."""
    with Engine("prefill") as prefill:
        ticket = prefill.serve("p-1", [1, 2], 8)
        error = failure(decode, "d-1", proved(ticket, OTHER_KEY))
        assert isinstance(error, TicketError)
        assert "publishes none" in str(error)
        loads(decode, "d-2", ticket)


# Relays.


@contextlib.contextmanager
def serve_relay(prefill: Engine) -> Iterator[Callable[[Ticket], Ticket]]:
    """Serve an engine's payloads under another ticket key; yield what proves tickets by that."""
    with prefill.side_channel(ticket_key=OTHER_KEY.public) as server:
        yield lambda ticket: proved_by_another_key(replace(ticket, port=server.port))


def test_an_engine_that_relays_the_payloads_of_another_is_refused(
    decode: Engine, driver: ScriptedTransport, producer_transport: RecordingTransport
) -> None:
    drivers = iter([producer_transport, LoopbackTransport()])
    shape = CacheShape(tp=2)
    with (
        Engine("prefill", shape, ticket_key=KEY, transport=lambda: next(drivers)) as prefill,
        serve_relay(prefill) as relayed,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        error = failure(decode, "d-1", relayed(replace(ticket, pages=((2, 3),))))
        assert type(error) is HandshakeError
        assert "answers with the payloads of another" in str(error)
        first_words = [fingerprint_address(prefill, rank) for rank in range(2)]
        headers = {address + word for address in first_words for word in (0, 8)}
        assert {address for read in driver.addresses for address in read} <= headers
        assert producer_transport.received == []
        loads(decode, "d-2", ticket)


def test_a_fingerprint_read_that_times_out_fails_only_that_load(
    prefill: Engine, decode: Engine, driver: ScriptedTransport, clock: Clock
) -> None:
    driver.statuses[0] = PENDING
    decode.pull("d-1", prefill.serve("p-1", [1, 2], 8), [5, 6])
    eventually(lambda: bool(driver.pages), "the fingerprint is being read")
    clock.skip(EndpointOptions().handshake_timeout + 1.0)
    error = decode.error("d-1")
    assert "the fingerprint of engine 'prefill' was not read within 10 s" in str(error)
    eventually(lambda: bool(driver.disconnected), "the peer is disconnected")
    clock.skip(1.0)  # the wait after a failed handshake
    loads(decode, "d-2", prefill.serve("p-2", [1, 2], 8))


def test_a_failing_fingerprint_read_is_ended_by_a_disconnect(prefill: Engine, clock: Clock) -> None:
    """Otherwise it would be polled forever, and keep its scratch word."""
    driver = ScriptedTransport(quiescence=Quiescence.AFTER_DISCONNECT)
    with (
        Engine("decode", transport=lambda: driver, clock=clock) as decode,
        serve_relay(prefill) as relayed,
    ):
        ticket = prefill.serve("p-1", [1, 2], 8)
        loads(decode, "d-1", ticket)
        driver.statuses[len(driver.pages)] = failing(TransportError("no such memory"))
        assert "no such memory" in str(failure(decode, "d-2", relayed(ticket)))
        eventually(lambda: bool(driver.disconnected), "the peer is disconnected")
        clock.skip(1.0)
        loads(decode, "d-3", prefill.serve("p-2", [1, 2], 8))


def test_the_fingerprint_lies_before_the_slots_of_the_table() -> None:
    table = SlotTable(3)
    table.write_fingerprint(bytes(range(FINGERPRINT_BYTES)))
    assert table.words.tolist() == [0, 0, 0]
    assert region_of(table.header).end == region_of(table.words).address
    assert region_of(table.words).nbytes == 8 * 3


# The producer's own address, and the router's.


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        port: int = made.getsockname()[1]
        return port


def routed(ticket: Ticket, port: int, host: str = "127.0.0.1") -> Ticket:
    """Return the ticket as a router leaves it that rewrites the address."""
    return replace(ticket, routed=(host, port))


def from_port(prefill: Engine, port: int) -> Ticket:
    ticket = prefill.serve("p-1", [1, 2], 8)
    return proved(replace(ticket, proof=None, port=port), KEY)


def test_the_producers_own_address_is_tried_before_the_routers(
    prefill: Engine, decode: Engine
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        unused.setblocking(False)
        loads(decode, "d-1", routed(prefill.serve("p-1", [1, 2], 8), unused.getsockname()[1]))
        with pytest.raises(BlockingIOError):
            unused.accept()


@pytest.mark.parametrize("name", [None, "prefill", "other"])
def test_the_routers_address_is_tried_if_the_own_address_is_not_the_engine(
    prefill: Engine, decode: Engine, name: str | None
) -> None:
    """Nobody listens there, or another engine, as on another host's loopback address."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        if name is not None:
            port = stack.enter_context(Engine(name, ticket_key=OTHER_KEY)).server.port
        loads(decode, "d-1", routed(from_port(prefill, port), prefill.server.port))


def test_the_two_addresses_share_the_timeout_of_a_handshake(
    prefill: Engine, decode: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first address may take half of it."""
    asked: list[tuple[str, float]] = []

    async def silent(call: Dialer, *_: object) -> Payloads:
        asked.append((call.host, call.timeout))
        raise HandshakeError(f"{call.host} is silent")

    monkeypatch.setattr("kvferry.core.directory.handshake.payloads", silent)
    failure(decode, "d-1", routed(prefill.serve("p-1", [1, 2], 8), 1, "router"))
    [(first, half), (second, rest)] = asked
    assert (first, second) == ("127.0.0.1", "router")
    assert half <= EndpointOptions().handshake_timeout / 2
    assert half < rest <= EndpointOptions().handshake_timeout


def test_the_error_names_both_addresses(prefill: Engine, decode: Engine) -> None:
    ports = free_port(), free_port()
    error = failure(decode, "d-1", routed(from_port(prefill, ports[0]), ports[1]))
    assert [port for port in ports if f"port {port}" not in str(error)] == []


def test_a_proof_does_not_cover_the_routers_address(prefill: Engine) -> None:
    ticket = prefill.serve("p-1", [1, 2], 8)
    assert said(ticket) == said(routed(ticket, 1))
