"""``Peers``: which are down, how many are kept, and how much memory they take."""

from __future__ import annotations

import os
import queue
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvferry.core import options
from kvferry.core.directory import EncodedReply, ProducerNews, directory
from kvferry.core.directory.pings import start_pings
from kvferry.core.endpoint import EndpointOptions, handshake_reader, peers
from kvferry.core.endpoint.handshake_reader import HandshakeResult, PeerMemoryBudget, memory_of
from kvferry.core.errors import (
    ConnectError,
    HandshakeError,
    KVFerryError,
    PeerLostError,
    PlanError,
)
from kvferry.core.layout import Layout
from kvferry.core.lifecycle.holds import Incarnation, RequestId
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.messages import Coordinates, RankPayload, decode_payload
from kvferry.core.metrics import PEERS_DOWN, PEERS_UP
from kvferry.core.options import most_peers
from kvferry.core.planner.plan import make_plan
from kvferry.core.side_channel.compatibility import Judgements
from kvferry.core.side_channel.tasks import Task
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
from tests.core.endpoint.transports import ScriptedTransport
from tests.core.messages import payload


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
        eventually(lambda: driver.open_connections == 1, "it is connected")
        let_go = ProducerNews(gone=((PeerKey.of(ticket), ticket.incarnation, None),))
        decode.endpoint.relay(let_go)
        prefill.step()
        assert decode.error("d-1") is None
        eventually(lambda: driver.open_connections == 0, "it is disconnected")


def test_a_producer_that_could_not_be_connected_is_tried_again_after_a_pause(
    prefill: Engine, clock: Clock
) -> None:
    driver = ScriptedTransport()
    with Engine("decode", transport=lambda: driver, clock=clock) as decode:
        driver.raises["connect"] = ConnectError("nobody there")
        assert isinstance(load(prefill, decode, 1), ConnectError)
        del driver.raises["connect"]
        pull(prefill, decode, 2)
        eventually(lambda: bool(decode.endpoint._load_manager.peers._backing_off), "it waits")
        assert not driver.connected
        clock.skip(0.1)
        assert outcomes(decode, 2) == [None]
        assert not decode.endpoint._load_manager.peers._backing_off


def test_objects_that_several_peers_keep_are_counted_once() -> None:
    budget = PeerMemoryBudget()
    budget.add({1: 10, 2: 5})
    budget.add({1: 12, 3: 7})
    assert budget.nbytes == 22
    budget.remove({1: 10, 2: 5})
    assert budget.nbytes == 17
    budget.remove({1: 12, 3: 7})
    assert budget.nbytes == 0
    budget.add({1: 12})
    assert budget.nbytes == 12


def test_engines_with_the_same_layout_share_their_fields() -> None:
    def receive(address: int) -> tuple[dict[int, int], Layout]:
        one = payload()
        regions = (msgspec.structs.replace(one, layout=one.layout).layout.regions[0],)
        moved = one.layout.with_regions((replace(regions[0], address=address),))
        data = encode(msgspec.structs.replace(one, layout=moved))
        got = decode_payload(data)
        made = make_plan([one.layout], [got.layout], 0)
        published.append((got, made))
        return dict(memory_of([got], [len(data)], made)), got.layout

    published: list[object] = []
    budget = PeerMemoryBudget()
    (first, layout), (second, other) = receive(1 << 20), receive(1 << 21)
    assert layout.fields is other.fields
    budget.add(first)
    before = budget.nbytes
    budget.add(second)
    assert 0 < budget.nbytes - before < sum(second.values())


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


def test_replies_that_wait_to_be_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those dropped are asked for again; of those that were read, no encoded payload is kept."""
    monkeypatch.setattr(directory, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(peers, "MAX_UNREAD_BYTES", 0)
    released, read = threading.Event(), handshake_reader.ReplyReader.read

    def slow(reader: handshake_reader.ReplyReader, reply: EncodedReply) -> HandshakeResult:
        assert released.wait(60.0)
        return read(reader, reply)

    monkeypatch.setattr(handshake_reader.ReplyReader, "read", slow)
    with Engine("one") as one, Engine("two") as two, Engine("decode") as decode:
        known = decode.endpoint._load_manager.peers
        pull(one, decode, 1)
        eventually(lambda: bool(known._unread), "its reply is being read")
        pull(two, decode, 2)
        eventually(lambda: two.incarnation in asked(decode), "its reply is dropped")
        assert len(known._unread) == 1
        released.set()
        assert outcomes(decode, 1, 2) == [None, None]
        assert not any(each.reply.nbytes for each in known._producers.values())


def test_replies_of_producers_that_go_before_they_are_read_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released, read, begun = threading.Event(), handshake_reader.ReplyReader.read, list[str]()

    def slow(reader: handshake_reader.ReplyReader, reply: EncodedReply) -> HandshakeResult:
        begun.append(reply.address.engine)
        assert released.wait(60.0)
        return read(reader, reply)

    monkeypatch.setattr(handshake_reader.ReplyReader, "read", slow)
    with Engine("one") as one, Engine("two") as two, Engine("decode") as decode:
        known = decode.endpoint._load_manager.peers
        for number, producer in enumerate((one, two), 1):
            pull(producer, decode, number)
            eventually(lambda: len(known._unread) == number, "its reply is there")  # noqa: B023
        gone = [
            (each.key, each.reply.incarnation, PeerLostError("it died")) for each in known._unread
        ]
        decode.endpoint.relay(ProducerNews(gone=tuple(gone)))
        assert all(isinstance(error, PeerLostError) for error in outcomes(decode, 1, 2))
        released.set()
        eventually(lambda: not known._unread, "none is left to be read")
        assert begun == ["one"]
        assert known._memory.nbytes == 0
        assert decode.endpoint.healthy


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
    reader = handshake_reader.ReplyReader(EndpointOptions(judgements=judgements), 0)
    if joined:
        reader.join(joined)
    reply = EncodedReply(
        address=PeerKey("prefill", "127.0.0.1", 1),
        incarnation=Incarnation(7),
        ranks=(encode(there),),
        numeric="127.0.0.1",
    )
    with pytest.raises(error, match=words):
        reader.read(reply)


def asked(decode: Engine) -> set[int]:
    """Whose replies the directory has sent."""
    return {incarnation for _, incarnation, _ in decode.directory._directory._producers}


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
    published = (like.endpoint.payload, *more)

    def answer(_: bytes, asked: Any) -> bytes:
        if not isinstance(asked, PayloadRequest):
            return encode(Pong(incarnation=like.incarnation))
        addresses = [f"{asked.engine}, rank {each.rank}".encode() for each in published]
        ranks = [
            encode(msgspec.structs.replace(each, engine=asked.engine, address=address))
            for each, address in zip(published, addresses, strict=True)
        ]
        return encode(Payloads(ranks=ranks))

    with SideChannel(answer) as channel:
        yield channel.port


def test_many_claimed_engine_names_take_few_threads_and_descriptors(
    prefill: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "MAX_PEERS", 25)
    driver = AnyAddressTransport()
    with (
        Engine("decode", transport=lambda: driver) as decode,
        any_engine(prefill) as port,
    ):
        ticket = prefill.serve("p-1", [1], 4)
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for first in range(0, 160, 20):
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
    other = msgspec.structs.replace(
        one, rank=1, coordinates=Coordinates(tp=1), layout=more, address=b"elsewhere"
    )
    with any_engine(prefill, other) as port:
        ticket = replace(prefill.serve("p-1", [1], 4), port=port)
        for number in (1, 2):
            error = decode.load(f"d-{number}", ticket, [1])
            assert isinstance(error, HandshakeError)
            assert "rank 0 has 1 groups, rank 1 2" in str(error)
        assert load(prefill, decode, 3) is None
    assert decode.endpoint.healthy


def test_a_silent_producer_does_not_delay_the_detection_of_another_ones_death() -> None:
    options = EndpointOptions(liveness_interval=30.0, liveness_misses=3)
    with (
        Engine("one") as one,
        Engine("two") as two,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        lost = queue.SimpleQueue[KVFerryError | None]()

        def pings(name: str, port: int, incarnation: int) -> Task:
            reply = EncodedReply(
                address=PeerKey(name, "127.0.0.1", port),
                incarnation=Incarnation(incarnation),
                ranks=(),
                numeric="127.0.0.1",
            )
            return start_pings(reply, options, wanted=lambda: True, lost=lost.put)

        tasks = [
            pings("silent", silent.getsockname()[1], 1),
            pings("one", one.server.port, one.incarnation),
            pings("two", two.server.port, two.incarnation),
        ]
        one.server.close()
        assert "engine one missed 3 of 3 pings: nobody listens" in str(lost.get(timeout=20))
        for task in [*tasks, *tasks]:
            task.cancel()


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
        reply = EncodedReply(
            address=PeerKey("prefill", "127.0.0.1", channel.port),
            incarnation=Incarnation(7),
            ranks=(),
            numeric="127.0.0.1",
        )
        options = EndpointOptions(liveness_interval=30.0, liveness_misses=1)
        start_pings(reply, options, wanted=wanted, lost=lost.put)
        assert words in str(lost.get(timeout=20))
