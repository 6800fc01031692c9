"""Two engines meet over real sockets: what is served, what is refused, and what cannot kill it."""

from __future__ import annotations

import gc
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core import messages as wire
from kvferry.core.errors import HandshakeError, IncompatibleError
from kvferry.core.handshake import (
    Compatibility,
    HandshakeServer,
    Judgements,
    agree,
    engine_info,
    fetch,
    ping,
)
from kvferry.core.handshake.sockets import Context, Socket
from kvferry.core.memory import Region
from kvferry.core.security import TicketKey
from tests.core.messages import encoded, payload

LONG = 60.0
"""Seconds; a deadline for what is expected to happen."""
RANKS = [payload(0), payload(1)]


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback address")


@pytest.fixture
def server() -> Iterator[HandshakeServer]:
    with HandshakeServer(encoded(*RANKS), engine="prefill", incarnation=7) as running:
        yield running


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as made:
        yield made


def still_serves(server: HandshakeServer) -> bool:
    return list(fetch(server.host, server.port, "prefill", timeout=LONG).ranks) == RANKS


def dealer(context: Context, server: HandshakeServer, **options: int) -> Socket:
    made: Socket = context.socket(zmq.DEALER)
    made.linger = 0
    made.rcvtimeo = int(LONG * 1e3)
    for name, value in options.items():
        made.setsockopt(getattr(zmq, name), value)
    made.connect(f"tcp://{server.host}:{server.port}")
    return made


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# What is served.


def test_one_request_gives_the_payloads_of_all_ranks(server: HandshakeServer) -> None:
    info = fetch(server.host, server.port, "prefill", timeout=LONG)
    assert (info.engine, info.incarnation, list(info.ranks)) == ("prefill", 7, RANKS)


def test_the_key_of_tickets_is_published() -> None:
    ranks = [payload(fingerprint=Region(address=1 << 22, nbytes=16))]
    key = TicketKey().public
    with HandshakeServer(
        encoded(*ranks), engine="prefill", incarnation=7, ticket_key=key
    ) as server:
        info = fetch("127.0.0.1", server.port, "prefill", timeout=LONG)
    assert (info.ticket_key, info.ranks) == (key, tuple(ranks))


def test_a_ping_tells_the_incarnation(server: HandshakeServer) -> None:
    assert ping(server.host, server.port, "prefill", timeout=LONG) == 7


def test_a_req_socket_is_answered_too(server: HandshakeServer, context: Context) -> None:
    with context.socket(zmq.REQ) as asker:
        asker.linger = 0
        asker.rcvtimeo = int(LONG * 1e3)
        asker.connect(f"tcp://{server.host}:{server.port}")
        asker.send(wire.encode(wire.Ping(engine="prefill")))
        assert wire.decode_reply(asker.recv()) == wire.Pong(incarnation=7)


def test_many_clients_at_once_are_all_answered(server: HandshakeServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: still_serves(server), range(40)))


def test_a_context_of_the_callers_is_used(server: HandshakeServer, context: Context) -> None:
    info = fetch(server.host, server.port, "prefill", timeout=LONG, context=context)
    assert list(info.ranks) == RANKS


def test_a_large_answer_arrives_whole() -> None:
    ranks = [payload(rank, address=os.urandom(400_000)) for rank in range(20)]
    with HandshakeServer(encoded(*ranks), engine="prefill", incarnation=7) as server:
        info = fetch(server.host, server.port, "prefill", timeout=LONG)
    assert list(info.ranks) == ranks


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_with_and_without_brackets(host: str) -> None:
    with HandshakeServer(encoded(*RANKS), engine="prefill", incarnation=7, host=host) as server:
        assert server.host == "::1"
        assert still_serves(server)
        assert list(fetch(host, server.port, "prefill", timeout=LONG).ranks) == RANKS


@pytest.mark.parametrize("bound", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_name_with_several_addresses_leads_to_the_one_that_listens(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo

    def both(name: str, *args: int, **options: int) -> list[object]:
        names = ["::1", "127.0.0.1"] if name == "prefill.test" else [name]
        return [entry for name in names for entry in resolve(name, *args, **options)]

    with HandshakeServer(encoded(*RANKS), engine="prefill", incarnation=7, host=bound) as server:
        monkeypatch.setattr(socket, "getaddrinfo", both)
        assert list(fetch("prefill.test", server.port, "prefill", timeout=LONG).ranks) == RANKS


# What is refused.


def test_another_engine_is_refused_with_both_ids(server: HandshakeServer) -> None:
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
    with dealer(context, server) as channel:
        reason = refusal(
            channel, wire.encode(wire.PayloadRequest(oldest=8, newest=9, engine="prefill"))
        )
    assert "versions 8 to 9" in reason
    assert "this build 1 to 1" in reason
    assert still_serves(server)


@pytest.mark.parametrize(
    "frames",
    [
        (b"garbage",),
        (b"",),
        (b"", b""),
        (b"\xff" * wire.MAX_REQUEST_BYTES,),
        (wire.encode(wire.Ping(engine="prefill"))[:-1],),
        (wire.encode(wire.Pong(incarnation=7)),),
        (msgspec.msgpack.encode({"type": "shutdown", "engine": "prefill"}),),
        (b"junk", wire.encode(wire.Ping(engine="prefill"))),
        (b"", b"", wire.encode(wire.Ping(engine="prefill"))),
        (b"",) * 5000,
    ],
)
def test_what_is_no_request_is_refused_and_the_next_one_served(
    server: HandshakeServer, context: Context, frames: tuple[bytes, ...]
) -> None:
    with dealer(context, server) as channel:
        assert refusal(channel, *frames)
        assert ask(channel, wire.encode(wire.Ping(engine="prefill"))) == wire.Pong(incarnation=7)
    assert still_serves(server)


def test_an_oversized_request_ends_its_own_connection_only(
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


@settings(max_examples=60)
@given(noise=st.binary(max_size=300), greeted=st.booleans())
def test_raw_bytes_cannot_kill_it(noise: bytes, greeted: bool) -> None:
    """Bytes on the bare TCP connection, also in the middle of ZMQ's own handshake."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    server = shared_server()
    with closing(socket.create_connection((server.host, server.port), LONG)) as raw:
        raw.sendall((greeting if greeted else b"") + noise)
    assert ping(server.host, server.port, "prefill", timeout=LONG) == 7


_shared: list[HandshakeServer] = []


def shared_server() -> HandshakeServer:
    """One for all examples of a Hypothesis test: it has to survive them all."""
    if not _shared:
        _shared.append(HandshakeServer(encoded(*RANKS), engine="prefill", incarnation=7))
    return _shared[0]


@pytest.fixture(autouse=True, scope="module")
def _close_shared() -> Iterator[None]:
    yield
    while _shared:
        _shared.pop().close()


@settings(max_examples=60)
@given(frames=st.lists(st.binary(max_size=100), min_size=1, max_size=5))
def test_any_frames_are_answered_with_a_refusal(frames: list[bytes]) -> None:
    with zmq.Context() as context, dealer(context, shared_server()) as channel:
        assert refusal(channel, *frames)


def test_clients_that_stop_in_the_middle_hold_nobody_up(server: HandshakeServer) -> None:
    silent = [socket.create_connection((server.host, server.port), LONG) for _ in range(20)]
    try:
        for client in silent[::2]:
            client.sendall(b"\xff" + bytes(8))
        assert still_serves(server)
    finally:
        for client in silent:
            client.close()


def test_a_client_that_never_reads_holds_nobody_up(context: Context) -> None:
    """It asks for far more than all buffers between the two can take."""
    ranks = [payload(rank, address=bytes([rank]) * 500_000) for rank in range(10)]
    with HandshakeServer(encoded(*ranks), engine="prefill", incarnation=7) as server:
        question = wire.encode(wire.PayloadRequest(oldest=1, newest=1, engine="prefill"))
        with dealer(context, server, RCVHWM=1, SNDHWM=2000) as greedy:
            for _ in range(1000):
                greedy.send(question)
            assert len(fetch(server.host, server.port, "prefill", timeout=LONG).ranks) == 10
            assert len(greedy.recv_multipart()[-1]) > 4 << 20


# Where it cannot listen.


def test_a_port_in_use_is_named_with_its_setting(server: HandshakeServer) -> None:
    with pytest.raises(HandshakeError, match=rf"port {server.port}: .* in use. Set side_channel_p"):
        HandshakeServer(encoded(*RANKS), engine="prefill", incarnation=7, port=server.port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", ""])
def test_an_address_that_no_peer_can_use_is_refused(host: str) -> None:
    with pytest.raises(HandshakeError, match="set side_channel_host"):
        HandshakeServer(encoded(*RANKS), engine="prefill", incarnation=7, host=host)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a" * 300, "\0"])
def test_a_host_that_is_not_this_one_is_named_with_its_setting(host: str) -> None:
    with pytest.raises(HandshakeError, match=r"[sS]et side_channel_host"):
        HandshakeServer(encoded(*RANKS), engine="prefill", incarnation=7, host=host)


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(HandshakeError, match="70000 is not in 0 to 65535"):
        HandshakeServer(encoded(*RANKS), engine="prefill", incarnation=7, port=70000)


def test_payloads_of_another_engine_are_not_served() -> None:
    with pytest.raises(HandshakeError, match="'prefill', incarnation 7, for the side channel of"):
        HandshakeServer(encoded(*RANKS), engine="decode", incarnation=7)


# How it ends.


def test_close_frees_the_port_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    server = HandshakeServer(encoded(*RANKS), engine="prefill", incarnation=7)
    with socket.create_connection((server.host, server.port), LONG):
        server.close()
    server.close()
    assert set(threading.enumerate()) == before
    with HandshakeServer(encoded(*RANKS), engine="prefill", incarnation=7, port=server.port) as two:
        assert still_serves(two)


def test_calls_leave_no_descriptors_behind(server: HandshakeServer, context: Context) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    for _ in range(5):
        fetch(server.host, server.port, "prefill", timeout=LONG, context=context)
    before = descriptors()
    for _ in range(50):
        fetch(server.host, server.port, "prefill", timeout=LONG, context=context)
    assert descriptors() < before + 25  # sockets are reaped a little later


def test_a_process_that_forgets_to_close_it_ends() -> None:
    program = (
        "from kvferry.core.handshake import HandshakeServer, ping\n"
        "from tests.core.messages import encoded, payload\n"
        "s = HandshakeServer(encoded(payload()), engine='prefill', incarnation=7)\n"
        "print(ping(s.host, s.port, 'prefill', timeout=60))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")


# What a client says when it gets no good answer.


def test_nobody_listens() -> None:
    with pytest.raises(HandshakeError) as caught:
        fetch("127.0.0.1", free_port(), "prefill", timeout=LONG)
    text = str(caught.value)
    assert "engine 'prefill' at 127.0.0.1 port" in text
    assert "nobody listens there" in text
    assert "127.0.0.1 is a loopback address" in text
    assert "set side_channel_host there" in text


@pytest.mark.parametrize("host", ["", "0.0.0.0", "no-such-host.invalid", "\0", "\udc80", "a..b"])
def test_a_ticket_with_a_host_that_is_none(host: str) -> None:
    with pytest.raises(HandshakeError, match="set side_channel_host"):
        fetch(host, 4242, "prefill", timeout=LONG)


def test_a_listener_that_does_not_answer_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(HandshakeError) as caught:
        fetch("127.0.0.1", mute.getsockname()[1], "prefill", timeout=0.05)
    assert "did not answer within 0.05 s" in str(caught.value)


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100), b""])
def test_a_listener_that_is_something_else_is_said_to_be_one(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        stop = threading.Event()
        thread = threading.Thread(target=greet, args=(listener, greeting, stop))
        thread.start()
        try:
            with pytest.raises(HandshakeError, match="no side channel of kvferry"):
                fetch("127.0.0.1", port, "prefill", timeout=LONG)
        finally:
            stop.set()
            thread.join()


def test_an_engine_that_ends_while_it_is_asked_is_known_at_once(context: Context) -> None:
    with ThreadPoolExecutor(1) as pool, context.socket(zmq.ROUTER) as dying:
        dying.rcvtimeo = int(LONG * 1e3)
        port = dying.bind_to_random_port("tcp://127.0.0.1")
        asked = pool.submit(fetch, "127.0.0.1", port, "prefill", timeout=LONG)
        dying.recv_multipart()
        dying.close(0)
        with pytest.raises(HandshakeError, match="closed without an answer"):
            asked.result()


def greet(listener: socket.socket, greeting: bytes, stop: threading.Event) -> None:
    """Take connections, say something, hang up."""
    while not stop.is_set():
        if select.select([listener], [], [], 0.05)[0]:
            client, _ = listener.accept()
            client.sendall(greeting)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
            client.close()


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ([b"nonsense"], HandshakeError, "not a reply of this protocol"),
        ([wire.encode(wire.Pong(incarnation=7))], HandshakeError, "answered with a Pong"),
        (
            [wire.encode(wire.Refusal(reason="on holiday"))],
            HandshakeError,
            "refused: on holiday",
        ),
        (
            [wire.encode(wire.Payloads(ranks=[b"x"]))],
            HandshakeError,
            "rank 0: not a payload of this protocol",
        ),
        (
            [wire.encode(wire.Payloads(ranks=encoded(payload(engine="other"))))],
            HandshakeError,
            "the ranks of engine 'other'",
        ),
        (
            [wire.encode(wire.Payloads(ranks=encoded(payload()), ticket_key=bytes(32)))],
            HandshakeError,
            "rank 0 does not say where its fingerprint is",
        ),
        (
            [wire.encode(wire.Payloads(ranks=encoded(payload(oldest=8, newest=9))))],
            IncompatibleError,
            "versions 8 to 9, this build 1 to 1",
        ),
    ],
)
def test_a_bad_answer_is_an_error_that_names_it(
    context: Context, answer: list[bytes], error: type[HandshakeError], words: str
) -> None:
    with context.socket(zmq.ROUTER) as impostor:
        impostor.linger = 0
        impostor.rcvtimeo = int(LONG * 1e3)
        port = impostor.bind_to_random_port("tcp://127.0.0.1")

        def reply() -> None:
            routing_id, *_ = impostor.recv_multipart()
            impostor.send_multipart([routing_id, *answer])

        thread = threading.Thread(target=reply)
        thread.start()
        try:
            with pytest.raises(error, match=words):
                fetch("127.0.0.1", port, "prefill", timeout=LONG)
        finally:
            thread.join()


# What the ranks of one engine must have in common.


def in_groups(rank: int, count: int) -> wire.RankPayload:
    """A rank with so many groups."""
    one = payload(rank)
    layout = replace(one.layout, groups=one.layout.groups * count)
    return msgspec.structs.replace(one, layout=layout)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([payload(1), payload(0)], "payload 0 of 2 is that of rank 1"),
        ([payload(0), payload(0, tp=1)], "payload 1 of 2 is that of rank 0"),
        ([payload(0, tp=3), payload(1, tp=3)], "ranks 0 and 1 both stand at"),
        (
            [payload(0), payload(1, address=payload(0).address)],
            "ranks 0 and 1 publish one transport address; every rank",
        ),
        ([payload(0), payload(1, engine="decode")], "engine 'prefill', rank 1 'decode'"),
        ([payload(0), payload(1, incarnation=8)], "incarnation 7, rank 1 8"),
        ([payload(0), in_groups(1, 2)], "rank 0 has 1 groups, rank 1 2"),
        ([in_groups(0, 2), payload(1)], "rank 0 has 2 groups, rank 1 1"),
        ([payload(0), payload(1, driver="nixl")], "driver 'loopback', rank 1 'nixl'"),
        ([payload(0), payload(1, agreement={"model": "big"})], "model 'tiny', rank 1 'big'"),
        ([], "payloads of 0 ranks"),
    ],
)
def test_payloads_that_are_not_those_of_one_engine(
    ranks: list[wire.RankPayload], words: str
) -> None:
    with pytest.raises(HandshakeError, match=words):
        engine_info(encoded(*ranks))


# What two engines must have in common.


def test_equal_engines_agree_on_the_newest_common_version() -> None:
    agreed = agree(payload(oldest=1, newest=3), payload(engine="decode", oldest=2, newest=9))
    assert agreed == Compatibility(version=3)


def test_every_difference_is_named_with_both_values() -> None:
    mine = payload(2, agreement={"model": "a", "dtype": "bf16", "same": "x"})
    theirs = payload(
        1,
        engine="decode",
        oldest=2,
        newest=3,
        driver="nixl",
        agreement={"model": "b", "dtype": "fp8", "same": "x"},
    )
    with pytest.raises(IncompatibleError) as caught:
        agree(mine, theirs)
    text = str(caught.value)
    for words in (
        "engine 'prefill' (rank 2)",
        "engine 'decode' (rank 1)",
        "protocol versions: '1 to 1' here, '2 to 3' there",
        "driver: 'loopback' here, 'nixl' there",
        "model: 'a' here, 'b' there",
        "dtype: 'bf16' here, 'fp8' there",
    ):
        assert words in text
    assert "same" not in text


def test_a_key_that_one_side_does_not_know_is_no_difference() -> None:
    for mine, theirs in (({"model": "a", "new": "x"}, {}), ({}, {"model": "a"})):
        assert agree(payload(agreement=mine), payload(agreement=theirs)) == Compatibility(version=1)


MODEL = Judgements(keys=frozenset({"model"}))
OVERRIDDEN = Judgements(keys=frozenset({"model"}), overridden=True)


def test_a_judgement_is_refused_with_the_way_to_override_it() -> None:
    with pytest.raises(IncompatibleError, match="set enforce_handshake_compat to false"):
        agree(payload(agreement={"model": "a"}), payload(agreement={"model": "b"}), MODEL)


def test_an_overridden_judgement_is_told_with_both_values() -> None:
    mine, theirs = (payload(agreement={"model": m, "dtype": "x"}) for m in "ab")
    assert agree(mine, theirs, OVERRIDDEN).overridden == ("model: 'a' here, 'b' there",)
    assert agree(mine, mine, OVERRIDDEN) == Compatibility(version=1)


@pytest.mark.parametrize("judgements", [MODEL, OVERRIDDEN])
@pytest.mark.parametrize(
    "theirs",
    [
        payload(agreement={"model": "b", "dtype": "y"}),
        payload(agreement={"model": "b"}, driver="nixl"),
        payload(agreement={"model": "b"}, oldest=2, newest=2),
    ],
    ids=["agreement", "driver", "version"],
)
def test_a_fact_is_never_overridden(judgements: Judgements, theirs: wire.RankPayload) -> None:
    with pytest.raises(IncompatibleError) as caught:
        agree(payload(agreement={"model": "a", "dtype": "x"}), theirs, judgements)
    assert "enforce_handshake_compat" not in str(caught.value)
    assert ("model" in str(caught.value)) is not judgements.overridden


def test_a_peers_long_words_are_shortened() -> None:
    with pytest.raises(IncompatibleError) as caught:
        agree(payload(agreement={"model": "a"}), payload(agreement={"model": "b" * 4000}))
    assert len(str(caught.value)) < 600
