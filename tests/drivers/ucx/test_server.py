"""The serving side, over a worker that only notes what it is asked."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import cast

import pytest

from kvferry.drivers.ucx import server as module
from kvferry.drivers.ucx.messages import (
    Bye,
    Hello,
    Message,
    Note,
    Refused,
    Store,
    Stored,
    Welcome,
)
from kvferry.drivers.ucx.server import Server
from kvferry.drivers.ucx.ucp import Endpoint
from kvferry.drivers.ucx.worker import Worker
from tests.drivers.test_ucx_format import ONE, UNIFIED

INSTANCE = b"i" * 16
CONNECTION, OTHER = b"1" * 16, b"2" * 16


class Noted:
    """A worker.

    Attributes:
        arrived: what it has heard and not handed over.
        connected: the addresses of workers that it was told to connect to.
        said: to whom, by the addresses, and what.
        ended: the endpoints that were closed, likewise.
        closing: whether one is being closed.
    """

    def __init__(self, address: bytes = ONE) -> None:
        self.address = address
        self.arrived: deque[Message] = deque()
        self.connected: list[bytes] = []
        self.said: list[tuple[bytes, Message]] = []
        self.ended: list[bytes] = []
        self.closing = False
        self.numbers = itertools.count(1)

    def run_once(self) -> bool:
        return False

    def failures(self) -> list[tuple[int, int]]:
        return []

    def messages(self) -> Iterator[Message]:
        while self.arrived:
            yield self.arrived.popleft()

    def connect(self, address: bytes) -> tuple[Endpoint, int]:
        self.connected.append(address)
        return Endpoint(len(self.connected)), next(self.numbers)

    def send(self, endpoint: Endpoint, message: Message) -> None:
        self.said.append((self.connected[endpoint - 1], message))

    def close_endpoint(self, endpoint: Endpoint) -> None:
        self.ended.append(self.connected[endpoint - 1])


def hosted(address: bytes = ONE) -> tuple[Server, Noted]:
    worker = Noted(address)
    return Server(lambda: cast(Worker, worker), INSTANCE), worker


def worker_of(number: int) -> bytes:
    """Another worker's address for each number."""
    return ONE[:1] + number.to_bytes(8, "little") + ONE[9:]


def hello(
    connection: bytes = CONNECTION,
    client: str = "one",
    worker: bytes = ONE,
    server: bytes = INSTANCE,
    index: int = 0,
) -> Hello:
    return Hello(connection, server, client, worker, 0, index)


def hear(server: Server, worker: Noted, *messages: Message) -> None:
    worker.arrived.extend(messages)
    server.run_once()


def test_who_knows_the_instance_is_answered() -> None:
    server, worker = hosted()
    hear(server, worker, hello())
    assert worker.said == [(ONE, Welcome(CONNECTION, []))]
    hear(server, worker, Note(CONNECTION, b"hello"))
    assert [note.sender for note in server.take_notifications()] == ["one"]


def test_what_is_for_another_instance_is_dropped_and_its_worker_is_not_connected_to() -> None:
    server, worker = hosted()
    hear(server, worker, hello(server=bytes(16)), hello(server=bytes(16), worker=b"nonsense"))
    assert worker.connected == []
    # Nor does it end the connection of whoever has that name.
    hear(server, worker, hello(), hello(server=bytes(16), connection=OTHER))
    assert (worker.connected, worker.ended) == ([ONE], [])


@pytest.mark.parametrize(
    "address",
    [b"\0", b"nonsense", ONE[:-1], b"\x2f" + ONE[1:], UNIFIED],
    ids=["a byte", "nonsense", "cut", "another version", "another format"],
)
def test_what_ucx_did_not_pack_does_not_reach_it(address: bytes) -> None:
    server, worker = hosted()
    hear(server, worker, hello(worker=address))
    assert worker.connected == []


def test_where_ucx_packs_in_another_way_it_is_given_what_it_packed() -> None:
    server, worker = hosted(UNIFIED)
    hear(server, worker, hello(worker=UNIFIED))
    assert worker.connected == [UNIFIED]


def test_a_second_hello_with_a_connections_id_does_not_take_its_place() -> None:
    server, worker = hosted()
    hear(server, worker, hello(client="one", worker=worker_of(1)))
    hear(server, worker, hello(client="two", worker=worker_of(2)))
    hear(server, worker, hello(client="one", worker=worker_of(3), index=1))
    assert (worker.connected, worker.ended) == ([worker_of(1)], [])
    hear(server, worker, Note(CONNECTION, b"x"))
    assert [note.sender for note in server.take_notifications()] == ["one"]
    # Nor where the first is not answered yet.
    worker.closing = True
    hear(server, worker, hello(OTHER, "three", worker_of(4)), hello(OTHER, "four", worker_of(5)))
    worker.closing = False
    server.run_once()
    assert worker.connected[1:] == [worker_of(4)]


def test_a_client_may_begin_its_own_connection_again() -> None:
    server, worker = hosted()
    hear(server, worker, hello(worker=worker_of(1)))
    hear(server, worker, hello(worker=worker_of(2)))
    assert (worker.connected, worker.ended) == ([worker_of(1), worker_of(2)], [worker_of(1)])


def test_a_store_is_refused_and_dropped_once_a_hello_has_replaced_its_connection() -> None:
    """The endpoint of the replaced connection may still be open."""
    server, worker = hosted()
    hear(server, worker, hello(worker=worker_of(1)))
    hear(server, worker, Store(CONNECTION, 5, 1))
    hear(server, worker, hello(OTHER, worker=worker_of(2)), Store(CONNECTION, 6, 1))
    assert worker.said == [
        (worker_of(1), Welcome(CONNECTION, [])),
        (worker_of(1), Stored(CONNECTION, 5, "this build takes no writes")),
        (worker_of(2), Welcome(OTHER, [])),
    ]


def test_beyond_so_many_connections_clients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(module, "MAX_REFUSED", 3)
    server, worker = hosted()
    for number in range(8):
        hear(
            server,
            worker,
            hello(number.to_bytes(16, "little"), str(number), worker_of(number)),
        )
    said = [message for _, message in worker.said]
    assert [type(message) for message in said] == [Welcome] * 2 + [Refused] * 6
    assert isinstance(said[-1], Refused)
    assert "it serves 2 connections, and no more" in said[-1].reason
    # A refusal is given time to arrive, a bounded number of them.
    assert worker.ended == [worker_of(number) for number in (2, 3, 4)]
    # A place that is given up is taken by the next.
    hear(server, worker, Bye((0).to_bytes(16, "little")), hello(OTHER, "x", worker_of(9)))
    assert worker.said[-1] == (worker_of(9), Welcome(OTHER, []))


def test_beyond_so_many_that_wait_hellos_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_HELLOS", 2)
    server, worker = hosted()
    worker.closing = True
    for number in range(4):
        hear(
            server,
            worker,
            hello(number.to_bytes(16, "little"), str(number), worker_of(number)),
        )
    worker.closing = False
    server.run_once()
    assert worker.connected == [worker_of(0), worker_of(1)]


def test_hellos_that_come_at_once_and_need_not_wait_are_all_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_HELLOS", 2)
    server, worker = hosted()
    greetings = [hello(bytes([n]) * 16, str(n), worker_of(n)) for n in range(5)]
    hear(server, worker, *greetings)
    assert worker.connected == [worker_of(number) for number in range(5)]


def test_a_client_that_begins_again_while_it_waits_has_one_connection() -> None:
    """The first would answer to nothing, and hold up every deregistration."""
    server, worker = hosted()
    worker.closing = True
    hear(server, worker, hello(CONNECTION, "one", worker_of(1)), hello(OTHER, "one", worker_of(2)))
    worker.closing = False
    server.run_once()
    assert worker.said == [(worker_of(2), Welcome(OTHER, []))]


def test_of_too_many_notifications_the_client_with_most_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_BACKLOG", 8 * (module._NOTIFICATION_BYTES + 4))
    server, worker = hosted()
    hear(server, worker, hello(CONNECTION, "floods", worker_of(1)))
    hear(server, worker, hello(b"3" * 16, "floods", worker_of(1), index=1))
    hear(server, worker, hello(OTHER, "honest", worker_of(2)))
    # In turns, so that it is not the first, nor the last, that has most.
    for _ in range(4):
        hear(server, worker, Note(CONNECTION, b"spam"))
    hear(server, worker, Note(OTHER, b"done"))
    hear(server, worker, *[Note(b"3" * 16, b"spam")] * 3, Note(OTHER, b"more"))
    assert worker.ended == [worker_of(1)] * 2
    found = server.take_notifications()
    assert [(note.sender, note.payload) for note in found] == [
        ("honest", b"done"),
        ("honest", b"more"),
    ]
    # What it sends on its ended connections is dropped, and counts no more.
    hear(server, worker, *[Note(CONNECTION, b"spam")] * 20, *[Note(OTHER, b"done")] * 8)
    assert len(server.take_notifications()) == 8
    assert worker.ended == [worker_of(1)] * 2


def test_a_client_that_was_cut_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BACKLOG", 2 * (module._NOTIFICATION_BYTES + 4))
    server, worker = hosted()
    hear(server, worker, hello(), *[Note(CONNECTION, b"spam")] * 9)
    assert (worker.ended, server.take_notifications()) == ([ONE], [])
    hear(server, worker, hello())
    hear(server, worker, Note(CONNECTION, b"done"))
    assert [note.payload for note in server.take_notifications()] == [b"done"]
