"""Admission to the side channel by key and network, and the messages of refusals."""

from __future__ import annotations

import logging
import time
from contextlib import closing

import pytest
import zmq

from kvferry.core import side_channel_messages as wire
from kvferry.core.errors import HandshakeError
from kvferry.core.security import OPEN, Access, Networks, PeerKeys, generate
from kvferry.core.side_channel.admission import ADDRESS, DOMAIN, VERSION, ZapHandler
from kvferry.core.side_channel.connection import connected
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel.sockets import Context
from kvferry.core.side_channel.tasks import call
from tests.core.endpoint.engines import eventually
from tests.core.side_channel.servers import LONG, RANKS, dialer, fetched, pinged, serve

PREFILL, DECODE, UNLISTED = generate(), generate(), generate()
SERVES = Access(own=PREFILL, peers=frozenset({DECODE.public}))
STRANGER = Access(own=UNLISTED, peers=frozenset({PREFILL.public}))
READS = Access(own=DECODE, peers=frozenset({PREFILL.public}))


def read(server: HandshakeServer, access: Access, key: bytes = PREFILL.public) -> int:
    assert fetched(server, access=access, key=key).ranks == RANKS
    return pinged(server, access=access, key=key)


def refusal(server: HandshakeServer, access: Access, key: bytes = PREFILL.public) -> str:
    with pytest.raises(HandshakeError) as refused:
        fetched(server, access=access, key=key)
    return str(refused.value)


def test_an_unlisted_key_is_refused_and_both_sides_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with serve(access=SERVES) as server, caplog.at_level(logging.WARNING):
        text = refusal(server, STRANGER)
        assert f"it refuses this engine's key, {UNLISTED.public.hex()}" in text
        assert "add them to curve_peers and allowed_peers there" in text
        assert f"has the key {UNLISTED.public.hex()}, which is not in curve_peers" in caplog.text
        refusal(server, STRANGER)
        assert len(caplog.records) == 1, "refused clients cannot fill the log"
        assert read(server, READS) == 7


def test_a_server_with_another_key_is_refused_and_both_sides_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    expects_other_key = Access(own=DECODE, peers=frozenset({UNLISTED.public}))
    with serve(access=SERVES) as server, caplog.at_level(logging.WARNING):
        text = refusal(server, expects_other_key, UNLISTED.public)
        assert f"does not have the secret key of the public key {UNLISTED.public.hex()}" in text
        assert read(server, READS) == 7
        eventually(lambda: "it expects another key here" in caplog.text, "the server says so")


@pytest.mark.parametrize(
    ("serves", "asks", "key", "text"),
    [
        (SERVES, OPEN, b"", "is encrypted: set curve_secret_key and curve_peers here"),
        (OPEN, READS, PREFILL.public, "is open: set curve_secret_key and curve_peers on that"),
    ],
    ids=["the server", "the client"],
)
def test_that_only_one_side_has_keys_is_reported(
    serves: Access, asks: Access, key: bytes, text: str
) -> None:
    with serve(access=serves) as server:
        assert f"its side channel {text}" in refusal(server, asks, key)


@pytest.mark.parametrize("keys", [True, False])
def test_a_client_from_another_network_is_refused(
    keys: bool, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = Networks.of(["192.0.2.0/24"])
    own, peers = (SERVES.own, SERVES.peers) if keys else (None, frozenset[bytes]())
    with serve(access=Access(own=own, peers=peers, networks=elsewhere)) as server:
        with caplog.at_level(logging.WARNING):
            text = refusal(server, READS if keys else OPEN, PREFILL.public if keys else b"")
        assert "refuses" in text
        assert "allowed_peers" in text
        assert "127.0.0.1, is in none of the networks of allowed_peers (192.0.2.0/24)" in (
            caplog.text
        )


@pytest.mark.parametrize(
    ("version", "credentials", "status"),
    [
        (b"1.0", (b"CURVE", DECODE.public), b"200"),
        (b"1.0", (b"CURVE", UNLISTED.public), b"400"),
        (b"1.0", (b"NULL",), b"400"),
        (b"1.0", (b"PLAIN", b"user", b"password"), b"400"),
        (b"2.0", (b"CURVE", DECODE.public), b"400"),
    ],
)
def test_what_libzmq_asks_otherwise_is_refused(
    context: Context, version: bytes, credentials: tuple[bytes, ...], status: bytes
) -> None:
    handler = ZapHandler(context, SERVES)
    with handler.socket, context.socket(zmq.REQ) as asker:
        asker.connect(ADDRESS)
        asker.send_multipart([version, b"1", DOMAIN, b"127.0.0.1", b"", *credentials])
        assert handler.socket.poll(int(LONG * 1e3))
        handler.answer()
        assert asker.recv_multipart()[:3] == [VERSION, b"1", status]


def test_a_key_that_is_removed_is_refused_also_over_connections_that_exist(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peers = PeerKeys([DECODE.public, UNLISTED.public])
    with serve(access=Access(own=PREFILL, peers=peers)) as server:
        reads = dialer(server.port, access=READS, key=PREFILL.public)
        with closing(call(connected(reads))) as connection:

            def ping_again() -> wire.Reply:
                return call(connection.ask(wire.Ping(engine="prefill"), time.monotonic() + LONG))

            assert isinstance(ping_again(), wire.Pong)
            peers.replace([UNLISTED.public])
            answer = ping_again()
            assert isinstance(answer, wire.Refusal)
            assert f"the key {DECODE.public.hex()} was removed from curve_peers" in answer.reason
            assert f"{DECODE.public.hex()} is no longer in curve_peers" in caplog.text
            assert "refuses this engine's key" in refusal(server, READS)
            peers.replace([DECODE.public])
            assert isinstance(ping_again(), wire.Pong)
            assert read(server, READS) == 7


def test_a_key_that_is_removed_from_the_clients_list_is_not_asked() -> None:
    peers = PeerKeys([PREFILL.public])
    access = Access(own=DECODE, peers=peers)
    with serve(access=SERVES) as server:
        assert read(server, access) == 7
        peers.replace([UNLISTED.public])
        text = refusal(server, access)
    assert f"its key is {PREFILL.public.hex()}, which is not listed here" in text
    assert f"engine 'prefill' at 127.0.0.1 port {server.port}" in text
