"""How many producers a rank knows, and what it keeps of them: bounded, and the idle go first."""

from __future__ import annotations

import os
import queue
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import msgspec
import pytest
import zmq

from kvferry.core.endpoint import EndpointOptions, peers
from kvferry.core.endpoint import peers as peers_module
from kvferry.core.endpoint.handshakes import PeerKey, memory_of
from kvferry.core.endpoint.liveness import LivenessChecks
from kvferry.core.endpoint.peers import PeerMemoryBudget, most_peers
from kvferry.core.errors import ConnectError, HandshakeError, KVFerryError
from kvferry.core.handshake.sockets import Context
from kvferry.core.layout import Layout
from kvferry.core.lifecycle.holds import Incarnation, RequestId
from kvferry.core.messages import (
    Coordinates,
    PayloadRequest,
    Payloads,
    Pong,
    RankPayload,
    decode_payload,
    decode_request,
    encode,
)
from kvferry.core.planner.plan import make_plan
from kvferry.core.transport import PeerId
from tests.core.endpoint.engines import Engine, Watched, engine, eventually
from tests.core.messages import payload


def test_what_several_keep_is_counted_once() -> None:
    kept = PeerMemoryBudget()
    kept.add({1: 10, 2: 5})
    kept.add({1: 12, 3: 7})
    assert kept.nbytes == 22
    kept.remove({1: 10, 2: 5})
    assert kept.nbytes == 17
    kept.remove({1: 12, 3: 7})
    assert kept.nbytes == 0
    kept.add({1: 12})
    assert kept.nbytes == 12


def test_engines_that_are_laid_out_alike_share_their_fields() -> None:
    def met(address: int) -> tuple[dict[int, int], Layout]:
        one = payload()
        regions = (msgspec.structs.replace(one, layout=one.layout).layout.regions[0],)
        moved = one.layout.with_regions((replace(regions[0], address=address),))
        data = encode(msgspec.structs.replace(one, layout=moved))
        got = decode_payload(data)
        made = make_plan([one.layout], [got.layout], 0)
        held.append((got, made))
        return dict(memory_of([got], [len(data)], made)), got.layout

    held: list[object] = []
    kept = PeerMemoryBudget()
    (first, layout), (second, other) = met(1 << 20), met(1 << 21)
    assert layout.fields is other.fields
    kept.add(first)
    before = kept.nbytes
    kept.add(second)
    assert 0 < kept.nbytes - before < sum(second.values())


@pytest.mark.parametrize(
    ("files", "most"),
    [(16, 2), (4, 1), (1024, 128), (1 << 20, 1024), (resource.RLIM_INFINITY, 1024)],
)
def test_they_take_a_part_of_the_files(
    files: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert most_peers() == most


def load(prefill: Engine, decode: Engine, number: int) -> KVFerryError | None:
    """Why a load failed, if it did."""
    request = f"d-{prefill.name}-{number}"
    decode.pull(request, prefill.serve(f"p-{number}", [number], 4), [number])
    return decode.outcome(request).failed.get(RequestId(request))


def test_the_idle_that_were_used_longest_ago_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "most_peers", lambda: 2)
    driver = Watched()
    with ExitStack() as stack:
        some = [stack.enter_context(engine(name)) for name in ("one", "two", "three")]
        decode = stack.enter_context(engine("decode", transport=lambda: driver))
        for number, each in enumerate([some[0], some[1], some[0], some[2]], 1):
            assert load(each, decode, number) is None
        eventually(lambda: driver.links == 2, "one was given up")
        before = set(driver.connected)
        assert load(some[0], decode, 5) is None
        assert driver.connected == before  # the one that was used last was not


def test_where_all_are_in_use_the_new_one_is_refused_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "most_peers", lambda: 1)
    with engine("one") as one, engine("two") as two, engine("decode") as decode:
        assert load(one, decode, 1) is None
        one.compute("p-2", [2], 4)
        decode.pull("d-2", one.finish("p-2", [2], 4, computed=False, order=False), [2])
        error = load(two, decode, 3)
        assert isinstance(error, ConnectError)
        assert "there is no room for another engine: with it 1 are in use" in str(error)
        one.step()
        assert not decode.outcome("d-2").failed
        eventually(lambda: load(two, decode, 4) is None, "it has room, and is asked again")


def test_what_they_publish_takes_a_bounded_part_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Watched()
    with engine("one") as one, engine("two") as two, engine("decode") as decode:
        assert load(one, decode, 1) is None
        monkeypatch.setattr(peers, "MAX_KEPT_BYTES", 100)
        error = load(two, decode, 2)
        assert isinstance(error, ConnectError)
        assert "of 100" in str(error)
        monkeypatch.undo()
        assert load(two, decode, 3) is None
    assert driver.links == 0


class Anywhere(Watched):
    """A driver for which every address is another peer."""

    def connect(self, address: bytes) -> PeerId:
        made = PeerId(1000 + len(self.connected))
        self.connected.add(made)
        return made

    def disconnect(self, peer: PeerId) -> None:
        self.disconnected.add(peer)


@contextmanager
def anybody(like: Engine, *more: RankPayload) -> Iterator[int]:
    """The port of a side channel that is any engine that it is asked for; with more ranks."""
    published = like.ranks[0].endpoint.payload
    context: Context = zmq.Context()
    ended = threading.Event()

    def answer() -> None:
        with context.socket(zmq.ROUTER) as channel:
            channel.linger = 0
            ports.append(channel.bind_to_random_port("tcp://127.0.0.1"))
            bound.set()
            while not ended.is_set():
                if channel.poll(50):
                    routing_id, question = channel.recv_multipart()
                    asked = decode_request(question)
                    mine = [
                        encode(
                            msgspec.structs.replace(
                                each,
                                engine=asked.engine,
                                address=f"{asked.engine}, rank {each.rank}".encode(),
                            )
                        )
                        for each in (published, *more)
                    ]
                    pong = Pong(incarnation=published.incarnation)
                    said = Payloads(ranks=mine) if isinstance(asked, PayloadRequest) else pong
                    channel.send_multipart([routing_id, encode(said)])

    ports: list[int] = []
    bound = threading.Event()
    thread = threading.Thread(target=answer)
    thread.start()
    assert bound.wait(20)
    yield ports[0]
    ended.set()
    thread.join()
    context.destroy(0)


def test_hundreds_of_claimed_names_take_few_threads_and_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "MAX_PEERS", 25)
    driver = Anywhere()
    with (
        engine("prefill") as prefill,
        engine("decode", transport=lambda: driver) as decode,
        anybody(prefill) as port,
    ):
        ticket = prefill.serve("p-1", [1], 4)
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for number in range(400):
            decode.pull(f"d-{number}", replace(ticket, engine=f"e-{number}", port=port), [2])
        for number in range(400):
            decode.ranks[0].endpoint.abort(RequestId(f"d-{number}"))
        eventually(lambda: not decode.ranks[0].endpoint.pending, "all are over", 100)
        eventually(lambda: len(driver.connected) > 25, "more were connected")
        eventually(lambda: 0 < driver.links <= 25, "most were given up")
        eventually(lambda: threading.active_count() <= threads + 1, "one thread watches all")
        # Two for each that is watched, and four where the other end is, in this process too.
        eventually(lambda: len(os.listdir("/proc/self/fd")) < files + 25 * 4 + 10, "few are open")


def test_ranks_with_unlike_numbers_of_groups_are_refused_and_nothing_else_ends() -> None:
    with engine("prefill") as prefill, engine("decode") as decode:
        one = prefill.ranks[0].endpoint.payload
        more = replace(one.layout, groups=one.layout.groups * 2)
        other = msgspec.structs.replace(
            one, rank=1, coordinates=Coordinates(tp=1), layout=more, address=b"elsewhere"
        )
        with anybody(prefill, other) as port:
            ticket = replace(prefill.serve("p-1", [1], 4), engine="odd", port=port)
            decode.pull("d-1", ticket, [1])
            error = decode.outcome("d-1").failed[RequestId("d-1")]
        assert isinstance(error, HandshakeError)
        assert "rank 0 has 1 groups, rank 1 2" in str(error)
        assert load(prefill, decode, 2) is None
        assert decode.ranks[0].endpoint.healthy


def test_a_producer_that_is_mute_delays_the_death_of_no_other() -> None:
    options = EndpointOptions(liveness_interval=30.0, liveness_misses=3)
    with (
        engine("one") as one,
        engine("two") as two,
        socket.create_server(("127.0.0.1", 0)) as mute,
    ):
        watches, lost = LivenessChecks(options), queue.SimpleQueue[KVFerryError]()

        def watch(name: str, port: int, incarnation: int) -> Callable[[], None]:
            key = PeerKey(name, "127.0.0.1", port)
            return watches.start(key, "127.0.0.1", Incarnation(incarnation), lost=lost.put)

        watch("mute", mute.getsockname()[1], 1)
        watch("one", one.server.port, one.incarnation)
        stop = watch("two", two.server.port, two.incarnation)
        one.server.close()
        assert "engine one missed 3 of 3 pings: nobody listens" in str(lost.get(timeout=20))
        stop()
        stop()
        watches.close()
        watches.close()
