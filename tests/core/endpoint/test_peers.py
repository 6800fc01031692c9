"""``Peers``: producers that go, return or are not used; how many are kept, and their memory."""

from __future__ import annotations

import os
import queue
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvferry.core import options
from kvferry.core.directory import EncodedReply, ProducerNews, directory
from kvferry.core.directory.pings import start_pings
from kvferry.core.endpoint import EndpointOptions, peers, reply_decoder
from kvferry.core.endpoint.reply_decoder import HandshakeResult
from kvferry.core.errors import (
    ConnectError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
    PlanError,
)
from kvferry.core.lifecycle.holds import Incarnation, RequestId
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.messages import Coordinates, RankPayload
from kvferry.core.metrics import FAILURES, LOST_PEERS, PEERS_DOWN, PEERS_UP
from kvferry.core.options import most_peers
from kvferry.core.side_channel.compatibility import Judgements
from kvferry.core.side_channel_messages import (
    Condition,
    PayloadRequest,
    Payloads,
    Pong,
    encode,
)
from kvferry.core.transport import PeerId
from tests.core.endpoint.engines import (
    Clock,
    Engine,
    MetricTotals,
    RecordingTransport,
    eventually,
    load,
    outcomes,
    pull,
)
from tests.core.endpoint.side_channels import SideChannel
from tests.core.messages import payload


def wait_for_connection(driver: RecordingTransport) -> None:
    eventually(lambda: driver.open_connections == 1, "the producer is connected")


def wait_for_end(driver: RecordingTransport) -> None:
    eventually(lambda: driver.open_connections == 0, "it is disconnected")


def reply_at(port: int, *ranks: bytes) -> EncodedReply:
    return EncodedReply(
        address=PeerKey("prefill", "127.0.0.1", port),
        incarnation=Incarnation(7),
        ranks=ranks,
        numeric="127.0.0.1",
    )


# Liveness.


@pytest.mark.parametrize("successor", [None, "prefill", "other"])
def test_a_closed_side_channel_fails_loads_and_releases_the_connection(
    prefill: Engine,
    driver: RecordingTransport,
    successor: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also if an engine takes its address, of the same name (it was restarted) or another."""
    # A closed side channel is noticed long before the next ping is due.
    options = EndpointOptions(liveness_interval=5.0, liveness_misses=3)
    with (
        Engine("decode", options=options, transport=lambda: driver) as decode,
        ExitStack() as stack,
    ):
        totals = MetricTotals(decode)
        # A load that reads nothing yet, so only a liveness check can fail it.
        decode.pull("d-1", prefill.serve_later("p-1", [1], 4), [2])
        wait_for_connection(driver)
        prefill.server.close()
        other = prefill
        if successor is not None:
            other = stack.enter_context(Engine(successor, port=prefill.server.port))
        error = decode.error("d-1")
        assert isinstance(error, PeerLostError)
        assert totals.of(FAILURES) == {("prefill", "check", "peer_lost"): 1}
        assert totals.of(LOST_PEERS) == {("prefill",): 1}
        if successor is None:
            assert totals.of(PEERS_UP) == {("0",): 0}
            assert totals.of(PEERS_DOWN) == {("0",): 1}
            assert "given up with 1 requests" in caplog.text
            assert "missed 3 of 3 pings" in str(error)
            wait_for_end(driver)
        else:
            assert any(word in str(error) for word in ("missed", "restarted", "does not serve"))
            assert decode.load("d-2", other.serve("p-1", [1], 4), [2]) is None


def test_a_side_channel_that_comes_back_in_time_is_the_same_producer(
    prefill: Engine, driver: RecordingTransport
) -> None:
    """As after a network failure that its process survives."""
    options = EndpointOptions(liveness_interval=5.0, liveness_misses=1000)
    with Engine("decode", options=options, transport=lambda: driver) as decode:
        decode.pull("d-1", prefill.serve_later("p-1", [1], 4), [2])
        wait_for_connection(driver)
        prefill.server.close()
        with prefill.side_channel(port=prefill.server.port):
            assert not decode.endpoint.wait(0.3)
            prefill.step()
            assert decode.error("d-1") is None


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (lambda: True, "missed 1 of 1 pings: it answered a ping with a Condition"),
        (lambda: 1 // 0, "it cannot be watched any more: ZeroDivisionError"),
    ],
)
def test_a_producer_that_cannot_be_watched_is_lost(wanted: Any, words: str) -> None:
    lost = queue.SimpleQueue[KVFerryError | None]()
    answer = encode(Condition(engine="prefill", incarnation=7, problems=[]))
    with SideChannel(lambda *_: answer) as channel:
        reply = reply_at(channel.port)
        options = EndpointOptions(liveness_interval=30.0, liveness_misses=1)
        start_pings(reply, options, wanted=wanted, lost=lost.put)
        assert words in str(lost.get(timeout=20))


# Producers that are unused, down, or gone.


def test_an_unused_producer_is_released_and_connected_again(
    clock: Clock, driver: RecordingTransport, producer_transport: RecordingTransport
) -> None:
    options = EndpointOptions(
        engine_ttl=100.0, load_timeout=1000.0, liveness_interval=0.05, liveness_misses=1000
    )
    with (
        Engine("prefill", transport=lambda: producer_transport, clock=clock) as prefill,
        Engine("decode", options=options, transport=lambda: driver, clock=clock) as decode,
    ):
        assert load(prefill, decode, 1) is None
        clock.skip(90.0)
        assert load(prefill, decode, 2) is None
        assert driver.disconnected == set()
        prefill.released("p-2")  # so that later notifications are renewals
        clock.skip(90.0)
        waiting = prefill.serve("p-3", [1], 4)
        producer_transport.received.clear()
        decode.prepare(waiting)
        eventually(lambda: bool(producer_transport.received), "the hold is renewed")
        clock.skip(20.0)
        assert decode.load("d-3", waiting, [2]) is None
        assert driver.disconnected == set()
        decode.directory.end(waiting.request)  # which was prepared
        clock.skip(100.0)
        wait_for_end(driver)
        assert load(prefill, decode, 4) is None


def test_engines_that_are_down_are_counted_and_forgotten(
    prefill: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is down, for the longest, is also forgotten where there are many."""
    monkeypatch.setattr(peers, "MAX_DOWN", 2)
    with Engine("decode", options=EndpointOptions(engine_ttl=600.0), clock=clock) as decode:
        totals, ticket = MetricTotals(decode), prefill.serve("p-1", [1], 4)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        for number, name in enumerate("abac"):
            assert decode.load(f"d-{number}", replace(ticket, engine=name, port=port), [2])
            clock.skip(100.0)
        assert totals.of(PEERS_DOWN) == {("0",): 2}
        clock.skip(401.0)
        eventually(lambda: totals.of(PEERS_DOWN) == {("0",): 1}, "the last but one is forgotten")
        assert decode.load("d-5", ticket, [2]) is None
        assert totals.of(PEERS_DOWN) == {("0",): 1}
        assert totals.of(PEERS_UP) == {("0",): 1}


def test_a_producer_that_the_directory_lets_go_stays_connected_while_it_is_used(
    prefill: Engine, driver: RecordingTransport
) -> None:
    with Engine("decode", transport=lambda: driver) as decode:
        ticket = prefill.serve_later("p-1", [1])
        decode.pull("d-1", ticket, [2])
        wait_for_connection(driver)
        let_go = ProducerNews(gone=((PeerKey.of(ticket), ticket.incarnation, None),))
        decode.endpoint.relay(let_go)
        prefill.step()
        assert decode.error("d-1") is None
        wait_for_end(driver)


def test_a_producer_that_goes_while_it_is_connected_is_disconnected(prefill: Engine) -> None:
    begun, released = threading.Event(), threading.Event()

    class Slow(RecordingTransport):
        def connect(self, address: bytes) -> PeerId:
            begun.set()
            assert released.wait(60.0)
            return super().connect(address)

    driver = Slow()
    with Engine("decode", transport=lambda: driver) as decode:
        ticket = prefill.serve("p-1", [1], 4)
        decode.pull("d-1", ticket, [2])
        assert begun.wait(60.0)
        gone = (PeerKey.of(ticket), ticket.incarnation, PeerLostError("it died"))
        decode.endpoint.relay(ProducerNews(gone=(gone,)))
        assert isinstance(decode.error("d-1"), PeerLostError)
        released.set()
        eventually(lambda: bool(driver.disconnected), "it is disconnected")
        assert driver.open_connections == 0


# Replies.


@pytest.fixture
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[str]]:
    """Let replies be read only after the event; return it, and whose were begun to be read."""
    monkeypatch.setattr(directory, "AGAIN_SECONDS", 0.0)
    released, read, begun = threading.Event(), reply_decoder.ReplyDecoder.decode, list[str]()

    def slow(reader: reply_decoder.ReplyDecoder, reply: EncodedReply) -> HandshakeResult:
        begun.append(reply.address.engine)
        assert released.wait(60.0)
        return read(reader, reply)

    monkeypatch.setattr(reply_decoder.ReplyDecoder, "decode", slow)
    return released, begun


def test_replies_that_wait_to_be_read_are_bounded(
    monkeypatch: pytest.MonkeyPatch, slow_reads: tuple[threading.Event, list[str]]
) -> None:
    """Those dropped are asked for again; of those that were read, no encoded payload is kept."""
    monkeypatch.setattr(peers, "MAX_UNDECODED_BYTES", 0)
    with Engine("one") as one, Engine("two") as two, Engine("decode") as decode:
        known, told = decode.endpoint._load_manager.peers, decode.directory._directory._producers
        pull(one, decode, 1)
        eventually(lambda: bool(known._undecoded), "its reply is being read")
        pull(two, decode, 2)
        eventually(
            lambda: two.incarnation in {incarnation for _, incarnation, _ in told},
            "its reply is dropped",
        )
        assert len(known._undecoded) == 1
        slow_reads[0].set()
        assert outcomes(decode, 1, 2) == [None, None]
        assert not any(each.reply.nbytes for each in known._producers.values())


def test_replies_of_producers_that_go_before_they_are_read_are_dropped(
    slow_reads: tuple[threading.Event, list[str]],
) -> None:
    with Engine("one") as one, Engine("two") as two, Engine("decode") as decode:
        known = decode.endpoint._load_manager.peers
        for number, producer in enumerate((one, two), 1):
            pull(producer, decode, number)
            eventually(lambda: len(known._undecoded) == number, "its reply is there")  # noqa: B023
        error = PeerLostError("it died")
        gone = [(each.key, each.reply.incarnation, error) for each in known._undecoded]
        decode.endpoint.relay(ProducerNews(gone=tuple(gone)))
        assert all(isinstance(error, PeerLostError) for error in outcomes(decode, 1, 2))
        slow_reads[0].set()
        eventually(lambda: not known._undecoded, "none is left to be read")
        assert slow_reads[1] == ["one"]
        assert known._memory.nbytes == 0
        assert decode.endpoint.healthy


@pytest.mark.parametrize(
    ("joined", "error", "words"),
    [
        ((), HandshakeError, r"call join\(\) first"),
        ((payload(agreement={"vllm": "1"}),), PlanError, r" \(.*vllm.* here, .*"),
    ],
)
def test_a_reply_that_cannot_be_planned_is_refused(
    joined: tuple[RankPayload, ...], error: type[KVFerryError], words: str
) -> None:
    """With what differs in the software of the engines, where that may be why."""
    there = payload(agreement={"vllm": "2"})
    fields = (msgspec.structs.replace(there.layout.fields[0], key="layer.0/v"),)
    there = msgspec.structs.replace(there, layout=replace(there.layout, fields=fields))
    judgements = Judgements(told=frozenset({"vllm"}))
    reader = reply_decoder.ReplyDecoder(EndpointOptions(judgements=judgements), 0)
    if joined:
        reader.join(joined)
    with pytest.raises(error, match=words):
        reader.decode(reply_at(1, encode(there)))


# Memory, and how many are kept.


@pytest.mark.parametrize(
    ("files", "limit"),
    [(16, 2), (4, 1), (1024, 128), (1 << 20, 1024), (resource.RLIM_INFINITY, 1024)],
)
def test_the_number_of_peers_is_bounded_by_the_file_limit(
    files: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert most_peers() == limit


def test_memory_for_what_peers_publish_is_bounded(
    decode: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "AGAIN_SECONDS", 0.0)
    with Engine("one") as one, Engine("two") as two:
        assert load(one, decode, 1) is None
        with monkeypatch.context() as patch:
            patch.setattr(peers, "MAX_KEPT_BYTES", 100)
            error = load(two, decode, 2)
        assert isinstance(error, ConnectError)
        assert "of 100" in str(error)
        assert load(two, decode, 3) is None


class AnyAddressTransport(RecordingTransport):
    """A transport for which every address is another peer."""

    def connect(self, address: bytes) -> PeerId:
        made = PeerId(1000 + len(self.connected))
        self.connected.add(made)
        return made

    def disconnect(self, peer: PeerId) -> None:
        self.disconnected.add(peer)


@contextmanager
def any_engine(like: Engine, *more: RankPayload) -> Iterator[int]:
    """Serve a side channel that answers as whatever engine it is asked for; yield its port.

    It publishes the first rank of ``like``, and the ranks in ``more``.
    """

    def answer(_: bytes, asked: Any) -> bytes:
        if not isinstance(asked, PayloadRequest):
            return encode(Pong(incarnation=like.incarnation))
        ranks = [
            msgspec.structs.replace(
                each, engine=asked.engine, address=f"{asked.engine}, rank {each.rank}".encode()
            )
            for each in (like.endpoint.payload, *more)
        ]
        return encode(Payloads(ranks=[*map(encode, ranks)]))

    with SideChannel(answer) as channel:
        yield channel.port


def test_many_claimed_engine_names_take_few_threads_and_descriptors(
    prefill: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "MAX_PEERS", 25)
    driver = AnyAddressTransport()
    with Engine("decode", transport=lambda: driver) as decode, any_engine(prefill) as port:
        ticket = prefill.serve("p-1", [1], 4)
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for first in range(0, 100, 20):
            names = range(first, first + 20)
            for number in names:
                decode.pull(f"d-{number}", replace(ticket, engine=f"e-{number}", port=port), [2])
            eventually(lambda: len(driver.connected) > names[-1], "all are connected")  # noqa: B023
            for number in names:
                decode.endpoint.abort(RequestId(f"d-{number}"))
                decode.directory.end(f"d-{number}")
            eventually(lambda: not decode.endpoint.pending, "all are over")
        eventually(lambda: 0 < driver.open_connections <= 25, "most are given up")
        eventually(lambda: threading.active_count() <= threads + 1, "one thread checks all peers")
        # Two for each that is watched, and four where the other end is, in this process too.
        eventually(lambda: len(os.listdir("/proc/self/fd")) < files + 25 * 4 + 10, "few are open")


def test_an_engine_whose_ranks_differ_in_groups_is_refused_alone(
    prefill: Engine, decode: Engine
) -> None:
    """Also if it answers in another's name, at another address: that one is not spoilt."""
    one = prefill.endpoint.payload
    more = replace(one.layout, groups=one.layout.groups * 2)
    other = msgspec.structs.replace(one, rank=1, coordinates=Coordinates(tp=1), layout=more)
    with any_engine(prefill, other) as port:
        ticket = replace(prefill.serve("p-1", [1], 4), port=port)
        for number in (1, 2):
            error = decode.load(f"d-{number}", ticket, [1])
            assert isinstance(error, HandshakeError)
            assert "rank 0 has 1 groups, rank 1 2" in str(error)
        assert load(prefill, decode, 3) is None
    assert decode.endpoint.healthy
