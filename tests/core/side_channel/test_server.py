"""The server of the side channel, over real sockets: replies, refusals and hostile clients."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import msgspec
import pytest
import zmq

from kvferry.core import side_channel_messages as wire
from kvferry.core.errors import HandshakeError, RefusedError
from kvferry.core.security import OPEN, Access, TicketKey, generate
from kvferry.core.side_channel.client import fetch, ping
from kvferry.core.side_channel.connection import revoke
from kvferry.core.side_channel.connection_limits import ConnectionLimits
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel.sockets import Context, Socket
from tests.core.messages import payload
from tests.core.side_channel.servers import (
    LONG,
    RANKS,
    fetched,
    patient,
    serve,
    still_serves,
)
from tests.own_host import OWN_HOST


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback address")


def dealer(context: Context, server: HandshakeServer, **options: int) -> Socket:
    created = patient(context, zmq.DEALER)
    for name, value in options.items():
        created.setsockopt(getattr(zmq, name), value)
    created.connect(f"tcp://{server.host}:{server.port}")
    return created


# What is served.


def test_the_ticket_key_is_published() -> None:
    rank, key = payload(), TicketKey().public
    with serve(rank, ticket_key=key) as server:
        info = fetched(server)
    assert (info.ticket_key, info.ranks) == (key, (rank,))


def test_a_req_socket_is_answered(server: HandshakeServer, context: Context) -> None:
    with patient(context, zmq.REQ) as asker:
        asker.connect(f"tcp://{server.host}:{server.port}")
        asker.send(wire.encode(wire.Ping(engine="prefill")))
        assert wire.decode_reply(asker.recv()) == wire.Pong(incarnation=7)


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_addresses_work_with_and_without_brackets(host: str) -> None:
    with serve(host=host) as server:
        assert server.host == "::1"
        assert still_serves(server)
        assert fetch(host, server.port, "prefill", timeout=LONG).ranks == RANKS


@pytest.mark.parametrize("bound", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_of_several_addresses_of_a_name_the_one_that_listens_is_used(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo

    def both(name: str, *args: int, **options: int) -> list[object]:
        names = ["::1", "127.0.0.1"] if name == "prefill.test" else [name]
        return [entry for name in names for entry in resolve(name, *args, **options)]

    with serve(host=bound) as server:
        monkeypatch.setattr(socket, "getaddrinfo", both)
        assert fetch("prefill.test", server.port, "prefill", timeout=LONG).ranks == RANKS


# What is refused.


def test_a_request_for_another_engine_is_refused_with_both_names(server: HandshakeServer) -> None:
    with pytest.raises(HandshakeError, match=r"'old' is not here: this is engine 'prefill'"):
        fetch(server.host, server.port, "old", timeout=LONG)
    with pytest.raises(HandshakeError, match="'old' is not here"):
        ping(server.host, server.port, "old", timeout=LONG)
    assert still_serves(server)


def ask(channel: Socket, *frames: bytes) -> wire.Reply:
    channel.send_multipart(frames)
    return wire.decode_reply(channel.recv_multipart()[-1])


def refusal(channel: Socket, *frames: bytes) -> str:
    reply = ask(channel, *frames)
    assert isinstance(reply, wire.Refusal)
    return reply.reason


def test_unknown_versions_are_refused_with_both_ranges(
    server: HandshakeServer, context: Context
) -> None:
    ask_newer = wire.PayloadRequest(oldest=8, newest=9, engine="prefill")
    with dealer(context, server) as channel:
        reason = refusal(channel, wire.encode(ask_newer))
    assert "versions 8 to 9" in reason
    assert "this build 1 to 1" in reason
    assert still_serves(server)


def test_an_invalid_request_is_refused_and_the_next_one_served(
    server: HandshakeServer, context: Context
) -> None:
    """More of them are in ``tests/faults/test_fuzz.py``."""
    ping = wire.encode(wire.Ping(engine="prefill"))
    invalid = [
        (b"garbage",),
        (b"",),
        (b"", b""),
        (b"\xff" * wire.MAX_REQUEST_BYTES,),
        (ping[:-1],),
        (wire.encode(wire.Pong(incarnation=7)),),
        (msgspec.msgpack.encode({"type": "shutdown", "engine": "prefill"}),),
        (b"junk", ping),
        (b"", b"", ping),
        (b"", ping, b"junk"),
        (b"",) * 5000,
    ]
    with dealer(context, server) as channel:
        for frames in invalid:
            assert refusal(channel, *frames)
            assert ask(channel, ping) == wire.Pong(incarnation=7)
    assert still_serves(server)


def test_a_request_that_fails_ends_only_itself(context: Context) -> None:
    """Whatever was wrong with it, the thread serves on."""
    problems = iter([["slow"]])  # a second call raises
    with serve(problems=problems.__next__) as server, dealer(context, server) as channel:
        ask_health = wire.encode(wire.Health(engine="prefill"))
        assert isinstance(ask(channel, ask_health), wire.Condition)
        channel.send(ask_health)
        assert ask(channel, wire.encode(wire.Ping(engine="prefill"))) == wire.Pong(incarnation=7)


def test_an_oversized_request_ends_only_its_own_connection(
    server: HandshakeServer, context: Context
) -> None:
    with dealer(context, server, RECONNECT_IVL=-1) as channel:
        monitor = channel.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        monitor.rcvtimeo = int(LONG * 1e3)
        channel.send(bytes(wire.MAX_REQUEST_BYTES + 1))
        monitor.recv_multipart()
        channel.disable_monitor()
        monitor.close(0)
    assert still_serves(server)


def test_a_client_that_never_reads_delays_no_others(context: Context) -> None:
    """It requests far more than all buffers can hold."""
    ranks = [payload(rank, address=bytes([rank]) * 500_000) for rank in range(10)]
    with serve(*ranks) as server:
        question = wire.encode(wire.PayloadRequest(oldest=1, newest=1, engine="prefill"))
        with dealer(context, server, RCVHWM=1, SNDHWM=2000) as slow_reader:
            for _ in range(1000):
                slow_reader.send(question)
            assert len(fetched(server).ranks) == 10
            assert len(slow_reader.recv_multipart()[-1]) > 4 << 20


# Holds end by request.


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("here", [False, True])
def test_holds_end_for_who_has_a_key_or_is_here(
    keyed: bool, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    hosts: list[str] = []

    def revokes(conversations: bool) -> int:
        asked.append(conversations)
        return 3

    def is_here(numeric: str) -> bool:
        hosts.append(numeric)
        return here

    monkeypatch.setattr("kvferry.core.side_channel.server.is_here", is_here)
    one, other = generate(), generate()
    theirs = Access(own=one, peers=frozenset({other.public})) if keyed else OPEN
    ours = Access(own=other, peers=frozenset({one.public})) if keyed else OPEN
    with serve(access=theirs, revoke=revokes) as server:
        ask = partial(
            revoke, server.host, server.port, timeout=LONG, access=ours, key=theirs.public
        )
        if keyed or here:
            assert ask() == wire.Revoked(engine="prefill", incarnation=7, tickets=3)
            assert ask(conversations=True).tickets == 3
        else:
            with pytest.raises(
                RefusedError, match=r"127\.0\.0\.1 is not on .*set curve_secret_key"
            ):
                ask()
    assert asked == ([False, True] if keyed or here else [])
    assert set(hosts) == (set() if keyed else {"127.0.0.1"})


def test_holds_do_not_end_where_a_descriptor_is_another_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ConnectionLimits, "address", lambda *_: "127.0.0.9")
    with (
        serve(revoke=lambda _: 3) as server,
        pytest.raises(RefusedError, match=r"127\.0\.0\.9 is not on the engine's host"),
    ):
        revoke(server.host, server.port, timeout=LONG)


def test_holds_do_not_end_where_nobody_can_end_them(server: HandshakeServer) -> None:
    with pytest.raises(RefusedError, match="'prefill' does not end its holds by request"):
        revoke(server.host, server.port, timeout=LONG)


# Close.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"host": host}, "[sS]et side_channel_host")
            for host in ("0.0.0.0", "[::]", "", "192.0.2.1", "no-such-host.invalid", "\0")
        ),
        ({"port": 70000}, "70000 is not in 0 to 65535"),
        ({"incarnation": 8}, "'prefill', incarnation 7, for the side channel of"),
    ],
)
def test_what_cannot_be_served_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(HandshakeError, match=message):
        serve(**options)


def test_a_port_in_use_is_refused_with_its_setting(server: HandshakeServer) -> None:
    with pytest.raises(HandshakeError, match=rf"port {server.port}: .* in use. Set side_channel_p"):
        serve(port=server.port)


def test_a_port_that_this_user_may_not_use_is_refused_with_its_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bind = zmq.Socket.bind

    def restricted(channel: Socket, address: str) -> object:
        if address.startswith("tcp:"):
            raise zmq.ZMQError(errno.EACCES)
        return bind(channel, address)

    monkeypatch.setattr(zmq.Socket, "bind", restricted)
    with pytest.raises(HandshakeError, match="Set side_channel_port to 1024 or above"):
        serve(port=80)


def test_close_frees_the_port_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    server = serve(host=OWN_HOST)
    with socket.create_connection((server.host, server.port), LONG):
        server.close()
    server.close()
    assert set(threading.enumerate()) <= before
    with serve(host=OWN_HOST, port=server.port) as two:
        assert still_serves(two)


def test_a_process_ends_without_closing_the_server() -> None:
    program = (
        "from tests.core.side_channel.servers import pinged, serve\n"
        "server = serve()\n"
        "print(pinged(server))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")
