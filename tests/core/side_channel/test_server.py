"""The server of the side channel, over real sockets: replies, refusals and hostile clients."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import threading
from functools import partial
from typing import Any
from unittest.mock import Mock, call

import msgspec
import pytest
import zmq

from kvferry.core import side_channel_messages as wire
from kvferry.core.errors import HandshakeError, RefusedError
from kvferry.core.security import OPEN, Access, generate
from kvferry.core.side_channel.connection import revoke
from kvferry.core.side_channel.connection_limits import ConnectionLimits
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel.sockets import Context, Socket
from tests.core.messages import payload
from tests.core.side_channel.servers import LONG, fetched, patient, serve, still_serves
from tests.own_host import OWN_HOST


def dealer(context: Context, server: HandshakeServer, **options: int) -> Socket:
    created = patient(context, zmq.DEALER)
    for name, value in options.items():
        created.setsockopt(getattr(zmq, name), value)
    created.connect(f"tcp://{server.host}:{server.port}")
    return created


def ask(channel: Socket, *frames: bytes) -> wire.Reply:
    channel.send_multipart(frames)
    return wire.decode_reply(channel.recv_multipart()[-1])


# What is refused.

PING = wire.encode(wire.Ping(engine="prefill"))


def test_an_invalid_request_is_refused_and_the_next_one_served(
    server: HandshakeServer, context: Context
) -> None:
    """More of them are in ``tests/faults/test_fuzz.py``."""
    newer = wire.PayloadRequest(oldest=8, newest=9, engine="prefill")
    invalid: list[tuple[tuple[bytes, ...], str]] = [
        *(((each,), "not a request") for each in (b"garbage", b"", PING[:-1])),
        ((b"", b""), "not a request"),
        ((b"\xff" * wire.MAX_REQUEST_BYTES,), "speaks protocol versions 1 to 1"),
        ((wire.encode(wire.Pong(incarnation=7)),), "not a request"),
        ((msgspec.msgpack.encode({"type": "shutdown", "engine": "prefill"}),), "shutdown"),
        ((wire.encode(newer),), "versions 8 to 9, this build 1 to 1"),
        ((wire.encode(wire.Ping(engine="old")),), "'old' is not here: this is engine 'prefill'"),
        ((b"junk", PING), "a request is one frame"),
        ((b"", b"", PING), "a request is one frame"),
        ((b"", PING, b"junk"), "a request is one frame"),
        ((b"",) * 5000, "a request is one frame"),
    ]
    with dealer(context, server) as channel:
        for frames, text in invalid:
            refusal = ask(channel, *frames)
            assert isinstance(refusal, wire.Refusal)
            assert text in refusal.reason
            assert ask(channel, PING) == wire.Pong(incarnation=7)
    assert still_serves(server)


def test_a_request_that_fails_ends_only_itself(context: Context) -> None:
    problems = iter([["slow"]])  # a second call raises
    with serve(problems=problems.__next__) as server, dealer(context, server) as channel:
        ask_health = wire.encode(wire.Health(engine="prefill"))
        assert isinstance(ask(channel, ask_health), wire.Condition)
        channel.send(ask_health)
        assert ask(channel, PING) == wire.Pong(incarnation=7)


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

ONE, OTHER = generate(), generate()
KEYED = Access(own=ONE, peers=frozenset({OTHER.public}))


@pytest.mark.parametrize(
    ("access", "here", "peer", "refused"),
    [
        (KEYED, False, "127.0.0.1", ""),
        (OPEN, True, "127.0.0.1", ""),
        (OPEN, False, "127.0.0.1", r"127\.0\.0\.1 is not on .*set curve_secret_key"),
        # The descriptor is another connection's.
        (OPEN, True, "127.0.0.9", r"127\.0\.0\.9 is not on the engine's host"),
    ],
    ids=["with a key", "from here", "from elsewhere", "from two addresses"],
)
def test_holds_end_for_who_has_a_key_or_is_here(
    access: Access, here: bool, peer: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.core.side_channel.server.is_here", lambda _: here)
    monkeypatch.setattr(ConnectionLimits, "address", lambda *_: peer)
    ours = Access(own=OTHER, peers=frozenset({ONE.public})) if access is KEYED else OPEN
    revokes = Mock(return_value=3)
    with serve(access=access, revoke=revokes) as server:
        ask = partial(revoke, server.host, server.port, timeout=LONG, access=ours)
        if refused:
            with pytest.raises(RefusedError, match=refused):
                ask()
        else:
            revoked = wire.Revoked(engine="prefill", incarnation=7, tickets=3)
            assert ask(key=access.public) == revoked
            assert ask(key=access.public, conversations=True) == revoked
    assert revokes.mock_calls == ([] if refused else [call(False), call(True)])


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
        "from tests.core.side_channel.servers import pinged, serve; server = serve(); "
        "print(pinged(server))"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")
