"""Admission to the side channel by key and network, and the messages of refusals."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace

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
ELSEWHERE = Networks.of(["192.0.2.0/24"])
NOT_IN = "127.0.0.1, is in none of the networks of allowed_peers (192.0.2.0/24)"


def read(server: HandshakeServer, access: Access, key: bytes = PREFILL.public) -> int:
    assert fetched(server, access=access, key=key).ranks == RANKS
    return pinged(server, access=access, key=key)


def refusal(server: HandshakeServer, access: Access, key: bytes = PREFILL.public) -> str:
    with pytest.raises(HandshakeError) as refused:
        fetched(server, access=access, key=key)
    return str(refused.value)


@pytest.mark.parametrize(
    ("serves", "asks", "key", "told", "logged"),
    [
        (
            SERVES,
            STRANGER,
            PREFILL.public,
            f"it refuses this engine's key, {UNLISTED.public.hex()}, or this host's address: add "
            "them to curve_peers and allowed_peers there",
            f"has the key {UNLISTED.public.hex()}, which is not in curve_peers",
        ),
        (
            SERVES,
            Access(own=DECODE, peers=frozenset({UNLISTED.public})),
            UNLISTED.public,
            f"does not have the secret key of the public key {UNLISTED.public.hex()}",
            "it expects another key here",
        ),
        (SERVES, OPEN, b"", "side channel is encrypted: set curve_secret_key and curve_peers", ""),
        (OPEN, READS, PREFILL.public, "side channel is open: set curve_secret_key and", ""),
        (replace(SERVES, networks=ELSEWHERE), READS, PREFILL.public, "it refuses", NOT_IN),
        (Access(networks=ELSEWHERE), OPEN, b"", "it refuses this host: add", NOT_IN),
    ],
    ids=["key", "server's key", "no key here", "no key there", "address with key", "address"],
)
def test_who_is_not_admitted_is_refused_and_both_sides_say_so(
    serves: Access,
    asks: Access,
    key: bytes,
    told: str,
    logged: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serve(access=serves) as server:
        for _ in range(2):
            assert told in refusal(server, asks, key)
        eventually(lambda: logged in caplog.text, "the server says so")
        assert len(caplog.records) <= 1, "refused clients cannot fill the log"
        if serves is SERVES:
            assert read(server, READS) == 7


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
