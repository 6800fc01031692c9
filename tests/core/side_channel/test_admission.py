"""Admission to the side channel by key and network, and the messages of refusals."""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import pytest
import zmq

from kvferry.core import side_channel_messages as wire
from kvferry.core.errors import HandshakeError
from kvferry.core.security import OPEN, Access, Networks, PeerKeys, generate
from kvferry.core.side_channel.admission import ADDRESS, DOMAIN, VERSION, ZapHandler
from kvferry.core.side_channel.client import fetch
from kvferry.core.side_channel.connection import connected
from kvferry.core.side_channel.dialer import Dialer
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel.sockets import Context
from kvferry.core.side_channel.tasks import call
from tests.core.endpoint.engines import eventually
from tests.core.side_channel.servers import LONG, RANKS, fetched, pinged, serve

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


def test_requests_and_replies_are_encrypted() -> None:
    """A relay between client and server sees neither the request nor the layouts."""
    crossed: list[bytes] = []
    with (
        serve(access=SERVES) as server,
        socket.create_server(("127.0.0.1", 0)) as between,
        ThreadPoolExecutor(1) as pool,
    ):
        port = between.getsockname()[1]
        asked = pool.submit(
            fetch, "127.0.0.1", port, "prefill", timeout=LONG, access=READS, key=PREFILL.public
        )
        while not asked.done():
            if select.select([between], [], [], 0.01)[0]:
                crossed += relay(between.accept()[0], server)
        assert asked.result().ranks == RANKS
    seen = b"".join(crossed)
    assert b"CURVE" in seen
    assert not [word for word in (b"layer.0/k", b"payloads", b"prefill") if word in seen]


def relay(client: socket.socket, server: HandshakeServer) -> list[bytes]:
    """Relay between a client and the server until one closes; return all bytes."""
    seen: list[bytes] = []
    with (
        client,
        socket.create_connection((server.host, server.port), LONG) as there,
        suppress(ConnectionError),
    ):
        other = {client: there, there: client}
        while b"" not in seen:
            for each in select.select([client, there], [], [], LONG)[0]:
                seen.append(each.recv(1 << 16))
                other[each].sendall(seen[-1])
    return seen


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


@contextmanager
def side_channel_connection(
    server: HandshakeServer, access: Access
) -> Iterator[Callable[[], wire.Reply]]:
    """Yield a function that pings over one connection."""
    dialer = Dialer(
        host=server.host, port=server.port, timeout=LONG, access=access, key=PREFILL.public
    )
    with closing(call(connected(dialer))) as connection:
        asking = wire.Ping(engine="prefill")
        yield lambda: call(connection.ask(asking, time.monotonic() + LONG))


# Admission by address.


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


# Keys that are added and removed while the server runs.


def test_a_key_that_is_removed_is_refused_also_over_connections_that_exist(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peers = PeerKeys([DECODE.public, UNLISTED.public])
    with (
        serve(access=Access(own=PREFILL, peers=peers)) as server,
        side_channel_connection(server, READS) as ping_again,
    ):
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
