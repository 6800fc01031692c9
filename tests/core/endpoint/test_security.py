"""Which engines are read from: keys, networks, proofs of tickets, fingerprints, and addresses."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import (
    AdmissionError,
    HandshakeError,
    KVFerryError,
    TicketError,
    TicketReason,
    TransportError,
)
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.security import Access, Networks, TicketKey, generate
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


@pytest.fixture
def ticket(prefill: Engine) -> Ticket:
    return prefill.serve("p-1", [1, 2], 8)


def failure(decode: Engine, ticket: Ticket, request: str = "refused") -> KVFerryError:
    error = decode.load(request, ticket, [5, 6])
    assert error is not None
    return error


def loads(decode: Engine, ticket: Ticket, request: str = "loaded") -> None:
    assert decode.load(request, ticket, [3, 4]) is None


# Keys and networks that are listed.

PREFILL, DECODE, STRANGER = generate(), generate(), generate()
SERVES = Access(own=PREFILL, peers=frozenset({DECODE.public}))
READS = Access(own=DECODE, peers=frozenset({PREFILL.public}), networks=Networks.of(["127.0.0.1"]))
LISTED = EndpointOptions(access=READS, handshake_timeout=60.0)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        pytest.param({"key": b""}, "its tickets name no key", id="no key"),
        pytest.param({"key": STRANGER.public}, "which is not listed here", id="unlisted key"),
        pytest.param(
            {"host": "127.0.0.2"}, "in none of the networks of allowed_peers", id="other network"
        ),
    ],
)
def test_only_engines_and_networks_that_are_listed_are_connected_to(
    changes: dict[str, Any], complaint: str
) -> None:
    """A genuine ticket of the same engine and address works after a forged one."""
    with (
        Engine("prefill") as prefill,
        Engine("decode", options=LISTED) as decode,
        prefill.side_channel(access=SERVES) as server,
        socket.create_server(("127.0.0.2", server.port)) as other_host,
    ):
        other_host.setblocking(False)
        ticket = replace(prefill.serve("p-1", [1], 4), port=server.port, key=PREFILL.public)
        error = failure(decode, replace(ticket, **changes))
        assert isinstance(error, AdmissionError)
        assert complaint in str(error)
        with pytest.raises(BlockingIOError):
            other_host.accept()
        loads(decode, ticket)
        prefill.released("p-1")


# Proofs.


def header(prefill: Engine, rank: int = 0) -> list[int]:
    """Return the addresses of the words of a rank's fingerprint."""
    found = prefill.ranks[rank].endpoint.payload.fingerprint
    assert found is not None
    return [found.address, found.address + 8]


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
        loads(decode, prefill.serve("p-0", [10, 11], 8), "d-0")
        prefill.released("p-0")
        producer_transport.received.clear()
        driver.addresses.clear()
    ticket = prefill.serve("p-1", [1, 2], 8)
    for number, forge in enumerate(FORGERIES):
        forged = forge(ticket)
        decode.prepare(forged)
        decode.pull(f"forged {number}, nothing", forged, [], nothing=True)
        error = failure(decode, forged, f"forged {number}")
        assert isinstance(error, TicketError)
        assert error.reason is TicketReason.PROOF
    assert driver.addresses == []
    loads(decode, ticket)
    prefill.released("p-1")
    # The genuine ticket's release comes after anything sent for the forged ones.
    assert releases(producer_transport) == [1]


def test_a_forged_ticket_does_not_end_the_renewal_of_the_hold_that_it_names(
    ticket: Ticket, decode: Engine, producer_transport: RecordingTransport
) -> None:
    """The requests with the forged and with the genuine ticket wait at the same time."""
    decode.prepare(with_next_blocks(ticket))
    decode.prepare(ticket)
    eventually(lambda: bool(releases(producer_transport)), "the genuine ticket is renewed")
    assert isinstance(failure(decode, with_next_blocks(ticket)), TicketError)
    loads(decode, ticket)


def test_a_ticket_with_a_key_of_an_engine_without_one_is_refused(decode: Engine) -> None:
    """Without a key it is accepted, as an older build's."""
    with Engine("prefill") as prefill:
        ticket = prefill.serve("p-1", [1, 2], 8)
        error = failure(decode, proved(ticket, OTHER_KEY))
        assert isinstance(error, TicketError)
        assert "publishes none" in str(error)
        loads(decode, ticket)


# Fingerprints.


def test_the_fingerprint_is_read_once_before_the_first_load(
    prefill: Engine, decode: Engine, driver: ScriptedTransport
) -> None:
    for index in range(3):
        loads(decode, prefill.serve(f"p-{index}", [1, 2], 8), f"d-{index}")
        prefill.released(f"p-{index}")
    words = header(prefill)
    assert [read for read in driver.addresses if set(read) & set(words)] == [words]
    assert driver.addresses[0] == words


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
        error = failure(decode, relayed(replace(ticket, pages=((2, 3),))))
        assert type(error) is HandshakeError
        assert "answers with the payloads of another" in str(error)
        headers = {*header(prefill), *header(prefill, 1)}
        assert {address for read in driver.addresses for address in read} <= headers
        assert producer_transport.received == []
        loads(decode, ticket)


def test_a_fingerprint_read_that_times_out_fails_only_that_load(
    prefill: Engine, decode: Engine, driver: ScriptedTransport, clock: Clock, ticket: Ticket
) -> None:
    driver.statuses[0] = PENDING
    decode.pull("d-1", ticket, [5, 6])
    eventually(lambda: bool(driver.pages), "the fingerprint is being read")
    clock.skip(EndpointOptions().handshake_timeout + 1.0)
    error = decode.error("d-1")
    assert "the fingerprint of engine 'prefill' was not read within 10 s" in str(error)
    eventually(lambda: bool(driver.disconnected), "the peer is disconnected")
    clock.skip(1.0)  # the wait after a failed handshake
    loads(decode, prefill.serve("p-2", [1, 2], 8))


def test_a_failing_fingerprint_read_is_ended_by_a_disconnect(
    prefill: Engine, clock: Clock, ticket: Ticket
) -> None:
    """Otherwise it would be polled forever, and keep its scratch word."""
    driver = ScriptedTransport(quiescence=Quiescence.AFTER_DISCONNECT)
    with (
        Engine("decode", transport=lambda: driver, clock=clock) as decode,
        serve_relay(prefill) as relayed,
    ):
        loads(decode, ticket)
        driver.statuses[len(driver.pages)] = failing(TransportError("no such memory"))
        assert "no such memory" in str(failure(decode, relayed(ticket)))
        eventually(lambda: bool(driver.disconnected), "the peer is disconnected")
        clock.skip(1.0)
        loads(decode, prefill.serve("p-2", [1, 2], 8), "d-3")


# The producer's own address, and the router's.


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        port: int = made.getsockname()[1]
        return port


def routed(ticket: Ticket, port: int, host: str = "127.0.0.1") -> Ticket:
    """Return the ticket as a router leaves it that rewrites the address."""
    return replace(ticket, routed=(host, port))


def at_port(ticket: Ticket, port: int) -> Ticket:
    return proved(replace(ticket, proof=None, port=port), KEY)


def test_the_producers_own_address_is_tried_before_the_routers(
    ticket: Ticket, decode: Engine
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        unused.setblocking(False)
        loads(decode, routed(ticket, unused.getsockname()[1]))
        with pytest.raises(BlockingIOError):
            unused.accept()


@pytest.mark.parametrize("name", [None, "prefill", "other"])
def test_the_routers_address_is_tried_if_the_own_address_is_not_the_engine(
    prefill: Engine, decode: Engine, ticket: Ticket, name: str | None
) -> None:
    """Nobody listens there, or another engine, as on another host's loopback address."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        if name is not None:
            port = stack.enter_context(Engine(name, ticket_key=OTHER_KEY)).server.port
        loads(decode, routed(at_port(ticket, port), prefill.server.port))


def test_the_two_addresses_share_the_timeout_of_a_handshake(
    ticket: Ticket, decode: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first address may take half of it."""
    asked: list[tuple[str, float]] = []

    async def silent(call: Dialer, *_: object) -> Payloads:
        asked.append((call.host, call.timeout))
        raise HandshakeError(f"{call.host} is silent")

    monkeypatch.setattr("kvferry.core.directory.handshake.payloads", silent)
    error = failure(decode, routed(ticket, 1, "router"))
    assert all(f"{host} is silent" in str(error) for host in ("127.0.0.1", "router"))
    [(first, half), (second, rest)] = asked
    assert (first, second) == ("127.0.0.1", "router")
    assert half <= EndpointOptions().handshake_timeout / 2
    assert half < rest <= EndpointOptions().handshake_timeout


def test_a_proof_does_not_cover_the_routers_address(ticket: Ticket) -> None:
    assert said(ticket) == said(routed(ticket, 1))
