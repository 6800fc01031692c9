"""The serving side, over a worker that only notes what it is asked."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import cast

import pytest

from kvferry.core.errors import TransportError
from kvferry.drivers.ucx import server as module
from kvferry.drivers.ucx.messages import Bye, Hello, Message, Note, Refused, Store, Stored, Welcome
from kvferry.drivers.ucx.server import Server
from kvferry.drivers.ucx.ucp import Endpoint
from kvferry.drivers.ucx.worker import Worker
from tests.drivers.test_ucx_format import ONE, UNIFIED

INSTANCE = b"i" * 16
CONNECTION, OTHER = b"1" * 16, b"2" * 16


class Noted:
    """A worker that notes, by addresses, whom it connects to, what it says, and whom it closes."""

    def __init__(self, address: bytes = ONE) -> None:
        self.address = address
        self.arrived: deque[Message] = deque()
        self.connected: list[bytes] = []
        self.said: list[tuple[bytes, Message]] = []
        self.ended: list[bytes] = []
        self.closing = False
        self.numbers = itertools.count(1)
        self.unreachable: set[bytes] = set()

    def run_once(self) -> bool:
        return False

    def failures(self) -> list[tuple[int, int]]:
        return []

    def messages(self) -> Iterator[Message]:
        while self.arrived:
            yield self.arrived.popleft()

    def connect(self, address: bytes) -> tuple[Endpoint, int]:
        if address in self.unreachable:
            raise TransportError("destination is unreachable")
        self.connected.append(address)
        return Endpoint(len(self.connected)), next(self.numbers)

    def send(self, endpoint: Endpoint, message: Message) -> None:
        self.said.append((self.connected[endpoint - 1], message))

    def close_endpoint(self, endpoint: Endpoint) -> None:
        self.ended.append(self.connected[endpoint - 1])


class Host:
    """A server over such a worker."""

    def __init__(self, address: bytes = ONE) -> None:
        self.worker = worker = Noted(address)
        self.server = Server(lambda: cast(Worker, worker), INSTANCE)

    def hear(self, *messages: Message) -> None:
        self.worker.arrived.extend(messages)
        self.server.run_once()

    def hear_while_closing(self, *messages: Message) -> None:
        """Hear them while an endpoint is being closed, which makes hellos wait."""
        self.worker.closing = True
        self.hear(*messages)
        self.worker.closing = False
        self.server.run_once()

    def notifications(self) -> list[tuple[str, bytes]]:
        return [(note.sender, note.payload) for note in self.server.take_notifications()]


@pytest.fixture
def host() -> Host:
    return Host()


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


def test_who_knows_the_instance_is_answered(host: Host) -> None:
    host.hear(hello())
    assert host.worker.said == [(ONE, Welcome(CONNECTION, []))]
    host.hear(Note(CONNECTION, b"hello"))
    assert host.notifications() == [("one", b"hello")]


def test_a_client_that_is_gone_and_a_message_for_a_client_change_nothing(host: Host) -> None:
    host.worker.unreachable.add(worker_of(1))
    host.hear(hello(OTHER, "gone", worker_of(1)), Note(OTHER, b"nobody"))
    host.hear(hello(), Welcome(CONNECTION, []), Note(CONNECTION, b"hello"))
    assert host.worker.said == [(ONE, Welcome(CONNECTION, []))]
    assert host.notifications() == [("one", b"hello")]


def test_what_is_for_another_instance_is_dropped_and_its_worker_is_not_connected_to(
    host: Host,
) -> None:
    host.hear(hello(server=bytes(16)), hello(server=bytes(16), worker=b"nonsense"))
    assert host.worker.connected == []
    # Nor does it end the connection of whoever has that name.
    host.hear(hello(), hello(server=bytes(16), connection=OTHER))
    assert (host.worker.connected, host.worker.ended) == ([ONE], [])


@pytest.mark.parametrize(
    "address",
    [b"\0", b"nonsense", ONE[:-1], b"\x2f" + ONE[1:], UNIFIED],
    ids=["a byte", "nonsense", "cut", "another version", "another format"],
)
def test_what_ucx_did_not_pack_does_not_reach_it(host: Host, address: bytes) -> None:
    host.hear(hello(worker=address))
    assert host.worker.connected == []


def test_where_ucx_packs_in_another_way_it_is_given_what_it_packed() -> None:
    host = Host(UNIFIED)
    host.hear(hello(worker=UNIFIED))
    assert host.worker.connected == [UNIFIED]


def test_a_second_hello_with_a_connections_id_does_not_take_its_place(host: Host) -> None:
    host.hear(hello(client="one", worker=worker_of(1)))
    host.hear(hello(client="two", worker=worker_of(2)))
    host.hear(hello(client="one", worker=worker_of(3), index=1))
    assert (host.worker.connected, host.worker.ended) == ([worker_of(1)], [])
    host.hear(Note(CONNECTION, b"x"))
    assert host.notifications() == [("one", b"x")]
    # Nor where the first is not answered yet.
    host.hear_while_closing(hello(OTHER, "three", worker_of(4)), hello(OTHER, "four", worker_of(5)))
    assert host.worker.connected[1:] == [worker_of(4)]


def test_a_client_may_begin_its_own_connection_again(host: Host) -> None:
    host.hear(hello(worker=worker_of(1)))
    host.hear(hello(worker=worker_of(2)))
    assert (host.worker.connected, host.worker.ended) == (
        [worker_of(1), worker_of(2)],
        [worker_of(1)],
    )


def test_a_store_is_refused_and_dropped_once_a_hello_has_replaced_its_connection(
    host: Host,
) -> None:
    """The endpoint of the replaced connection may still be open."""
    host.hear(hello(worker=worker_of(1)))
    host.hear(Store(CONNECTION, 5, 1))
    host.hear(hello(OTHER, worker=worker_of(2)), Store(CONNECTION, 6, 1))
    assert host.worker.said == [
        (worker_of(1), Welcome(CONNECTION, [])),
        (worker_of(1), Stored(CONNECTION, 5, "this build takes no writes")),
        (worker_of(2), Welcome(OTHER, [])),
    ]


def test_beyond_so_many_connections_clients_are_refused(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(module, "MAX_REFUSED", 3)
    host.hear(*(hello(bytes([n]) * 16, str(n), worker_of(n)) for n in range(8)))
    said = [message for _, message in host.worker.said]
    assert [type(message) for message in said] == [Welcome] * 2 + [Refused] * 6
    assert isinstance(said[-1], Refused)
    assert "it serves 2 connections, and no more" in said[-1].reason
    # A refusal is given time to arrive, a bounded number of them.
    assert host.worker.ended == [worker_of(number) for number in (2, 3, 4)]
    # A place that is given up is taken by the next.
    host.hear(Bye(bytes(16)), hello(OTHER, "x", worker_of(9)))
    assert host.worker.said[-1] == (worker_of(9), Welcome(OTHER, []))


def test_beyond_so_many_that_wait_hellos_are_dropped(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_HELLOS", 2)
    host.hear_while_closing(*(hello(bytes([n]) * 16, str(n), worker_of(n)) for n in range(4)))
    assert host.worker.connected == [worker_of(0), worker_of(1)]


def test_hellos_that_come_at_once_and_need_not_wait_are_all_answered(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_HELLOS", 2)
    host.hear(*(hello(bytes([n]) * 16, str(n), worker_of(n)) for n in range(5)))
    assert host.worker.connected == [worker_of(number) for number in range(5)]


def test_a_client_that_begins_again_while_it_waits_has_one_connection(host: Host) -> None:
    """The first would answer to nothing, and hold up every deregistration."""
    host.hear_while_closing(
        hello(CONNECTION, "one", worker_of(1)), hello(OTHER, "one", worker_of(2))
    )
    assert host.worker.said == [(worker_of(2), Welcome(OTHER, []))]


def test_of_too_many_notifications_the_client_with_most_pays(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BACKLOG", 8 * (module._NOTIFICATION_BYTES + 4))
    host.hear(hello(CONNECTION, "floods", worker_of(1)))
    host.hear(hello(b"3" * 16, "floods", worker_of(1), index=1))
    host.hear(hello(OTHER, "honest", worker_of(2)))
    # In turns, so that it is not the first, nor the last, that has most.
    for _ in range(4):
        host.hear(Note(CONNECTION, b"spam"))
    host.hear(Note(OTHER, b"done"))
    host.hear(*[Note(b"3" * 16, b"spam")] * 4, Note(OTHER, b"more"))
    assert host.worker.ended == [worker_of(1)] * 2
    assert host.notifications() == [("honest", b"done"), ("honest", b"more")]
    # What it sends on its ended connections is dropped, and counts no more.
    host.hear(*[Note(CONNECTION, b"spam")] * 20, *[Note(OTHER, b"done")] * 8)
    assert len(host.notifications()) == 8
    assert host.worker.ended == [worker_of(1)] * 2
