"""Access control: endpoints connect only to the engines and networks that they list."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import AdmissionError, KVFerryError
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.security import Access, Networks, generate
from tests.core.endpoint.engines import Engine

PREFILL, DECODE, STRANGER = generate(), generate(), generate()
SERVES = Access(own=PREFILL, peers=frozenset({DECODE.public}))
READS = Access(
    own=DECODE,
    peers=frozenset({PREFILL.public}),
    networks=Networks.of(["127.0.0.1"]),
)


def failure(decode: Engine, request: str, ticket: Ticket) -> KVFerryError:
    decode.pull(request, ticket, [2])
    [error] = decode.outcome(request).failed.values()
    return error


def test_engines_that_list_each_other_exchange_pages(prefill: Engine) -> None:
    options = EndpointOptions(access=READS)
    with Engine("decode", options=options) as decode:
        with prefill.side_channel(access=SERVES) as server:
            ticket = replace(prefill.serve("p-1", [1], 4), port=server.port, key=PREFILL.public)
            assert decode.load("d-1", ticket, [2]) is None
        prefill.released("p-1")


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
def test_a_forged_ticket_fails_alone_and_its_address_is_not_connected_to(
    prefill: Engine, changes: dict[str, object], complaint: str
) -> None:
    """A genuine ticket of the same engine and address works afterwards."""
    options = EndpointOptions(access=READS)
    with (
        Engine("decode", options=options) as decode,
        prefill.side_channel(access=SERVES) as server,
        socket.create_server(("127.0.0.2", server.port)) as other_host,
    ):
        other_host.setblocking(False)
        ticket = replace(prefill.serve("p-1", [1], 4), port=server.port, key=PREFILL.public)
        forged = replace(ticket, **changes)  # type: ignore[arg-type]
        error = failure(decode, "d-1", forged)
        assert isinstance(error, AdmissionError)
        assert complaint in str(error)
        with pytest.raises(BlockingIOError):
            other_host.accept()
        assert decode.load("d-2", ticket, [3]) is None


def test_an_engine_without_the_secret_key_of_the_ticket_is_refused() -> None:
    """An unlisted engine answers on the port that the ticket names."""
    options = EndpointOptions(access=READS, handshake_timeout=60.0)
    with Engine("prefill") as prefill, Engine("decode", options=options) as decode:
        impostor = Access(own=STRANGER, peers=frozenset({DECODE.public}))
        with prefill.side_channel(access=impostor) as server:
            ticket = replace(prefill.serve("p-1", [1], 4), port=server.port, key=PREFILL.public)
            error = failure(decode, "d-1", ticket)
    assert "does not have the secret key" in str(error)
