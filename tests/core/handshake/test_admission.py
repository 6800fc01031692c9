"""Who is admitted to a side channel, and what either side says of who is not."""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import zmq

from kvferry.core import messages as wire
from kvferry.core.errors import AdmissionError, HandshakeError
from kvferry.core.handshake import HandshakeServer, fetch, ping
from kvferry.core.handshake.connection import SideChannelConnection
from kvferry.core.handshake.dialer import Dialer
from kvferry.core.handshake.sockets import encrypt
from kvferry.core.security import OPEN, Access, Networks, generate
from tests.core.messages import encoded, payload

LONG = 60.0
"""Seconds; every answer here comes far sooner, and nothing waits for the end of them."""
RANKS = [payload(0), payload(1)]
PREFILL, DECODE, STRANGER = generate(), generate(), generate()
SERVES = Access(own=PREFILL, peers=frozenset({DECODE.public}))
READS = Access(own=DECODE, peers=frozenset({PREFILL.public}))


def serve(access: Access) -> HandshakeServer:
    return HandshakeServer(encoded(*RANKS), engine="prefill", incarnation=7, access=access)


def read(server: HandshakeServer, access: Access, key: bytes = PREFILL.public) -> int:
    info = fetch(server.host, server.port, "prefill", timeout=LONG, access=access, key=key)
    assert list(info.ranks) == RANKS
    return ping(server.host, server.port, "prefill", timeout=LONG, access=access, key=key)


def refusal(server: HandshakeServer, access: Access, key: bytes = PREFILL.public) -> str:
    with pytest.raises(HandshakeError) as refused:
        fetch(server.host, server.port, "prefill", timeout=LONG, access=access, key=key)
    return str(refused.value)


def test_a_listed_engine_is_served() -> None:
    with serve(SERVES) as server:
        assert read(server, READS) == 7


def test_many_are_served_at_once_while_strangers_are_refused() -> None:
    stranger = Access(own=STRANGER, peers=frozenset({PREFILL.public}))
    with serve(SERVES) as server, ThreadPoolExecutor(8) as pool:
        refused = [pool.submit(refusal, server, stranger) for _ in range(20)]
        served = [pool.submit(read, server, READS) for _ in range(20)]
        assert [each.result() for each in served] == [7] * 20
        assert all("refuses this engine's key" in each.result() for each in refused)


def test_one_key_pair_for_all_engines() -> None:
    shared = Access(own=PREFILL, peers=frozenset({PREFILL.public}))
    with serve(shared) as server:
        assert read(server, shared) == 7


def test_what_crosses_is_encrypted() -> None:
    """A stranger between the two sees neither the question nor the layouts."""
    crossed: list[bytes] = []
    with (
        serve(SERVES) as server,
        socket.create_server(("127.0.0.1", 0)) as between,
        ThreadPoolExecutor(1) as pool,
    ):
        port = between.getsockname()[1]
        asked = pool.submit(
            fetch, "127.0.0.1", port, "prefill", timeout=LONG, access=READS, key=PREFILL.public
        )
        while not asked.done():
            if select.select([between], [], [], 0.01)[0]:
                crossed += relayed(between.accept()[0], server)
        assert list(asked.result().ranks) == RANKS
    seen = b"".join(crossed)
    assert b"CURVE" in seen
    assert not [word for word in (b"layer.0/k", b"payloads", b"prefill") if word in seen]


def relayed(client: socket.socket, server: HandshakeServer) -> list[bytes]:
    """Everything that a client and the server say to each other, until one of them ends it."""
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


# Both sides say what is wrong, at once.


def test_a_key_that_is_not_listed(caplog: pytest.LogCaptureFixture) -> None:
    stranger = Access(own=STRANGER, peers=frozenset({PREFILL.public}))
    with serve(SERVES) as server, caplog.at_level(logging.WARNING):
        text = refusal(server, stranger)
        assert f"it refuses this engine's key, {STRANGER.public.hex()}" in text
        assert "add them to curve_peers and allowed_peers there" in text
        assert f"has the key {STRANGER.public.hex()}, which is not in curve_peers" in caplog.text
        assert read(server, READS) == 7


def test_a_server_that_has_another_key(caplog: pytest.LogCaptureFixture) -> None:
    misled = Access(own=DECODE, peers=frozenset({STRANGER.public}))
    with serve(SERVES) as server, caplog.at_level(logging.WARNING):
        text = refusal(server, misled, STRANGER.public)
        assert f"does not have the secret key of the public key {STRANGER.public.hex()}" in text
        assert read(server, READS) == 7
        assert "it expects another key here" in caplog.text


def test_a_client_without_keys() -> None:
    """It cannot know from a ticket that it needs some."""
    with serve(SERVES) as server:
        text = refusal(server, OPEN, b"")
        assert "its side channel is encrypted: set curve_secret_key and curve_peers here" in text
        assert read(server, READS) == 7


def test_a_server_without_keys() -> None:
    with serve(OPEN) as server:
        text = refusal(server, READS)
        assert "its side channel is open: set curve_secret_key and curve_peers on that" in text
        assert ping(server.host, server.port, "prefill", timeout=LONG) == 7


def test_a_key_that_may_not_be_asked_is_refused_before_anything_is_sent() -> None:
    with serve(SERVES) as server:
        text = refusal(server, READS, STRANGER.public)
    assert f"its key is {STRANGER.public.hex()}, which is not listed here" in text
    assert f"engine 'prefill' at 127.0.0.1 port {server.port}" in text


@contextmanager
def line(server: HandshakeServer, access: Access) -> Iterator[SideChannelConnection]:
    """A connection for more than one question."""
    call = Dialer(
        host=server.host,
        port=server.port,
        timeout=LONG,
        context=None,
        access=access,
        key=PREFILL.public,
    )
    made = SideChannelConnection(call)
    yield made
    made.close()


def test_a_connection_for_several_questions_is_encrypted_likewise() -> None:
    stranger = Access(own=STRANGER, peers=frozenset({PREFILL.public}))
    with serve(SERVES) as server:
        with line(server, READS) as admitted:
            for _ in range(3):
                assert admitted.ask(wire.Ping(engine="prefill")) == wire.Pong(incarnation=7)
        with line(server, stranger) as refused, pytest.raises(AdmissionError, match="refuses"):
            refused.ask(wire.Ping(engine="prefill"))


# By address.


@pytest.mark.parametrize("keys", [True, False])
def test_a_client_from_elsewhere_is_refused(keys: bool, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = Networks.of(["192.0.2.0/24"])
    own, peers = (SERVES.own, SERVES.peers) if keys else (None, frozenset[bytes]())
    with serve(Access(own=own, peers=peers, networks=elsewhere)) as server:
        with caplog.at_level(logging.WARNING):
            text = refusal(server, READS if keys else OPEN, PREFILL.public if keys else b"")
        assert "refuses" in text
        assert "allowed_peers" in text
        assert "127.0.0.1, is in none of the networks of allowed_peers (192.0.2.0/24)" in (
            caplog.text
        )


def test_a_client_from_an_allowed_network_is_served() -> None:
    here = Networks.of(["192.0.2.0/24", "127.0.0.0/8"])
    with serve(Access(networks=here)) as server:
        assert read(server, Access(networks=here), b"") == 7


def test_strangers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    stranger = Access(own=STRANGER, peers=frozenset({PREFILL.public}))
    with serve(SERVES) as server, caplog.at_level(logging.WARNING):
        for _ in range(5):
            refusal(server, stranger)
    assert len(caplog.records) == 1


def test_a_key_alone_is_not_enough_to_say_anything() -> None:
    """Whoever is refused has sent nothing that the server would decode."""
    with serve(SERVES) as server, zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger, raw.reconnect_ivl = 0, -1
        encrypt(raw, STRANGER)
        raw.curve_serverkey = zmq.utils.z85.encode(PREFILL.public)
        monitor = raw.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        monitor.rcvtimeo = int(LONG * 1e3)
        raw.connect(f"tcp://127.0.0.1:{server.port}")
        raw.send(wire.encode(wire.Ping(engine="prefill")))
        monitor.recv_multipart()
        assert not raw.poll(0)
        raw.disable_monitor()
        monitor.close(0)
